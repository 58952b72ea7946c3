"""One client's own table: what is told of it in two steps, and the samples that it has in the federation.

First every client tells how many rows it has. From all of these each finds its own training rows, as the simulation of
the same files would (`tailorfl.data.splits`), and tells a summary of them, of which the server makes the constants
that prepare everybody's rows alike (`tailorfl.data.summaries`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tailorfl.data.columns import need_columns
from tailorfl.data.constants import MOST_LEVELS, Constants, combine, read_constants
from tailorfl.data.own import from_table
from tailorfl.data.preparation import (
    TABLE,
    ClientRows,
    RawTable,
    by_constants,
    by_training_rows,
    check_medians,
    plain,
)
from tailorfl.data.public import public_set
from tailorfl.data.remote_federation import FITTED, ClientSamples
from tailorfl.data.rows import Ints
from tailorfl.data.source import Source
from tailorfl.data.splits import own_rows, read_split
from tailorfl.data.summaries import CLASSES, Roles, Summary, made_roles, summarise
from tailorfl.data.table_files import read_table
from tailorfl.deploy.own_data import Described, Summarised
from tailorfl.deploy.policy import Policy
from tailorfl.errors import ConfigError, DataError, MessageError, PolicyError
from tailorfl.settings.base import listed
from tailorfl.settings.data import DataConfig
from tailorfl.settings.experiment import ExperimentConfig

CONSTANTS = "constants"
"""Option of a table: constants that are given. The server reads the file and sends what is in it."""


class OwnTable:
    """A CSV, TSV or parquet file of one client's rows."""

    def __init__(self, name: str, path: Path, policy: Policy) -> None:
        self.name, self.path, self.policy = name, path, policy
        self._read: tuple[tuple[DataConfig, tuple[str, ...]], Source] | None = None

    def described(self, config: ExperimentConfig, seed: int) -> Described:
        """Return how many rows there are, and the names of the features."""
        source = self._source(config.data)
        return Described(None, None, {"all": len(source)}, {"features": list(source.info["features"])})

    def summary(self, config: ExperimentConfig, seed: int, number: int, rows: Sequence[int]) -> Summarised:
        """Return the sizes of this client's parts, and what the constants of all are made of.

        Args:
            config: the experiment.
            seed: of the job.
            number: of this client.
            rows: how many each client has.

        Raises:
            PolicyError: it would tell of too few rows.
        """
        source = self._source(config.data)
        train, val, test = self._parts(config, seed, number, rows, source)
        table, roles = _table(source), made_roles(**_but(config.data.options, CONSTANTS, "sep", "decimal"))
        self.policy.check_summary(source, len(train))
        if config.data.normalise == "none" or CONSTANTS in config.data.options:
            told = Summary(name=self.name, rows=0, roles=roles, columns={}, classes=_classes(source))
        else:
            told = summarise(table.frame, roles, train, self.name)
            self._check_levels(table, roles, train, told)
        return Summarised({"train": len(train), "val": len(val), "test": len(test)}, told.to_dict())

    def _check_levels(self, table: RawTable, roles: Roles, train: Ints, told: Summary) -> None:
        """Raise PolicyError where a summary tells what too few rows have, or too many words."""
        least = max(self.policy.min_count, roles.min_count)
        pooled = summarise(table.frame, roles.model_copy(update={"min_count": least}), train, self.name)
        for column, summary in told.columns.items():
            if summary != pooled.columns[column]:
                raise PolicyError(
                    f"column '{column}' has words, or filled cells, of fewer than {least} training rows; the "
                    f"experiment needs data.options.min_count={least}, or this client a smaller min_count"
                )
            if len(summary.levels) > self.policy.max_levels:
                raise PolicyError(f"column '{column}' has {len(summary.levels)} words; max_levels says fewer")

    def own(self, config: ExperimentConfig, seed: int, number: int, prepared: Any) -> ClientSamples:
        """Return this client's samples, prepared as `common` says."""
        try:
            features, sent = tuple(map(str, prepared["features"])), prepared[CONSTANTS]
        except (TypeError, KeyError) as error:
            raise MessageError(f"the server does not say by what rows are prepared: {error!r}") from error
        source = self._source(config.data)
        described = set(source.info["features"])
        others = set(features) - described  # those that other clients alone have are missing here
        if described - set(features) or others & set(_table(source).frame.columns):
            raise MessageError("the server asks for other features than this client has described")
        source = self._source(config.data, features)
        train, val, test = self._parts(config, seed, number, prepared["rows"], source)
        constants, roles = (
            Constants.from_dict(sent, "the constants that the server has sent"),
            _table(source).roles,
        )
        levels = [len(column.levels) for column in constants.columns.values() if column.kind == "word"]
        if not {*constants.columns} <= {*features} or max(levels, default=0) > MOST_LEVELS:
            raise MessageError(
                "the constants of the server are of other columns than were described, or of more words"
            )
        if (constants.roles.label, constants.roles.task) != (roles.label, roles.task):
            raise MessageError("the constants of the server are for another label than the experiment's")
        given = CONSTANTS in config.data.options
        return ClientSamples(self._prepared(config, source, constants, train, given), train, val, test)

    def public(self, config: ExperimentConfig, seed: int, source: Source) -> Source | None:
        """Return the public set, out of a source that every client can read."""
        if config.data.public is None:
            return None
        return public_set(config.data.public, config.data.public_samples, source, seed)

    def _source(self, data: DataConfig, features: tuple[str, ...] = ()) -> Source:
        """Return the table as it was read; `features` in the order of everybody."""
        if self._read is None or self._read[0] != (data, features):
            options = _but(data.options, CONSTANTS)
            reading = {key: options[key] for key in ("sep", "decimal") if key in options}
            frame = read_table(self.path, **reading, exclude=listed(options.get("exclude", ())))[1]
            present = set(frame.columns)
            if features:
                options["features"] = list(features)
                frame = frame.assign(**{name: np.nan for name in features if name not in present})
            # What all clients together lack is said by the server, which knows the columns of all.
            for key in ("features", "words", "exclude"):
                if options.get(key) is not None:
                    options[key] = [name for name in listed(options[key]) if name in frame.columns]
            source = from_table(frame, **options)
            self.policy.check_columns(
                [name for name in (*source.info["label"], *source.info["features"]) if name in present]
            )
            self._read = (data, features), replace(source, name=self.path.name)
        return self._read[1]

    def _parts(
        self, config: ExperimentConfig, seed: int, number: int, rows: Sequence[int], source: Source
    ) -> tuple[Ints, Ints, Ints]:
        data = config.data
        if rows[number] != len(source):
            raise DataError(
                f"'{self.path}' has {len(source)} rows, but had {rows[number]} when it was described"
            )
        rule = read_split(data.split, official=source.test is not None)
        return own_rows(number, rows, source.strata.numpy(), rule, data.seed_of(seed))

    def _prepared(
        self, config: ExperimentConfig, source: Source, everyone: Constants, train: Ints, given: bool
    ) -> Source:
        table, by = _table(source), config.data.normalise
        if given:
            return by_constants(source, everyone)
        if by == "none":
            info = {**plain(source).info, **({"classes": everyone.classes} if everyone.classes else {})}
            y = everyone.targets(table.frame, source.name)
            return replace(plain(source), y=y, outputs=everyone.outputs, info=info)
        rows = ClientRows(self.name, np.arange(len(source)), train)
        return by_training_rows(source, everyone, [rows], [rows.summarise(table)], by)


def check_table(data: DataConfig) -> None:
    """Raise ConfigError where clients' own tables cannot be what an experiment says of its data."""
    if "label" not in data.options:
        raise ConfigError("the experiment does not say which column is the label: data.options.label=COLUMN")


def common_tables(
    data: DataConfig, features: Sequence[str], rows: Sequence[int], told: Sequence[Summary]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (by what all clients prepare their rows, what a model has to know of them), as JSON can hold them.

    Args:
        data: the experiment's.
        features: of all clients, in the order of the first.
        rows: how many each client has.
        told: their summaries.

    Raises:
        DataError: the tables do not fit together, or none of them has a column that is named; names the clients.
        ConfigError: medians are asked for and the statistics are of all clients.
    """
    import pandas as pd

    roles = told[0].roles
    check_medians(roles, data.normalise)
    for option in ("features", "words"):
        need_columns(
            "of the clients", pd.DataFrame(columns=list(features)), listed(data.options.get(option) or ())
        )
    found = combine(told)
    if CONSTANTS in data.options:
        known = read_constants(data.options[CONSTANTS])
        found = known if known.classes else known.model_copy(update={"classes": found.classes})
    names = found.names if found.columns else tuple(features)
    prepared = {CONSTANTS: found.to_dict(), "features": list(features), "rows": list(rows)}
    of_classes, outputs = roles.task in CLASSES, found.outputs
    y = [[], "int64"] if of_classes else [[2 if roles.task == "survival" else outputs], "float32"]
    info = {"features": list(names), **({"classes": list(found.classes)} if found.classes else {})}
    facts: dict[str, Any] = {
        "name": "tables",
        "task": roles.task,
        "outputs": outputs,
        "x": [[len(names)], "float32"],
        "y": y,
    }
    facts |= {"mean": None, "std": None, "augment": "none", "credit": False, "info": info}
    return prepared, {**facts, FITTED: data.normalise != "none"}


def _but(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in names}


def _table(source: Source) -> RawTable:
    found: RawTable = source.info[TABLE]
    return found


def _classes(source: Source) -> tuple[str, ...]:
    found: Mapping[str, Any] = source.info
    return tuple(found.get("classes", ()))
