"""The samples of one client in its own process: from its own file, or its share of an experiment's own data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tailorfl.data.build import public_set
from tailorfl.data.federation import Federation, client_number
from tailorfl.data.remote_federation import ClientSamples, client_samples, source_facts
from tailorfl.data.source import Source
from tailorfl.data.summaries import JsonRecord
from tailorfl.deploy.policy import Policy
from tailorfl.errors import DataError
from tailorfl.partition.splits import own_rows, read_split
from tailorfl.runs.build import make_federation
from tailorfl.settings.data import DataConfig
from tailorfl.settings.experiment import ExperimentConfig


@dataclass
class DataShare:
    """A client's share of the data that the experiment itself names, split as in a simulation, to try things out.

    Each process reads all of these data and keeps its own part.
    """

    name: str
    _cache: tuple[Any, Federation] | None = field(default=None, repr=False)

    def of_kind(self, data: DataConfig) -> DataShare:
        """Return this share, whatever the kind of data."""
        return self

    def described(self, config: ExperimentConfig, seed: int) -> dict[str, Any]:
        """Return the description for the server, see `OwnFile.described`."""
        federation = self._federation(config, seed)
        number = client_number(federation.names, self.name)
        sizes = client_samples(federation, number).sizes
        source = source_facts(federation.source)
        return {"index": number, "total": len(federation), "sizes": sizes, "source": source}

    def summary(
        self, config: ExperimentConfig, seed: int, number: int, rows: Sequence[int], joins: bool = False
    ) -> tuple[dict[str, int], dict[str, Any]]:
        """Raise DataError: only clients with files of their own send summaries."""
        raise DataError(f"client '{self.name}' has no file of its own")

    def samples(self, config: ExperimentConfig, seed: int, number: int, prepared: Any) -> ClientSamples:
        """Return this client's samples, in the order of the simulation."""
        federation = self._federation(config, seed)
        return client_samples(federation, client_number(federation.names, self.name))

    def public(self, config: ExperimentConfig, seed: int, source: Source) -> Source | None:
        """Return the public set of the simulation."""
        return self._federation(config, seed).public

    def _federation(self, config: ExperimentConfig, seed: int) -> Federation:
        key = (config.data, config.data.seed_of(seed))
        if self._cache is None or self._cache[0] != key:
            if config.data.path is not None:
                raise DataError(
                    f"the experiment's data are at '{config.data.path}' on the server's machine; give this client's "
                    "own with --data"
                )
            self._cache = key, make_federation(config, config.data.seed_of(seed))
        return self._cache[1]


class OwnFile(ABC):
    """One client's own file or folder of one kind."""

    summary_type: ClassVar[type[JsonRecord]]
    """Class of the summary that a client sends."""

    def __init__(self, name: str, path: Path, policy: Policy) -> None:
        self.name, self.path, self.policy = name, path, policy
        self._cache: tuple[Any, Source] | None = None

    @abstractmethod
    def read(self, data: DataConfig, features: tuple[str, ...]) -> Source:
        """Return the samples as this client alone has them; of a table with these features, if any are given."""

    @abstractmethod
    def summarised(self, data: DataConfig, samples: ClientSamples) -> JsonRecord:
        """Return the summary of the client's samples that is sent in addition to their numbers."""

    @abstractmethod
    def samples(self, config: ExperimentConfig, seed: int, number: int, prepared: Any) -> ClientSamples:
        """Return the samples of client `number` of the federation, prepared like those of all clients."""

    @staticmethod
    @abstractmethod
    def common(
        data: DataConfig, features: Sequence[str], rows: Sequence[int], summaries: Sequence[Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (constants that prepare all clients' samples, facts that a model needs), as JSON can hold them.

        Args:
            data: the experiment's.
            features: of all clients, in the order of the first.
            rows: number of samples of each client.
            summaries: a `summary_type` of each client.

        Raises:
            DataError: the samples do not fit together; names the clients.
            ConfigError: the experiment needs constants that cannot be computed from summaries.
        """

    def described(self, config: ExperimentConfig, seed: int) -> dict[str, Any]:
        """Return the first description of the samples for the server, as JSON can hold it.

        "index" and "total" are the client's number and the number of clients, if the experiment's own data determine
        them (`DataShare`), else None. "sizes" has the numbers of samples in "train", "val" and "test", or in "all" for
        a client's own file before it is split. "source" is that of `tailorfl.data.remote_federation.source_facts`; for
        a client's own file it has the names of the features.

        Raises:
            DataError: the samples do not fit the experiment.
        """
        source = self.source(config.data)
        sizes, features = {"all": len(source)}, list(source.info.get("features", ()))
        return {"index": None, "total": None, "sizes": sizes, "source": {"features": features}}

    def summary(
        self, config: ExperimentConfig, seed: int, number: int, rows: Sequence[int], joins: bool = False
    ) -> tuple[dict[str, int], dict[str, Any]]:
        """Return (the sizes of "train", "val" and "test", a summary) of the client's own file.

        Args:
            config: the experiment.
            seed: of the job.
            number: of this client.
            rows: number of samples of each client.
            joins: whether the client joins later. Then only sizes are sent, and the summary is empty: if it were
                refused by what it would contain, the refusal would tell something about it.

        Raises:
            PolicyError: the summary would be of too few rows.
        """
        samples = self.parts(config, seed, number, rows)
        if joins:
            return samples.sizes, {}
        self.policy.check_summary(samples.source, len(samples.train))
        return samples.sizes, self.summarised(config.data, samples).to_dict()

    def public(self, config: ExperimentConfig, seed: int, source: Source) -> Source | None:
        """Return the public set, from a source that every client can read.

        `source` has the facts of the samples that a model needs.
        """
        if config.data.public is None:
            return None
        return public_set(config.data.public, config.data.public_samples, source, seed)

    def source(self, data: DataConfig, features: tuple[str, ...] = ()) -> Source:
        """Return the samples as they were read."""
        if self._cache is None or self._cache[0] != (data, features):
            self._cache = (data, features), self.read(data, features)
        return self._cache[1]

    def parts(
        self,
        config: ExperimentConfig,
        seed: int,
        number: int,
        rows: Sequence[int],
        features: tuple[str, ...] = (),
    ) -> ClientSamples:
        """Return the samples as they were read, split as the simulation of all clients' files would.

        Raises:
            DataError: their number is not the one in the client's description.
        """
        source = self.source(config.data, features)
        if rows[number] != len(source):
            raise DataError(
                f"'{self.path}' has {len(source)} samples, but had {rows[number]} when it was described"
            )
        rule = read_split(config.data.split, official=source.test is not None)
        strata, split_seed = source.strata.numpy(), config.data.seed_of(seed)
        return ClientSamples(source, *own_rows(number, rows, strata, rule, split_seed))
