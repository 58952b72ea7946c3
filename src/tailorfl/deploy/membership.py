"""Who takes part in a federation, as the server keeps it in its result folder: `federation.json`.

A server that is started again knows by it whose data it has been told of, who has left, and who has which model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from tailorfl.core.method import make_method
from tailorfl.errors import ConfigError, RunError, unknown
from tailorfl.rounds.groups import why_fixed
from tailorfl.runs.files import append_lines, decode, encode, write_text
from tailorfl.runs.fingerprint import deciding
from tailorfl.runs.folders import experiment_in
from tailorfl.runs.job import Job
from tailorfl.runs.privacy import privacy_of
from tailorfl.settings.experiment import ExperimentConfig

NAME, LEFT, ALLOWED = "federation.json", "left", "joining"
"""The file of a federation, and those of the names of clients that its operator has taken off, and of those who may
join though it has begun, one a line."""
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
            sizes={part: [*known, sizes[part]] for part, known in self.sizes.items()},
            prepared=with_rows(self.prepared, lambda known: [*known, rows]),
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
            clients = {seed: DescribedClients(**one) for seed, one in facts["clients"].items()}
            handed = {job: set(names) for job, names in facts["handed"].items()}
            return cls(path, experiment, clients, set(facts["gone"]), handed)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise RunError(
                f"'{path}', which says who takes part in the federation, is damaged ({error}); restore it from a copy"
            ) from error

    def allowed(self) -> set[str]:
        """Return the names of those that the operator lets join, but for those that have left."""
        return _listed(self.path.with_name(ALLOWED)) - self.gone

    def leave(self, names: Iterable[str], told: Callable[[str], None]) -> None:
        """Take clients off for good, with those that the operator has taken off meanwhile."""
        new = {*names, *_listed(self.path.with_name(LEFT))} - self.gone
        if new:
            self.gone |= new
            self.save()
            told(f"{', '.join(sorted(new))} left for good")

    def save(self) -> None:
        """Write the file."""
        facts = {
            "experiment": self.experiment,
            "clients": {seed: asdict(one) for seed, one in self.clients.items()},
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


def with_rows(prepared: Any, change: Callable[[list[int]], list[int]]) -> Any:
    """Return by what clients prepare their samples, with the numbers of rows of all changed, where it has these."""
    return {**prepared, "rows": change(prepared["rows"])} if prepared else prepared


def _listed(file: Path) -> set[str]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return {line.strip() for line in lines if line.strip()}


def _names_in(out: Path) -> set[str]:
    path = out / NAME
    clients = decode(path.read_text(encoding="utf-8"))["clients"] if path.is_file() else {}
    return {name for one in clients.values() for name in one["names"]}
