"""A client's own file or folder, whatever its kind: the experiment says by `data.name` which one it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailorfl.data.remote_federation import ClientSamples
from tailorfl.data.source import Source
from tailorfl.data.summaries import JsonRecord, Summary
from tailorfl.deploy.own_data import DataShare, Described, OwnData, Summarised
from tailorfl.deploy.own_samples import OwnImages, OwnTexts, Told, check_samples, common_samples
from tailorfl.deploy.own_table import OwnTable, check_table, common_tables
from tailorfl.deploy.policy import DEFAULT_POLICY, Policy
from tailorfl.errors import ConfigError
from tailorfl.settings.data import DataConfig
from tailorfl.settings.experiment import ExperimentConfig

Common = Callable[
    [DataConfig, Sequence[str], Sequence[int], Sequence[Any]], tuple[dict[str, Any], dict[str, Any]]
]


@dataclass(frozen=True)
class OwnDataKind:
    """One kind of own data.

    Attributes:
        make: what a client has, of its name, path and policy.
        told: what a client tells of it.
        check: raises ConfigError where an experiment asks for what this kind cannot be.
        common: of what all tell, by what each prepares its samples, and what a model has to know of them.
    """

    make: Callable[[str, Path, Policy], OwnData]
    told: type[JsonRecord]
    check: Callable[[DataConfig], None]
    common: Common


KINDS: dict[str, OwnDataKind] = {
    "table": OwnDataKind(OwnTable, Summary, check_table, common_tables),
    OwnTexts.data: OwnDataKind(OwnTexts, Told, check_samples, common_samples),
    OwnImages.data: OwnDataKind(OwnImages, Told, check_samples, common_samples),
}
"""`data.name` -> what clients bring."""


def kind_of(data: DataConfig) -> OwnDataKind:
    """Return what clients bring to an experiment with these data.

    Raises:
        ConfigError: none of their own, or not in this way.
    """
    if data.name not in KINDS:
        raise ConfigError(
            f"clients that name their own file (--data) have {', '.join(KINDS)}, but the experiment's data.name is "
            f"'{data.name}'; set data.name to one of these"
        )
    unlike = {
        "data.samples": data.samples,
        "data.partition": None if data.partition in (None, "natural") else data.partition,
        "data.corruptions": data.corruptions,
        "data.shifts": data.shifts,
        "data.options.client": data.options.get("client"),
        "data.options.split": data.options.get("split"),
    }
    for name, value in unlike.items():
        if value:
            raise ConfigError(
                f"{name} is for data that lie in one place; here every client has a file of its own, so leave it out"
            )
    form = KINDS[data.name]
    form.check(data)
    return form


class OwnFile:
    """One client's own file or folder."""

    def __init__(self, name: str, path: Path, policy: Policy) -> None:
        self.name, self.path, self.policy = name, path, policy
        self._made: dict[str, OwnData] = {}

    def described(self, config: ExperimentConfig, seed: int) -> Described:
        """Return how many samples there are, and the names of features."""
        return self._of(config.data).described(config, seed)

    def summary(self, config: ExperimentConfig, seed: int, number: int, rows: Sequence[int]) -> Summarised:
        """Return the sizes of this client's parts, and what is told of its samples."""
        return self._of(config.data).summary(config, seed, number, rows)

    def own(self, config: ExperimentConfig, seed: int, number: int, prepared: Any) -> ClientSamples:
        """Return this client's samples, prepared as those of all."""
        return self._of(config.data).own(config, seed, number, prepared)

    def public(self, config: ExperimentConfig, seed: int, source: Source) -> Source | None:
        """Return the public set."""
        return self._of(config.data).public(config, seed, source)

    def _of(self, data: DataConfig) -> OwnData:
        form = kind_of(data)
        if data.name not in self._made:
            self._made[data.name] = form.make(self.name, self.path, self.policy)
        return self._made[data.name]


def own_data(data: str | Path | None, name: str | None, policy: Policy = DEFAULT_POLICY) -> OwnData:
    """Return where a client's samples come from."""
    if data is None:
        if name is None:
            raise ConfigError(
                "a client needs its data (--data FILE), or a name (--name NAME) to take that client's share of the "
                "experiment's own data"
            )
        return DataShare(name)
    path = Path(data).expanduser()
    return OwnFile((path.name if path.is_dir() else path.stem) if name is None else name, path, policy)
