"""What server and clients must agree on before a job begins, and the digest that every message carries of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, TypeAdapter

from tailorfl.data.remote_federation import PARTS
from tailorfl.deploy.membership import DescribedClients, with_rows
from tailorfl.errors import MessageError
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.files import encode
from tailorfl.runs.fingerprint import deciding
from tailorfl.runs.job import Job
from tailorfl.settings.experiment import ExperimentConfig

LONGEST_NAME = 200
"""Characters of a client's name."""


@dataclass(frozen=True)
class Agreement:
    """One job of an experiment on a federation of clients that are elsewhere.

    Attributes:
        experiment: its settings, as `ExperimentConfig.to_dict`.
        label, seed: which of its jobs.
        names: of the clients, in the order of their numbers.
        sizes: for "train", "val" and "test" how many samples each client has.
        source: what a model has to know of the data, see `tailorfl.data.remote_federation.source_facts`.
        prepared: the constants by which raw samples were prepared, where clients do that by common ones.
    """

    experiment: dict[str, Any]
    label: str
    seed: int
    names: tuple[Annotated[str, Field(max_length=LONGEST_NAME)], ...]
    sizes: dict[str, tuple[NonNegativeInt, ...]]
    source: dict[str, Any]
    prepared: Any = None

    @property
    def job(self) -> Job:
        """The job. Raises MessageError where the settings cannot be read."""
        try:
            config = ExperimentConfig.model_validate(self.experiment)
        except ValueError as error:
            raise MessageError(
                f"the experiment cannot be read; is the server of another version? {error}"[:400]
            ) from error
        method = next((m for m in config.methods if m.label == self.label), None)
        if method is None or self.seed not in config.seeds:
            raise MessageError(f"the experiment has no line '{self.label[:80]}' with seed {self.seed}")
        return Job(config, method, self.seed)

    def known_to(self, clients: int) -> Agreement:
        """Return what those agree on who were told of the first so many clients alone."""
        if clients == len(self.names):
            return self
        sizes = {part: known[:clients] for part, known in self.sizes.items()}
        prepared = with_rows(self.prepared, lambda rows: rows[:clients])
        return replace(self, names=self.names[:clients], sizes=sizes, prepared=prepared)

    def facts(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Agreement:
        """Return what `facts` gave. Raises MessageError where it is something else."""
        try:
            agreement = _READER.validate_python(dict(facts))
        except (TypeError, ValueError) as error:
            raise MessageError(f"what is to be agreed on cannot be read: {error}"[:400]) from error
        if any(len(agreement.sizes.get(part, ())) != len(agreement.names) for part in PARTS):
            raise MessageError("what is to be agreed on has not one size for each client")
        return agreement

    def digest(self, sim: Simulation) -> str:
        """Return what stands for the job, its method, its settings, and the models' structure, in every message."""
        job = self.job
        about = {
            "name": self.experiment.get("name"),  # so an experiment under another name is another job
            "experiment": deciding(self.experiment),
            "method": job.method.model_dump(mode="json"),
            "rounds": job.rounds,
            "seed": self.seed,
            "names": list(self.names),
            "sizes": {part: list(sizes) for part, sizes in self.sizes.items()},
            "source": self.source,
            "prepared": self.prepared,
            "models": {group.name: structure(group.context.init.items()) for group in sim.groups},
        }
        return hashlib.sha256(encode(about).encode()).hexdigest()[:32]


_READER: TypeAdapter[Agreement] = TypeAdapter(Agreement)


def agreement_of(job: Job, clients: DescribedClients) -> Agreement:
    """Return what clients are to agree on for a job."""
    sizes: dict[str, tuple[int, ...]] = {part: tuple(clients.sizes[part]) for part in PARTS}
    return Agreement(
        job.config.to_dict(),
        job.method.label,
        job.seed,
        tuple(clients.names),
        sizes,
        clients.source,
        clients.prepared,
    )


def structure(tensors: Any) -> list[Sequence[Any]]:
    """Return the names, shapes and types of tensors, as JSON can hold them."""
    return [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors]
