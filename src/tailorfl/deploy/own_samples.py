"""One client's own texts or images: what is told of them, and the samples that it has in the federation.

The steps are those of a table (`own_table`). What is told are the shape of a sample, the names of the classes, and of
images how often each byte occurs in each channel, from which the server has the mean and the deviation of all; with
`data.options.scaling=public` nothing is told of the pixels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from tailorfl.data.columns import in_order
from tailorfl.data.folder import channel_counts, from_client_folder, statistics_of
from tailorfl.data.public import public_set
from tailorfl.data.remote_federation import FITTED, ClientSamples, source_facts
from tailorfl.data.rows import Ints
from tailorfl.data.scaling import PRIVATE_SCALING
from tailorfl.data.source import Source
from tailorfl.data.splits import own_rows, read_split
from tailorfl.data.summaries import CLASSES, JsonRecord
from tailorfl.data.text import from_texts
from tailorfl.deploy.own_data import Described, Summarised
from tailorfl.deploy.policy import Policy
from tailorfl.errors import ConfigError, DataError, MessageError
from tailorfl.settings.data import DataConfig
from tailorfl.settings.experiment import ExperimentConfig

BYTES = 256


class Told(JsonRecord):
    """What one client tells of its samples, beside how many there are."""

    name: str
    source: dict[str, Any]
    """See `tailorfl.data.remote_federation.source_facts`; the classes are its own, and no statistic is in it."""
    pixels: tuple[tuple[int, ...], ...] = ()
    """How often each byte occurs, by channel; empty where samples are no images, or scaled by constants."""


class OwnSamples(ABC):
    """Samples that are read from one place of a client, and fit all others' once it knows their classes and shape."""

    data: ClassVar[str]
    """The `data.name` of such an experiment."""
    told: ClassVar[type[JsonRecord]] = Told

    def __init__(self, name: str, path: Path, policy: Policy) -> None:
        self.name, self.path, self.policy = name, path, policy
        self._held: tuple[DataConfig, Source] | None = None

    @abstractmethod
    def read(self, data: DataConfig) -> Source:
        """Return the samples as this client alone has them, classes numbered among its own."""

    def described(self, config: ExperimentConfig, seed: int) -> Described:
        """Return how many samples there are."""
        return Described(None, None, {"all": len(self._source(config.data))}, {"features": []})

    def summary(self, config: ExperimentConfig, seed: int, number: int, rows: Sequence[int]) -> Summarised:
        """Return the sizes of this client's parts, and what all samples have to fit."""
        source = self._source(config.data)
        train, val, test = self._parts(config, seed, number, rows, source)
        self.policy.check_summary(source, len(train))
        counted = source.mean is not None and PRIVATE_SCALING in source.info
        pixels = channel_counts(source.x).tolist() if counted else []
        facts = {**source_facts(source), "mean": None, "std": None}
        if source.mean is not None and not counted:  # public constants
            facts |= {"mean": list(source.mean), "std": list(source.std or ())}
        told = Told(name=self.name, source=facts, pixels=tuple(tuple(row) for row in pixels))
        return Summarised({"train": len(train), "val": len(val), "test": len(test)}, told.to_dict())

    def own(self, config: ExperimentConfig, seed: int, number: int, prepared: Any) -> ClientSamples:
        """Return this client's samples, with the classes, channels and scaling of all."""
        source, facts = self._source(config.data), prepared["facts"]
        train, val, test = self._parts(config, seed, number, prepared["rows"], source)
        info, y = dict(source.info), source.y
        if source.task in CLASSES:
            classes = list(facts["info"]["classes"])
            if strange := sorted({*source.info["classes"]} - {*classes}):
                raise DataError(
                    f"'{self.path}' has classes that the others have not: {', '.join(strange[:10])}"
                )
            place = torch.tensor([classes.index(name) for name in source.info["classes"]])
            info, y = {**info, "classes": tuple(classes)}, place[source.y]
        x, mean, std = source.x, facts["mean"], facts["std"]
        if mean is not None and len(mean) not in (1, 3, x.shape[1]):
            raise MessageError(f"the server scales images of {len(mean)} channels")
        if mean is not None:
            x, mean, std = x.expand(-1, len(mean), -1, -1).contiguous(), tuple(mean), tuple(std)
        fitted = replace(source, x=x, y=y, outputs=int(facts["outputs"]), mean=mean, std=std, info=info)
        if source_facts(fitted)["x"] != facts["x"]:
            raise DataError(
                f"a sample is {source_facts(fitted)['x']}, but those of the others are {facts['x']}"
            )
        return ClientSamples(fitted, train, val, test)

    def public(self, config: ExperimentConfig, seed: int, source: Source) -> Source | None:
        """Return the public set, out of a source that every client can read."""
        if config.data.public is None:
            return None
        return public_set(config.data.public, config.data.public_samples, source, seed)

    def _source(self, data: DataConfig) -> Source:
        if self._held is None or self._held[0] != data:
            self._held = data, self.read(data)
        return self._held[1]

    def _parts(
        self, config: ExperimentConfig, seed: int, number: int, rows: Sequence[int], source: Source
    ) -> tuple[Ints, Ints, Ints]:
        if rows[number] != len(source):
            raise DataError(
                f"'{self.path}' has {len(source)} samples, but had {rows[number]} when it was described"
            )
        rule = read_split(config.data.split, official=False)
        return own_rows(number, rows, source.strata.numpy(), rule, config.data.seed_of(seed))


class OwnTexts(OwnSamples):
    """A CSV, TSV or parquet file of one client's texts."""

    data = "text_table"

    def read(self, data: DataConfig) -> Source:
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

    data = "folder"

    def read(self, data: DataConfig) -> Source:
        """Return the images as bytes."""
        return from_client_folder(self.path, **{k: v for k, v in data.options.items() if k != "group"})


def check_samples(data: DataConfig) -> None:
    """Raise ConfigError where clients' own texts or images cannot be what an experiment says of its data."""
    if data.normalise != "none":
        raise ConfigError(
            f"data.normalise={data.normalise} is for numbers of a table; '{data.name}' has none, so leave it out"
        )
    if data.name == OwnTexts.data and "label" not in data.options:
        raise ConfigError("the experiment does not say which column is the label: data.options.label=COLUMN")


def common_samples(
    data: DataConfig, features: Sequence[str], rows: Sequence[int], told: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (by what all clients prepare their samples, what a model has to know of them), as JSON can hold them.

    Args:
        data: the experiment's.
        features: none.
        rows: how many samples each client has.
        told: a `Told` of each client.

    Raises:
        DataError: samples do not fit together; names the clients.
    """
    first = told[0]
    facts = dict(first.source)
    images = data.name == OwnImages.data
    for other in told[1:]:
        for key in ("task", "x", "y", "augment"):
            mine, theirs = facts[key], other.source[key]
            if key == "x" and images:  # grey ones get the channels of the others
                mine, theirs = [mine[0][1:], mine[1]], [theirs[0][1:], theirs[1]]
            if mine != theirs:
                raise DataError(
                    f"the samples of '{first.name}' and '{other.name}' differ in {key}: {mine} and {theirs}; one model "
                    "must fit both"
                    + (" (for images set data.options.size=[HEIGHT, WIDTH])" if images else "")
                )
    channels = max((one.source["x"][0][0] for one in told), default=1) if images else 0
    if facts["task"] in CLASSES:
        found = {str(name) for one in told for name in one.source["info"]["classes"]}
        classes = sorted(found) if images else in_order(sorted(found))
        if facts["task"] == "binary" and len(classes) != 2:
            raise DataError(
                f"a binary label has two values, but there are {len(classes)}: {', '.join(classes[:10])}"
            )
        facts["info"] = {**facts["info"], "classes": classes}
        facts["outputs"] = 1 if facts["task"] == "binary" else len(classes)
    if images:
        facts["x"] = [[channels, *facts["x"][0][1:]], facts["x"][1]]
        facts |= _scaling(told, channels, facts)
    facts |= {"name": "images" if images else "texts", FITTED: images and bool(first.pixels)}
    return {"facts": facts, "rows": list(rows)}, facts


def _scaling(told: Sequence[Told], channels: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Mean and deviation of each channel of all images; those of one grey channel count for each colour."""
    if facts["mean"] is not None:
        return {"mean": facts["mean"][:1] * channels, "std": facts["std"][:1] * channels}
    counts = torch.zeros(channels, BYTES, dtype=torch.int64)
    for one in told:
        own = torch.tensor(one.pixels, dtype=torch.int64)
        if own.dim() != 2 or own.shape[1] != BYTES or len(own) not in (1, channels) or bool((own < 0).any()):
            raise DataError(f"what '{one.name}' tells of its pixels are no counts of {BYTES} bytes a channel")
        counts += own
    mean, std = statistics_of(counts)
    return {"mean": list(mean), "std": list(std)}
