"""A client's own texts or images, and which kind of file an experiment asks for by `data.name`.

The steps are those of a table (`own_table`). What is told are the shape of a sample, the names of the classes, and of
images how often each byte occurs in each channel, from which the server has the mean and the deviation of all; with
`data.options.scaling=public` nothing is told of the pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tailorfl.data.columns import in_order
from tailorfl.data.folder import channel_counts, from_client_folder, statistics_of
from tailorfl.data.remote_federation import FITTED, ClientSamples, source_facts
from tailorfl.data.scaling import PRIVATE_SCALING
from tailorfl.data.source import Source
from tailorfl.data.summaries import CLASSES, JsonRecord
from tailorfl.data.text import from_texts
from tailorfl.deploy.own_data import DataShare, OwnFile
from tailorfl.deploy.own_table import OwnTable
from tailorfl.deploy.policy import DEFAULT_POLICY, Policy
from tailorfl.errors import ConfigError, DataError, MessageError
from tailorfl.settings.data import DataConfig
from tailorfl.settings.experiment import ExperimentConfig

BYTES = 256


class SampleSummary(JsonRecord):
    """Facts that one client tells of its samples, beside how many there are."""

    name: str
    source: dict[str, Any]
    """See `tailorfl.data.remote_federation.source_facts`; the classes are its own, and no statistic is in it."""
    pixels: tuple[tuple[int, ...], ...] = ()
    """How often each byte occurs, by channel; empty where samples are no images, or scaled by constants."""


class OwnSamples(OwnFile):
    """Samples that fit all others' once their classes, shape and scaling are known."""

    summary_type = SampleSummary

    def summarised(self, data: DataConfig, samples: ClientSamples) -> SampleSummary:
        """Return what all samples have to fit."""
        source, facts = samples.source, source_facts(samples.source)
        pixels: list[list[int]] = []
        if source.mean is not None and PRIVATE_SCALING in source.info:  # constants that are public are told
            pixels, facts = channel_counts(source.x).tolist(), {**facts, "mean": None, "std": None}
        return SampleSummary(name=self.name, source=facts, pixels=tuple(map(tuple, pixels)))

    def samples(self, config: ExperimentConfig, seed: int, number: int, prepared: Any) -> ClientSamples:
        """Return this client's samples, with the classes, channels and scaling of all."""
        samples, facts = self.parts(config, seed, number, prepared["rows"]), prepared["facts"]
        source, info, y = samples.source, dict(samples.source.info), samples.source.y
        if source.task in CLASSES:
            classes = list(facts["info"]["classes"])
            if strange := sorted({*source.info["classes"]} - {*classes}):
                raise DataError(
                    f"'{self.path}' has classes that the others have not: {', '.join(strange[:10])}"
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
        """Return the classes of all and, of images, the channels and scaling of all."""
        first, images = summaries[0], data.name == IMAGES
        facts = dict(first.source)
        for summary in summaries[1:]:
            for key in ("task", "x", "y", "augment"):
                expected, actual = facts[key], summary.source[key]
                if key == "x" and images:  # grey ones get the channels of the others
                    expected, actual = ([x[0][1:], x[1]] for x in (expected, actual))
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
            channels = max(summary.source["x"][0][0] for summary in summaries)
            facts["x"] = [[channels, *facts["x"][0][1:]], facts["x"][1]]
            facts |= _scaling(summaries, channels, facts)
        facts |= {"name": "images" if images else "texts", FITTED: images and bool(first.pixels)}
        return {"facts": facts, "rows": list(rows)}, facts


def _scaling(summaries: Sequence[SampleSummary], channels: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Return mean and deviation of each channel of all images; those of one grey channel count for each colour."""
    if facts["mean"] is not None:
        return {"mean": facts["mean"][:1] * channels, "std": facts["std"][:1] * channels}
    total = torch.zeros(channels, BYTES, dtype=torch.int64)
    for summary in summaries:
        counts = torch.tensor(summary.pixels, dtype=torch.int64)
        if counts.shape not in ((1, BYTES), (channels, BYTES)) or bool((counts < 0).any()):
            raise DataError(
                f"what '{summary.name}' tells of its pixels are no counts of {BYTES} bytes a channel"
            )
        total += counts
    mean, std = statistics_of(total)
    return {"mean": list(mean), "std": list(std)}


class OwnTexts(OwnSamples):
    """A CSV, TSV or parquet file of one client's texts."""

    def read(self, data: DataConfig, features: tuple[str, ...]) -> Source:
        """Return the texts as tokens."""
        options = dict(data.options)
        self.policy.check_columns([str(options[key]) for key in ("label", "text") if key in options])
        # Of the two classes of a binary label a client may have one.
        binary = options.get("task") == "binary"
        options |= {"task": "classification"} if binary else {}
        source = replace(from_texts(self.path, **options), name=self.path.name)
        return replace(source, task="binary", outputs=1) if binary else source


class OwnImages(OwnSamples):
    """A folder of one client's images, one folder a class."""

    def read(self, data: DataConfig, features: tuple[str, ...]) -> Source:
        """Return the images as bytes."""
        return from_client_folder(self.path, **{k: v for k, v in data.options.items() if k != "group"})


IMAGES = "folder"
KINDS: dict[str, type[OwnFile]] = {"table": OwnTable, "text_table": OwnTexts, IMAGES: OwnImages}
"""`data.name` -> what clients bring."""


def kind_of(data: DataConfig) -> type[OwnFile]:
    """Return what clients bring to an experiment with these data.

    Raises:
        ConfigError: none of their own, or not in this way.
    """
    if data.name not in KINDS:
        raise ConfigError(
            f"clients that name their own file (--data) have {', '.join(KINDS)}, but the experiment's data.name is "
            f"'{data.name}'; set data.name to one of these"
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
                f"{name} is for data that lie in one place; here every client has a file of its own, so leave it out"
            )
    if data.name != IMAGES and "label" not in data.options:
        raise ConfigError("the experiment does not say which column is the label: data.options.label=COLUMN")
    if data.name != "table" and data.normalise != "none":
        raise ConfigError(
            f"data.normalise={data.normalise} is for numbers of a table; '{data.name}' has none, so leave it out"
        )
    return KINDS[data.name]


class FileOfAnyKind:
    """One client's own file or folder; the experiment says of which kind."""

    def __init__(self, name: str, path: Path, policy: Policy) -> None:
        self.name, self.path, self.policy = name, path, policy
        self._read: dict[str, OwnFile] = {}

    def of_kind(self, data: DataConfig) -> OwnFile:
        """Return the file as one of the kind that these data ask for. Raises ConfigError as `kind_of`."""
        kind = kind_of(data)
        return self._read.setdefault(data.name, kind(self.name, self.path, self.policy))


def own_data(
    data: str | Path | None, name: str | None, policy: Policy = DEFAULT_POLICY
) -> DataShare | FileOfAnyKind:
    """Return where a client's samples come from."""
    if data is None:
        if name is None:
            raise ConfigError(
                "a client needs its data (--data FILE), or a name (--name NAME) to take that client's share of the "
                "experiment's own data"
            )
        return DataShare(name)
    path = Path(data).expanduser()
    return FileOfAnyKind((path.name if path.is_dir() else path.stem) if name is None else name, path, policy)
