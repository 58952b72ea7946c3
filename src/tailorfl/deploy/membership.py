"""Who takes part in a federation, and what they agree on before a job begins.

The server keeps who takes part in its result folder, in `federation.json`: by it a server that is started again knows
whose data it has been told of, who has left, and who has which model. Every message carries a digest of the agreement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, TypeAdapter

from tailorfl.core.method import make_method
from tailorfl.data.federation import PARTS
from tailorfl.deploy.messages import structure
from tailorfl.errors import ConfigError, MessageError, RunError, unknown
from tailorfl.rounds.groups import why_fixed
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.files import append_lines, decode, encode, write_text
from tailorfl.runs.fingerprint import deciding
from tailorfl.runs.folders import experiment_in
from tailorfl.runs.job import Job
from tailorfl.runs.privacy import privacy_of
from tailorfl.settings.experiment import ExperimentConfig

NAME, LEFT, ALLOWED = "federation.json", "left", "joining"
"""The file of a federation, and those of the names of clients that its operator has taken off, and of those who may
join though it has begun, one a line."""
LONGEST_NAME = 200
"""Characters of a client's name."""
Sizes = dict[str, list[int]]


@dataclass
class DescribedClients:
    """What clients have told of their data for one seed.

    Attributes:
        names: in the order of their numbers.
        sizes: for "train", "val" and "test" how many samples each has.
        source: what a model has to know of the data, see `tailorfl.data.remote_federation.source_facts`.
        prepared: by what clients with files of their own prepare their samples.
        shared: whether they have shares of the experiment's own data.
        groups: how many joined at once: those that it began with, then one after another; empty: all began with it.
    """

    names: list[str]
    sizes: Sizes
    source: dict[str, Any]
    prepared: Any
    shared: bool
    groups: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = self.groups or [len(self.names)]

    def with_client(self, name: str, sizes: Mapping[str, int], rows: int) -> DescribedClients:
        """Return these clients and one more, who joins with these numbers of samples, out of `rows` of its file."""
        return replace(
            self,
            names=[*self.names, name],
            sizes={part: [*counts, sizes[part]] for part, counts in self.sizes.items()},
            prepared=self.prepared and {**self.prepared, "rows": [*self.prepared["rows"], rows]},
            groups=[*self.groups, 1],
        )

    def known_to(self, client: int) -> int:
        """Return how many clients there were when a client joined, itself included: it is told of no others."""
        return next(total for total in accumulate(self.groups) if client < total)

    def joined_after(self, announced: int) -> tuple[tuple[str, ...], ...]:
        """Return the names of the clients beyond the first `announced`, in groups that joined at once."""
        ends = list(accumulate(self.groups))
        groups = [tuple(self.names[end - size : end]) for end, size in zip(ends, self.groups, strict=True)]
        return tuple(group for group, end in zip(groups, ends, strict=True) if end > announced)


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


def agreement_of(job: Job, clients: DescribedClients, first: int | None = None) -> Agreement:
    """Return what clients are to agree on for a job; with `first`, those who were told of the first so many alone."""
    sizes: dict[str, tuple[int, ...]] = {part: tuple(clients.sizes[part][:first]) for part in PARTS}
    prepared = clients.prepared and {**clients.prepared, "rows": clients.prepared["rows"][:first]}
    names, label = tuple(clients.names[:first]), job.method.label
    return Agreement(job.config.to_dict(), label, job.seed, names, sizes, clients.source, prepared)


@dataclass
class Membership:
    """The clients of an experiment.

    Attributes:
        path: of the file.
        experiment: name and settings that decide numbers.
        clients: seed of the data -> its clients.
        gone: names of those that have left for good.
        handed: folder of a job -> names of those that have got its last message.
    """

    path: Path
    experiment: dict[str, Any]
    clients: dict[str, DescribedClients] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    handed: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, out: Path, config: ExperimentConfig, begun: bool) -> Membership:
        """Return what a result folder holds of an experiment; of one that has not `begun` there nothing is known.

        Raises:
            RunError: the file is damaged.
        """
        path, experiment = out / NAME, {"name": config.name, **deciding(config.to_dict())}
        if not begun or not path.is_file():
            return cls(path, experiment)
        try:
            facts: Mapping[str, Any] = decode(path.read_text(encoding="utf-8"))
            if facts["experiment"] != decode(encode(experiment)):
                return cls(path, experiment)
            clients = {seed: DescribedClients(**fields) for seed, fields in facts["clients"].items()}
            handed = {job: set(names) for job, names in facts["handed"].items()}
            return cls(path, experiment, clients, set(facts["gone"]), handed)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise RunError(
                f"'{path}', which says who takes part in the federation, is damaged ({error}); restore it from a copy"
            ) from error

    def allowed(self) -> set[str]:
        """Return the names of those that the operator lets join, but for those that have left."""
        return _listed(self.path.with_name(ALLOWED)) - self.gone

    @property
    def left(self) -> set[str]:
        """The names of those that have left, or that the operator has taken off since the server last looked."""
        return self.gone | _listed(self.path.with_name(LEFT))

    def leave(self, names: Iterable[str], notify: Callable[[str], None]) -> None:
        """Take clients off for good, with those that the operator has taken off meanwhile."""
        new = {*names, *self.left} - self.gone
        if new:
            self.gone |= new
            self.save()
            notify(f"{', '.join(sorted(new))} left for good")

    def save(self) -> None:
        """Write the file."""
        facts = {
            "experiment": self.experiment,
            "clients": {seed: asdict(clients) for seed, clients in self.clients.items()},
            "gone": sorted(self.gone),
            "handed": {job: sorted(names) for job, names in self.handed.items()},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, encode(facts, indent=1))


def take_off(out: Path, name: str) -> None:
    """Take a client off a federation for good; its server, also one that runs, does not wait for it any more.

    Raises:
        ConfigError: the federation in a result folder has no such client.
    """
    names = _names_in(out)
    if name not in names:
        raise unknown(f"client of the federation in '{out}'", name, names)
    append_lines(out / LEFT, [name])


def let_in(out: Path, name: str) -> None:
    """Let a client join a federation that has begun; its server, also one that runs, takes it in when it connects.

    Raises:
        ConfigError: nothing has begun in the result folder, it has that client, or a method of the experiment needs all
            clients from the start.
    """
    names = _names_in(out)
    if not names:
        raise ConfigError(f"no federation has begun in '{out}'; whoever connects before it does takes part")
    if name in names:
        raise ConfigError(f"'{name}' is a client of the federation in '{out}' already")
    if reason := why_nobody_joins(experiment_in(out)):
        raise ConfigError(reason)
    append_lines(out / ALLOWED, [name])


def why_nobody_joins(config: ExperimentConfig) -> str:
    """Return why no client can join an experiment that has begun; "" if one can."""
    for line in config.methods:
        privacy = privacy_of(Job(config, line, config.seeds[0]))
        if privacy is not None and privacy.level == "sample" and privacy.noise is None:
            return (
                f"no client can join '{line.label}' once it has begun: the noise that its epsilon needs is planned for "
                "the clients that it begins with; give train.dp.noise"
            )
        method, level = make_method(line.name, line.options), None if privacy is None else privacy.level
        if reason := why_fixed(method, level, len(config.model_of(line).architectures)):
            return reason
    return ""


def _listed(file: Path) -> set[str]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return {line.strip() for line in lines if line.strip()}


def _names_in(out: Path) -> set[str]:
    path = out / NAME
    clients = decode(path.read_text(encoding="utf-8"))["clients"] if path.is_file() else {}
    return {name for fields in clients.values() for name in fields["names"]}
