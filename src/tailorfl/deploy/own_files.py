"""A client's own table, texts or images, and the kind of file for each `data.name` of an experiment.

A client describes its file in two steps. First every client sends its number of rows. From all these numbers each one
finds its own training rows, as the simulation of the same files would (`tailorfl.partition.splits`), and sends a
summary of them. The summary of a table has the statistics for the constants by which all clients prepare their rows
(`tailorfl.data.summaries`). That of texts and images has the shape of a sample and the names of the classes; that of
images also counts each byte in each channel, from which the server computes the mean and the deviation over all
clients. With `data.options.scaling=public` nothing is sent about the pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tailorfl.data.columns import in_order, need_columns
from tailorfl.data.constants import MOST_LEVELS, Constants, combine, read_constants
from tailorfl.data.folder import channel_counts, from_client_folder, statistics_of
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
from tailorfl.data.remote_federation import FITTED, ClientSamples, source_facts
from tailorfl.data.scaling import PRIVATE_SCALING
from tailorfl.data.source import Source
from tailorfl.data.summaries import CLASSES, JsonRecord, Summary, made_roles, summarise
from tailorfl.data.table_files import read_table
from tailorfl.data.text import from_texts
from tailorfl.deploy.own_data import DataShare, OwnFile
from tailorfl.deploy.policy import DEFAULT_POLICY, Policy
from tailorfl.errors import ConfigError, DataError, MessageError, PolicyError, first_few
from tailorfl.settings.base import listed
from tailorfl.settings.data import DataConfig
from tailorfl.settings.experiment import ExperimentConfig

BYTES = 256
"""Number of values that a pixel can have."""
IMAGES = "folder"
"""The name of a data set of images."""
CONSTANTS = "constants"
"""Option of a table: a file of fixed constants, which the server reads and sends."""


class OwnTable(OwnFile):
    """A CSV, TSV or parquet file of one client's rows."""

    summary_type = Summary

    def read(self, data: DataConfig, features: tuple[str, ...]) -> Source:
        """Return the raw table with `features` in the common order; columns that only other clients have are empty."""
        options = _without(data.options, CONSTANTS)
        reading = {key: options[key] for key in ("sep", "decimal") if key in options}
        excluded = [str(name) for name in listed(options.get("exclude", ()))]
        frame = read_table(self.path, **reading, exclude=excluded)[1]
        present = set(frame.columns)
        if features:
            options["features"] = list(features)
            frame = frame.assign(**{name: np.nan for name in features if name not in present})
        # The server, which knows the columns of all clients, reports columns that none of them has.
        for key in ("features", "words", "exclude"):
            if options.get(key) is not None:
                options[key] = [name for name in map(str, listed(options[key])) if name in frame.columns]
        # A client may have only one of the two classes of a binary label.
        binary = options.get("task") == "binary"
        source = from_table(frame, **options | ({"task": "classification"} if binary else {}))
        if binary:
            table = RawTable(frame, _table(source).roles.model_copy(update={"task": "binary"}))
            source = replace(source, task="binary", outputs=1, info={**source.info, TABLE: table})
        self.policy.check_columns(
            [name for name in (*source.info["label"], *source.info["features"]) if name in present]
        )
        return replace(source, name=self.path.name)

    def summarised(self, data: DataConfig, samples: ClientSamples) -> Summary:
        """Return the statistics for the common constants. Raises PolicyError if they are of too few rows."""
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
                raise PolicyError(
                    f"column '{name}' has {len(column.levels)} words; max_levels is {self.policy.max_levels}"
                )
        return summary

    def samples(self, config: ExperimentConfig, seed: int, number: int, prepared: Any) -> ClientSamples:
        """Return this client's samples, prepared by the constants of `common`."""
        try:
            features, sent = tuple(map(str, prepared["features"])), prepared[CONSTANTS]
        except (TypeError, KeyError) as error:
            raise MessageError(
                f"the server does not send the constants that prepare the rows: {error!r}"
            ) from error
        source = self.source(config.data)
        described = set(source.info["features"])
        missing = set(features) - described  # those that only other clients have
        if described - set(features) or missing & set(_table(source).frame.columns):
            raise MessageError("the server asks for features that differ from those this client described")
        samples = self.parts(config, seed, number, prepared["rows"], features)
        constants = Constants.from_dict(sent, "the constants that the server has sent")
        roles = _table(samples.source).roles
        levels = [len(column.levels) for column in constants.columns.values() if column.kind == "word"]
        if not {*constants.columns} <= {*features} or max(levels, default=0) > MOST_LEVELS:
            raise MessageError(
                "the server's constants have columns that were not described, or too many words"
            )
        if (constants.roles.label, constants.roles.task) != (roles.label, roles.task):
            raise MessageError("the server's constants are for another label than the experiment's")
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
        """Return the constants by which all clients prepare their rows, and the facts that a model needs.

        Raises:
            DataError: the tables do not fit together, or none of them has a named column; names the clients.
            ConfigError: medians are requested with statistics of all clients.
        """
        import pandas as pd

        roles = made_roles(**_without(data.options, CONSTANTS, "sep", "decimal"))
        check_medians(roles, data.normalise)
        inputs = roles.inputs(pd.DataFrame(columns=list(features)))
        has_sums = data.normalise != "none" and CONSTANTS not in data.options
        summed = {name for summary in summaries for name in summary.columns}
        if strange := ({*features} - {*inputs}) | (summed - {*(inputs if has_sums else ())}):
            raise DataError(
                f"the clients describe columns that the experiment does not use: {first_few(sorted(strange), 5)}"
            )
        for option in ("features", "words"):
            need_columns(
                "of the clients", pd.DataFrame(columns=list(features)), listed(data.options.get(option) or ())
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


class SampleSummary(JsonRecord):
    """A client's summary of its samples, in addition to their numbers."""

    name: str
    source: dict[str, Any]
    """See `tailorfl.data.remote_federation.source_facts`; with this client's classes and without statistics."""
    pixels: tuple[tuple[int, ...], ...] = ()
    """Count of each byte by channel; empty if samples are not images, or are scaled by constants."""


class OwnSamples(OwnFile):
    """Samples that are adapted to all others once the common classes, channels and scaling are known."""

    summary_type = SampleSummary

    def summarised(self, data: DataConfig, samples: ClientSamples) -> SampleSummary:
        """Return the facts of the samples, and the counts of pixels if images are scaled by those of all clients."""
        source, facts = samples.source, source_facts(samples.source)
        pixels: list[list[int]] = []
        if source.mean is not None and PRIVATE_SCALING in source.info:  # public constants are sent
            pixels, facts = channel_counts(source.x).tolist(), {**facts, "mean": None, "std": None}
        return SampleSummary(name=self.name, source=facts, pixels=tuple(map(tuple, pixels)))

    def samples(self, config: ExperimentConfig, seed: int, number: int, prepared: Any) -> ClientSamples:
        """Return this client's samples, with the classes, channels and scaling of all clients."""
        samples, facts = self.parts(config, seed, number, prepared["rows"]), prepared["facts"]
        source, info, y = samples.source, dict(samples.source.info), samples.source.y
        if source.task in CLASSES:
            classes = list(facts["info"]["classes"])
            if strange := sorted({*source.info["classes"]} - {*classes}):
                raise DataError(
                    f"'{self.path}' has classes that the others do not have: {', '.join(strange[:10])}"
                )
            numbers = torch.tensor([classes.index(name) for name in source.info["classes"]])
            info, y = {**info, "classes": tuple(classes)}, numbers[source.y]
        x, mean, std = source.x, facts["mean"], facts["std"]
        if mean is not None:
            if len(mean) not in (1, 3, x.shape[1]):
                raise MessageError(f"the server scales images of {len(mean)} channels")
            x, mean, std = x.expand(-1, len(mean), -1, -1).contiguous(), tuple(mean), tuple(std)
        fitted = replace(source, x=x, y=y, outputs=int(facts["outputs"]), mean=mean, std=std, info=info)
        if (shape := source_facts(fitted)["x"]) != facts["x"]:
            raise DataError(f"a sample is {shape}, but those of the others are {facts['x']}")
        return replace(samples, source=fitted)

    @staticmethod
    def common(
        data: DataConfig, features: Sequence[str], rows: Sequence[int], summaries: Sequence[SampleSummary]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the classes of all clients and, for images, the channels and scaling of all."""
        first, images = summaries[0], data.name == IMAGES
        facts = dict(first.source)
        alike = ["task", "x", "y", "augment", "mean", "std", "credit", "info"]
        alike += [] if facts["task"] in CLASSES else ["outputs"]
        for summary in summaries[1:]:
            for key in alike:
                expected, actual = (
                    _comparable(key, source[key], images) for source in (facts, summary.source)
                )
                if expected != actual:
                    hint = " (for images set data.options.size=[HEIGHT, WIDTH])" if images else ""
                    raise DataError(
                        f"the samples of '{first.name}' and '{summary.name}' differ in {key}: {expected} and {actual}; "
                        f"one model must fit both{hint}"
                    )
        if facts["task"] in CLASSES:
            names = sorted({str(name) for summary in summaries for name in summary.source["info"]["classes"]})
            classes = names if images else in_order(names)
            if facts["task"] == "binary" and len(classes) != 2:
                raise DataError(
                    f"a binary label has two values, but there are {len(classes)}: {', '.join(classes[:10])}"
                )
            facts["info"] = {**facts["info"], "classes": classes}
            facts["outputs"] = 1 if facts["task"] == "binary" else len(classes)
        if images:
            for summary in summaries:
                if summary.source["x"][0][0] not in (1, 3):
                    raise DataError(f"the images of '{summary.name}' are neither grey nor of three colours")
            channels = max(summary.source["x"][0][0] for summary in summaries)
            facts["x"] = [[channels, *facts["x"][0][1:]], facts["x"][1]]
            facts |= _scaling(summaries, channels, facts)
        facts |= {"name": "images" if images else "texts", FITTED: images and bool(first.pixels)}
        return {"facts": facts, "rows": list(rows)}, facts


def _comparable(key: str, value: Any, images: bool) -> Any:
    """Return the part of a fact about samples that must be equal for all clients."""
    if key == "x" and images:  # grey ones get the channels of the others
        return [value[0][1:], value[1]]
    if key in ("mean", "std"):
        return value and value[:1]
    if key == "info":  # the classes are those of all
        return {**value, "classes": None}
    return value


def _scaling(summaries: Sequence[SampleSummary], channels: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Return mean and deviation of each channel over all images; a grey channel counts for each colour."""
    if facts["mean"] is not None:
        return {"mean": facts["mean"][:1] * channels, "std": facts["std"][:1] * channels}
    total = torch.zeros(channels, BYTES, dtype=torch.int64)
    for summary in summaries:
        counts = torch.tensor(summary.pixels, dtype=torch.int64)
        if counts.shape not in ((1, BYTES), (channels, BYTES)) or bool((counts < 0).any()):
            raise DataError(f"the pixel counts of '{summary.name}' are not {BYTES} counts for each channel")
        total += counts
    mean, std = statistics_of(total)
    return {"mean": list(mean), "std": list(std)}


class OwnTexts(OwnSamples):
    """A CSV, TSV or parquet file of one client's texts."""

    def read(self, data: DataConfig, features: tuple[str, ...]) -> Source:
        """Return the texts as tokens."""
        options = dict(data.options)
        self.policy.check_columns([str(options[key]) for key in ("label", "text") if key in options])
        # A client may have only one of the two classes of a binary label.
        binary = options.get("task") == "binary"
        options |= {"task": "classification"} if binary else {}
        source = replace(from_texts(self.path, **options), name=self.path.name)
        return replace(source, task="binary", outputs=1) if binary else source


class OwnImages(OwnSamples):
    """A folder of one client's images, with one folder per class."""

    def read(self, data: DataConfig, features: tuple[str, ...]) -> Source:
        """Return the images as bytes."""
        return from_client_folder(self.path, **{k: v for k, v in data.options.items() if k != "group"})


KINDS: dict[str, type[OwnFile]] = {"table": OwnTable, "text_table": OwnTexts, IMAGES: OwnImages}
"""`data.name` -> kind of the clients' files."""


def kind_of(data: DataConfig) -> type[OwnFile]:
    """Return the kind of files that clients need for an experiment with these data.

    Raises:
        ConfigError: these data are not read from clients' files, or not with these settings.
    """
    if data.name not in KINDS:
        raise ConfigError(
            f"data.name is '{data.name}', but clients with their own files (--data) can use {', '.join(KINDS)}; set "
            "data.name to one of these"
        )
    central = {
        "data.samples": data.samples,
        "data.partition": None if data.partition in (None, "natural") else data.partition,
        "data.corruptions": data.corruptions,
        "data.shifts": data.shifts,
        "data.options.client": data.options.get("client"),
        "data.options.split": data.options.get("split"),
    }
    for name, value in central.items():
        if value:
            raise ConfigError(
                f"{name} is for data in one place, but here every client has its own file; leave it out"
            )
    if data.name != IMAGES and "label" not in data.options:
        raise ConfigError("the experiment does not name the label's column; set data.options.label=COLUMN")
    if data.name != "table" and data.normalise != "none":
        raise ConfigError(
            f"data.normalise={data.normalise} is for the numbers of a table, and '{data.name}' has none; leave it out"
        )
    return KINDS[data.name]


class FileOfAnyKind:
    """One client's own file or folder; the experiment determines its kind."""

    def __init__(self, name: str, path: Path, policy: Policy) -> None:
        self.name, self.path, self.policy = name, path, policy
        self._read: dict[str, OwnFile] = {}

    def of_kind(self, data: DataConfig) -> OwnFile:
        """Return the file as the kind that these data require. Raises ConfigError, see `kind_of`."""
        kind = kind_of(data)
        return self._read.setdefault(data.name, kind(self.name, self.path, self.policy))


def own_data(
    data: str | Path | None, name: str | None, policy: Policy = DEFAULT_POLICY
) -> DataShare | FileOfAnyKind:
    """Return the source of a client's samples."""
    if data is None:
        if name is None:
            raise ConfigError(
                "a client needs its data (--data FILE), or a name (--name NAME) to take that client's share of the "
                "experiment's own data"
            )
        return DataShare(name)
    path = Path(data).expanduser()
    return FileOfAnyKind((path.name if path.is_dir() else path.stem) if name is None else name, path, policy)
