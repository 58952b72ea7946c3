"""Who takes part in a federation, as the server keeps it in its result folder: `federation.json`.

A server that is started again knows by it whose data it has been told of, who has left, and who has which model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tailorfl.errors import RunError, unknown
from tailorfl.runs.files import append_lines, decode, encode, write_text
from tailorfl.runs.fingerprint import deciding
from tailorfl.settings.experiment import ExperimentConfig

NAME, LEFT = "federation.json", "left"
"""The file of a federation, and that of the names of clients that its operator has taken off, one a line."""
Sizes = dict[str, list[int]]


@dataclass
class Clients:
    """What clients have told of their data for one seed.

    Attributes:
        names: in the order of their numbers.
        sizes: for "train", "val" and "test" how many samples each has.
        source: what a model has to know of the data, see `tailorfl.data.remote_federation.source_facts`.
        prepared: by what clients with files of their own prepare their samples.
        shared: whether they have shares of the experiment's own data.
    """

    names: list[str]
    sizes: Sizes
    source: dict[str, Any]
    prepared: Any
    shared: bool


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
    clients: dict[str, Clients] = field(default_factory=dict)
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
            clients = {seed: Clients(**one) for seed, one in facts["clients"].items()}
            handed = {job: set(names) for job, names in facts["handed"].items()}
            return cls(path, experiment, clients, set(facts["gone"]), handed)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise RunError(
                f"'{path}', which says who takes part in the federation, is damaged ({error}); restore it from a copy"
            ) from error

    def leave(self, names: Iterable[str], told: Callable[[str], None]) -> None:
        """Take clients off for good, with those that the operator has taken off meanwhile."""
        file = self.path.with_name(LEFT)
        listed = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        new = {*names, *(name.strip() for name in listed if name.strip())} - self.gone
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
    path = out / NAME
    clients = decode(path.read_text(encoding="utf-8"))["clients"] if path.is_file() else {}
    names = {name for one in clients.values() for name in one["names"]}
    if name not in names:
        raise unknown(f"client of the federation in '{out}'", name, names)
    append_lines(out / LEFT, [name])
