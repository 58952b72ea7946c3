"""The clients of a federation, and their agreement before a job begins.

The server stores its clients in `federation.json` in its result folder. A restarted server reads there which clients
have described their data, which have left, and which have their models. Every message has a digest of the agreement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, TypeAdapter

from tailorfl.core.method import make_method
from tailorfl.data.federation import PARTS
from tailorfl.data.source import LONGEST_NAME
from tailorfl.deploy.messages import structure
from tailorfl.errors import ConfigError, MessageError, RunError, unknown
from tailorfl.rounds.groups import why_fixed
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.files import append_lines, decode, encode, write_text
from tailorfl.runs.fingerprint import deciding
from tailorfl.runs.folders import MEMBERSHIP, experiment_in
from tailorfl.runs.job import Job
from tailorfl.runs.privacy import privacy_of
from tailorfl.settings.experiment import ExperimentConfig

NAME, LEFT, ALLOWED = MEMBERSHIP
"""The file of a federation, and its lists (one name per line) of removed clients, and of those that may join later."""
Sizes = dict[str, list[int]]


@dataclass
class DescribedClients:
    """Clients' descriptions of their data for one seed.

    Attributes:
        names: in the order of their numbers.
        sizes: for "train", "val" and "test" the number of samples of each client.
        source: the facts that a model needs, see `tailorfl.data.remote_federation.source_facts`.
        prepared: the constants by which clients with files of their own prepare their samples.
        shared: whether they have shares of the experiment's own data.
        groups: numbers of clients that joined together: first those at the start, then 1 for each later one; empty: all
            from the start.
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
        """Return these clients and a new one with these numbers of samples, out of the `rows` of its file."""
        return replace(
            self,
            names=[*self.names, name],
            sizes={part: [*counts, sizes[part]] for part, counts in self.sizes.items()},
            prepared=self.prepared and {**self.prepared, "rows": [*self.prepared["rows"], rows]},
            groups=[*self.groups, 1],
        )

    def known_to(self, client: int) -> int:
        """Return the number of clients when a client joined, including itself: it learns of no others."""
        return next(total for total in accumulate(self.groups) if client < total)

    def joined_after(self, announced: int) -> tuple[tuple[str, ...], ...]:
        """Return the names of the clients after the first `announced`, in groups that joined together."""
        ends = list(accumulate(self.groups))
        groups = [tuple(self.names[end - size : end]) for end, size in zip(ends, self.groups, strict=True)]
        return tuple(group for group, end in zip(groups, ends, strict=True) if end > announced)


@dataclass(frozen=True)
class Agreement:
    """The agreement on one job of an experiment between a server and its clients.

    Attributes:
        experiment: its settings, as `ExperimentConfig.to_dict` returns them.
        label, seed: the job in it.
        names: the clients' names, in the order of their numbers.
        sizes: for "train", "val" and "test" the number of samples of each client.
        source: the facts that a model needs, see `tailorfl.data.remote_federation.source_facts`.
        prepared: the common constants by which raw samples were prepared, if there are any.
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
        """The job. Raises MessageError if the settings cannot be read."""
        try:
            config = ExperimentConfig.model_validate(self.experiment)
        except ValueError as error:
            raise MessageError(
                f"the experiment cannot be read; does the server have another version of tailorfl? {error}"[
                    :400
                ]
            ) from error
        method = next((m for m in config.methods if m.label == self.label), None)
        if method is None or self.seed not in config.seeds:
            raise MessageError(f"the experiment has no line '{self.label[:80]}' with seed {self.seed}")
        return Job(config, method, self.seed)

    def facts(self) -> dict[str, Any]:
        """Return the agreement as JSON can hold it."""
        return asdict(self)

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Agreement:
        """Return the agreement that `facts` describe. Raises MessageError if they describe none."""
        try:
            agreement = _READER.validate_python(dict(facts))
        except (TypeError, ValueError) as error:
            raise MessageError(f"the proposed agreement cannot be read: {error}"[:400]) from error
        if any(len(agreement.sizes.get(part, ())) != len(agreement.names) for part in PARTS):
            raise MessageError("the proposed agreement does not have one size for each client")
        return agreement

    def digest(self, sim: Simulation) -> str:
        """Return the digest of the job, its method, its settings and the models' structure, for every message."""
        job = self.job
        about = {
            "name": self.experiment.get("name"),  # an experiment under another name is another job
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
    """Return the clients' agreement on a job; with `first`, that of clients who know only the first `first`."""
    sizes: dict[str, tuple[int, ...]] = {part: tuple(clients.sizes[part][:first]) for part in PARTS}
    prepared = clients.prepared and {**clients.prepared, "rows": clients.prepared["rows"][:first]}
    names, label = tuple(clients.names[:first]), job.method.label
    return Agreement(job.config.to_dict(), label, job.seed, names, sizes, clients.source, prepared)


@dataclass
class Membership:
    """The clients of an experiment.

    Attributes:
        path: the file.
        experiment: its name, and the settings that determine results.
        clients: seed of the data -> its clients.
        gone: names of the clients that have left for good.
        handed: folder of a job -> names of the clients that have got its last message.
    """

    path: Path
    experiment: dict[str, Any]
    clients: dict[str, DescribedClients] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    handed: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, out: Path, config: ExperimentConfig, begun: bool) -> Membership:
        """Return the clients that a result folder has for an experiment; none if it has not `begun` there.

        Raises:
            ConfigError: the file is missing, as in the folder of a simulation.
            RunError: it is damaged.
        """
        path, experiment = out / NAME, {"name": config.name, **deciding(config.to_dict())}
        if not begun:
            return cls(path, experiment)
        if not path.is_file():
            raise ConfigError(
                f"'{out}' has no {NAME}: it holds a simulation, or has lost its list of clients; choose another folder "
                "(--out), or restore the file from a copy"
            )
        with _readable(path):
            facts: Mapping[str, Any] = decode(path.read_text(encoding="utf-8"))
            if facts["experiment"] != decode(encode(experiment)):
                return cls(path, experiment)
            clients = {seed: DescribedClients(**fields) for seed, fields in facts["clients"].items()}
            handed = {job: set(names) for job, names in facts["handed"].items()}
            return cls(path, experiment, clients, set(facts["gone"]), handed)

    def allowed(self) -> set[str]:
        """Return the names of the clients that may join, without those that have left."""
        return _listed(self.path.with_name(ALLOWED)) - self.gone

    @property
    def left(self) -> set[str]:
        """The names of clients that have left, or that the operator has removed since the server last checked."""
        return self.gone | _listed(self.path.with_name(LEFT))

    @property
    def late(self) -> set[str]:
        """The names of clients that may join but are in no federation yet; a later seed begins without them."""
        known = {name for clients in self.clients.values() for name in clients.names}
        return self.allowed() - known if known else set()

    def leave(self, names: Iterable[str], notify: Callable[[str], None]) -> None:
        """Remove clients for good, with those that the operator has removed meanwhile."""
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
    """Remove a client from a federation for good; even a running server no longer waits for it.

    Raises:
        ConfigError: the federation in a result folder has no such client.
        RunError: its file is damaged.
    """
    names = _names_in(out)
    if not names:
        raise ConfigError(f"no federation has begun in '{out}'; check the name of the folder")
    if name not in names:
        raise unknown(f"client of the federation in '{out}'", name, names)
    append_lines(out / LEFT, [name])


def let_in(out: Path, name: str) -> None:
    """Let a client join a federation that has begun; even a running server admits it when it connects.

    Raises:
        ConfigError: no federation has begun in the result folder, it has that client already, or a method of the
            experiment needs all clients from the start.
        RunError: the file of the federation is damaged.
    """
    names = _names_in(out)
    if not names:
        raise ConfigError(
            f"no federation has started in '{out}'; clients that connect before it starts take part anyway"
        )
    if name in names:
        raise ConfigError(f"'{name}' already is a client of the federation in '{out}'")
    if reason := why_nobody_joins(experiment_in(out)):
        raise ConfigError(reason)
    append_lines(out / ALLOWED, [name])


def why_nobody_joins(config: ExperimentConfig) -> str:
    """Return why no client can join an experiment that has begun; "" if one can."""
    for line in config.methods:
        privacy = privacy_of(Job(config, line, config.seeds[0]))
        if privacy is not None and privacy.level == "sample" and privacy.noise is None:
            return (
                f"no client can join '{line.label}' once it has started: the noise for its epsilon is planned for the "
                "clients at the start; set train.dp.noise"
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
    if not path.is_file():
        return set()
    with _readable(path):
        clients = decode(path.read_text(encoding="utf-8"))["clients"]
        return {str(name) for fields in clients.values() for name in fields["names"]}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn an error of reading the file of a federation into a RunError."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise RunError(
            f"'{path}', which lists the clients of the federation, is damaged ({error}); restore it from a copy"
        ) from error
