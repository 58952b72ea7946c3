"""The samples of one client in its own process: from its own file, or its share of an experiment's own data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tailorfl.data.dealing import client_number
from tailorfl.data.federation import Federation
from tailorfl.data.remote_federation import ClientSamples, client_samples, source_facts
from tailorfl.data.source import Source
from tailorfl.errors import DataError
from tailorfl.runs.build import make_federation
from tailorfl.settings.experiment import ExperimentConfig


@dataclass(frozen=True)
class Described:
    """What a client tells the server of its data, and nothing else of them.

    Attributes:
        index, total: its number and how many there are, where the experiment's own data give them; None where clients
            are ordered by name.
        sizes: how many samples it has in "train", "val" and "test"; of its own file before it is split in "all".
        source: see `tailorfl.data.remote_federation.source_facts`; of its own file the names of the features.
    """

    index: int | None
    total: int | None
    sizes: dict[str, int]
    source: dict[str, Any]


@dataclass(frozen=True)
class Summarised:
    """What a client tells of its own file once it knows how many samples the others have.

    Attributes:
        sizes: how many samples it has in "train", "val" and "test".
        summary: what the constants of all are made of, see `tailorfl.data.summaries` and `own_samples.Told`.
    """

    sizes: dict[str, int]
    summary: dict[str, Any]


class OwnData(Protocol):
    """Where a client's samples come from."""

    name: str

    def described(self, config: ExperimentConfig, seed: int) -> Described:
        """Return what the server is told for an experiment with a seed. Raises DataError where they do not fit."""

    def summary(self, config: ExperimentConfig, seed: int, number: int, rows: Sequence[int]) -> Summarised:
        """Return what is told of the client's own file as the client `number` of clients with these rows."""

    def own(self, config: ExperimentConfig, seed: int, number: int, prepared: Any) -> ClientSamples:
        """Return the samples as the client `number` of the federation has them."""

    def public(self, config: ExperimentConfig, seed: int, source: Source) -> Source | None:
        """Return the public set of the experiment; `source` is what a model has to know of the samples."""


@dataclass
class DataShare:
    """A client's share of the data that the experiment itself names, as a simulation deals them: to try things out.

    Each process reads all of them and keeps its own part.
    """

    name: str
    _held: tuple[Any, Federation] | None = field(default=None, repr=False)

    def described(self, config: ExperimentConfig, seed: int) -> Described:
        """Return what the server is told."""
        federation = self._federation(config, seed)
        number = self._number(federation)
        return Described(
            number, len(federation), client_samples(federation, number).sizes, source_facts(federation.source)
        )

    def summary(self, config: ExperimentConfig, seed: int, number: int, rows: Sequence[int]) -> Summarised:
        """Is not asked of it. Raises DataError."""
        raise DataError(f"client '{self.name}' has no file of its own")

    def own(self, config: ExperimentConfig, seed: int, number: int, prepared: Any) -> ClientSamples:
        """Return this client's samples, in the order of the simulation."""
        federation = self._federation(config, seed)
        return client_samples(federation, self._number(federation))

    def public(self, config: ExperimentConfig, seed: int, source: Source) -> Source | None:
        """Return the public set of the simulation."""
        return self._federation(config, seed).public

    def _number(self, federation: Federation) -> int:
        return client_number(federation.names, self.name)

    def _federation(self, config: ExperimentConfig, seed: int) -> Federation:
        key = (config.data, config.data.seed_of(seed))
        if self._held is None or self._held[0] != key:
            if config.data.path is not None:
                raise DataError(
                    f"the experiment's data lie at '{config.data.path}' of the server's machine; name this client's "
                    "own with --data"
                )
            self._held = key, make_federation(config, config.data.seed_of(seed))
        return self._held[1]
