"""One client's own table: what is told of it in two steps, and the samples that it has in the federation.

First every client tells how many rows it has. From all of these each finds its own training rows, as the simulation of
the same files would (`tailorfl.partition.splits`), and tells a summary of them, of which the server makes the constants
that prepare everybody's rows alike (`tailorfl.data.summaries`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from tailorfl.data.remote_federation import FITTED, ClientSamples
from tailorfl.data.source import Source
from tailorfl.data.summaries import CLASSES, Summary, made_roles, summarise
from tailorfl.data.table_files import read_table
from tailorfl.deploy.own_data import OwnFile
from tailorfl.errors import MessageError, PolicyError
from tailorfl.settings.base import listed
from tailorfl.settings.data import DataConfig
from tailorfl.settings.experiment import ExperimentConfig

CONSTANTS = "constants"
"""Option of a table: constants that are given. The server reads the file and sends what is in it."""


class OwnTable(OwnFile):
    """A CSV, TSV or parquet file of one client's rows."""

    summary_type = Summary

    def read(self, data: DataConfig, features: tuple[str, ...]) -> Source:
        """Return the table as it is; `features` in the order of everybody, empty where only other clients have them."""
        options = _without(data.options, CONSTANTS)
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
        return replace(source, name=self.path.name)

    def summarised(self, data: DataConfig, samples: ClientSamples) -> Summary:
        """Return what the constants of all are made of. Raises PolicyError where it tells of too few rows."""
        roles = made_roles(**_without(data.options, CONSTANTS, "sep", "decimal"))
        if data.normalise == "none" or CONSTANTS in data.options:
            classes = tuple(samples.source.info.get("classes", ()))
            return Summary(name=self.name, rows=0, roles=roles, columns={}, classes=classes)
        frame = _table(samples.source).frame
        summary = summarise(frame, roles, samples.train, self.name)
        least = max(self.policy.min_count, roles.min_count)
        pooled = summarise(frame, roles.model_copy(update={"min_count": least}), samples.train, self.name)
        for name, column in summary.columns.items():
            if column != pooled.columns[name]:
                raise PolicyError(
                    f"column '{name}' has words, or filled cells, of fewer than {least} training rows; the "
                    f"experiment needs data.options.min_count={least}, or this client a smaller min_count"
                )
            if len(column.levels) > self.policy.max_levels:
                raise PolicyError(f"column '{name}' has {len(column.levels)} words; max_levels says fewer")
        return summary

    def samples(self, config: ExperimentConfig, seed: int, number: int, prepared: Any) -> ClientSamples:
        """Return this client's samples, prepared as `common` says."""
        try:
            features, sent = tuple(map(str, prepared["features"])), prepared[CONSTANTS]
        except (TypeError, KeyError) as error:
            raise MessageError(f"the server does not say by what rows are prepared: {error!r}") from error
        source = self.source(config.data)
        described = set(source.info["features"])
        missing = set(features) - described  # those that other clients alone have
        if described - set(features) or missing & set(_table(source).frame.columns):
            raise MessageError("the server asks for other features than this client has described")
        samples = self.parts(config, seed, number, prepared["rows"], features)
        constants = Constants.from_dict(sent, "the constants that the server has sent")
        roles = _table(samples.source).roles
        levels = [len(column.levels) for column in constants.columns.values() if column.kind == "word"]
        if not {*constants.columns} <= {*features} or max(levels, default=0) > MOST_LEVELS:
            raise MessageError(
                "the constants of the server are of other columns than were described, or of more words"
            )
        if (constants.roles.label, constants.roles.task) != (roles.label, roles.task):
            raise MessageError("the constants of the server are for another label than the experiment's")
        return replace(samples, source=self._prepared(config.data, samples, constants))

    def _prepared(self, data: DataConfig, samples: ClientSamples, everyone: Constants) -> Source:
        source, table = samples.source, _table(samples.source)
        if CONSTANTS in data.options:
            return by_constants(source, everyone)
        if data.normalise == "none":
            unscaled = plain(source)
            info = {**unscaled.info, **({"classes": everyone.classes} if everyone.classes else {})}
            y = everyone.targets(table.frame, source.name)
            return replace(unscaled, y=y, outputs=everyone.outputs, info=info)
        rows = ClientRows(self.name, np.arange(len(source)), samples.train)
        return by_training_rows(source, everyone, [rows], [rows.summarise(table)], data.normalise)

    @staticmethod
    def common(
        data: DataConfig, features: Sequence[str], rows: Sequence[int], summaries: Sequence[Summary]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the constants by which all clients prepare their rows, and what a model has to know of them.

        Raises:
            DataError: the tables do not fit together, or none of them has a column that is named; names the clients.
            ConfigError: medians are asked for and the statistics are of all clients.
        """
        import pandas as pd

        roles = summaries[0].roles
        check_medians(roles, data.normalise)
        for option in ("features", "words"):
            need_columns(
                "of the clients",
                pd.DataFrame(columns=list(features)),
                listed(data.options.get(option) or ()),
            )
        constants = combine(summaries)
        if CONSTANTS in data.options:
            fixed = read_constants(data.options[CONSTANTS])
            constants = fixed if fixed.classes else fixed.model_copy(update={"classes": constants.classes})
        names = constants.names if constants.columns else tuple(features)
        prepared = {CONSTANTS: constants.to_dict(), "features": list(features), "rows": list(rows)}
        width = [] if roles.task in CLASSES else [2 if roles.task == "survival" else constants.outputs]
        classes = {"classes": list(constants.classes)} if constants.classes else {}
        return prepared, {
            "name": "tables",
            "task": roles.task,
            "outputs": constants.outputs,
            "x": [[len(names)], "float32"],
            "y": [width, "int64" if roles.task in CLASSES else "float32"],
            "mean": None,
            "std": None,
            "augment": "none",
            "credit": False,
            "info": {"features": list(names), **classes},
            FITTED: data.normalise != "none",
        }


def _without(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in names}


def _table(source: Source) -> RawTable:
    table: RawTable = source.info[TABLE]
    return table
