"""The frozen front of a network, computed once for each sample and kept (`engine.features`).

`Featured` is a data set whose samples are what the extractor of `tailorfl.models.frozen_features` makes of those of
another one: clients, the server and evaluations read it like any other. Rows are computed when they are first asked
for, in blocks that do not depend on who asks, so a run has the same bits whoever comes first, in whichever process.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.federation import Federation
from tailorfl.data.source import Source, copied
from tailorfl.engines.devices import HOST
from tailorfl.engines.memory import Block, free_memory
from tailorfl.errors import RunError
from tailorfl.models.frozen_features import SAMPLES, FeatureExtractor, NoFeaturesError, find_boundary
from tailorfl.models.functional import Model
from tailorfl.models.skeleton import tensors_of
from tailorfl.partition.rows import Ints
from tailorfl.settings.execution import FeaturePlace
from tailorfl.settings.experiment import DEFAULT
from tailorfl.training import tree

BLOCK = 32
"""So many samples go through the front at once."""


class FeatureTable:
    """Features of the samples of a source, [samples, width], of which blocks are filled when they are needed.

    The numbers, and which blocks are there, lie where worker processes see them: each block is computed once.

    Args:
        source: the samples.
        front: what makes features of them.
        order: int64, every row of the source once; those that are used together stand together.
        used: so many of them, from the first on, somebody has; others are computed if they are asked for all the same.
        folder: of the file that holds the numbers; None keeps them in memory.

    Raises:
        RunError: the file cannot be made, or the disk has no place for it.
    """

    def __init__(
        self, source: Source, front: FeatureExtractor, order: Ints, used: int, folder: Path | None
    ) -> None:
        self.source, self.front, self.on_disk, self.used = source, front, folder is not None, used
        self._blocks = np.array_split(order, range(BLOCK, len(order), BLOCK))
        self._block_of = np.empty(len(order), dtype=np.int64)
        for number, rows in enumerate(self._blocks):
            self._block_of[rows] = number
        memory, is_there = Block(folder), Block()
        memory.reserve(len(order) * front.boundary.width * front.boundary.dtype.itemsize)
        is_there.reserve(len(self._blocks))
        self.values = memory.tensor(front.boundary.dtype, (len(order), front.boundary.width))
        self._there = is_there.tensor(torch.uint8, (len(self._blocks),)).numpy()
        self._is_full = False

    def ensure(self, rows: Tensor) -> None:
        """Compute what is not there of the samples `rows`, int64 of any shape in host memory."""
        if self._is_full:
            return
        blocks = self._block_of[rows.reshape(-1).numpy()]
        if not self._there[blocks].all():
            self._fill(np.unique(blocks[self._there[blocks] == 0]).tolist(), HOST)
        self._is_full = bool(self._there.all())

    def fill(self, device: torch.device) -> None:
        """Compute what is not there of the samples that somebody has, on a device; others are no numbers."""
        missing = np.flatnonzero(self._there == 0)
        is_used = missing < -(-self.used // BLOCK)
        self._fill(missing[is_used].tolist(), device)
        for number in missing[~is_used].tolist():
            self.values[torch.from_numpy(self._blocks[number])] = torch.nan
        self._is_full = bool(self._there.all())

    def _fill(self, blocks: Sequence[int], device: torch.device) -> None:
        front = self.front if device == HOST or not blocks else self.front.on(device)
        for number in blocks:
            rows = torch.from_numpy(self._blocks[number])
            self.values[rows] = front(self.source.take(rows).to(device)).to(HOST)
            self._there[number] = 1

    def seconds(self) -> float:
        """Seconds that all of it takes on this machine, judging by one block."""
        rows = torch.from_numpy(self._blocks[0])
        self.front(self.source.take(rows))
        begin = time.perf_counter()
        self.front(self.source.take(rows))
        return (time.perf_counter() - begin) * self.used / max(len(rows), 1)


class Featured(Source):
    """A data set whose samples are the features of those of another one, [samples, width]."""

    table: FeatureTable

    @classmethod
    def of(cls, source: Source, table: FeatureTable) -> Featured:
        """Return the samples of `source`, which have its targets, as the features of a table."""
        return copied(cls, source, mean=None, std=None, augment="none", x=table.values, table=table)

    @property
    def original(self) -> Source:
        """The samples that they are the features of."""
        return self.table.source

    def at_hand(self, device: torch.device) -> Source:
        """Return the same with all features computed, on a device, as an ordinary data set in host memory."""
        self.table.fill(device)
        return copied(Source, self)

    def _picked(self, rows: Tensor) -> Tensor:
        self.table.ensure(rows)
        return super()._picked(rows)

    def __reduce__(self) -> tuple[Any, ...]:
        """In a process that does not share this one's memory all of it is there."""
        return copied, (Source, copied(Source, self.at_hand(HOST), x=self.x.clone()))


class Tables:
    """The tables of one front for the sources of a federation; runs on one federation share those that are equal."""

    _known: ClassVar[WeakKeyDictionary[Federation, dict[str, FeatureTable]]] = WeakKeyDictionary()

    def __init__(self, federation: Federation, front: FeatureExtractor, folder: Path | None) -> None:
        self._federation, self._front, self._folder = federation, front, folder
        self._of_front = _digest(front)
        self._featured: WeakKeyDictionary[Source, Featured] = WeakKeyDictionary()

    def see(self, source: Source) -> Featured:
        """Return a source as the rest of the network reads it."""
        if source not in self._featured:
            self._featured[source] = Featured.of(source, self._table(source))
        return self._featured[source]

    def _table(self, source: Source) -> FeatureTable:
        (order, used), tables = self._order(source), Tables._known.setdefault(self._federation, {})
        key = f"{self._of_front} {digest_of(source)} {_of_array(order)} {self._folder}"
        if key not in tables:
            tables[key] = FeatureTable(source, self._front, order, used, self._folder)
        return tables[key]

    def _order(self, source: Source) -> tuple[Ints, int]:
        """All rows of a source, each client's together, then those that no client has; how many somebody has."""
        rows = np.arange(len(source), dtype=np.int64)
        if source.x is not self._federation.source.x:
            return rows, len(rows)
        dealt = dealt_rows(self._federation)
        return np.concatenate([dealt, np.setdiff1d(rows, dealt)]), len(dealt)


def dealt_rows(federation: Federation) -> Ints:
    """Return the rows of the clients' source that somebody has, each once, those of a client together."""
    parts = [federation.part(part) for part in ("train", "val", "test")]
    rows = np.concatenate([rows_of[client] for client in range(len(federation)) for rows_of in parts])
    return rows[np.sort(np.unique(rows, return_index=True)[1])]


def digest_of(source: Source) -> str:
    """Return a hash of the samples of a source as a network sees them."""
    return hashlib.blake2b(
        f"{tensor_digest(source.x)} {source.mean} {source.std}".encode(), digest_size=16
    ).hexdigest()


def _digest(front: FeatureExtractor) -> str:
    """Return a hash of everything that features depend on but for the samples.

    Frozen weights, layers, where they end.
    """
    module = front.model.module
    tensors = tensors_of(module)
    frozen = [f"{name} {tensor_digest(tensors[name])}" for name in sorted(front.model.frozen)]
    return hashlib.blake2b(repr((front.boundary, repr(module), frozen)).encode(), digest_size=16).hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """Return a tensor's type, shape and a hash of its numbers."""
    return f"{tensor.dtype} {tuple(tensor.shape)} {_of_array(tensor.detach().cpu().contiguous())}"


def _of_array(array: Any) -> str:
    flat = array.view(torch.uint8).numpy() if isinstance(array, Tensor) and array.dim() else np.asarray(array)
    return hashlib.blake2b(np.ascontiguousarray(flat).data, digest_size=16).hexdigest()


log = logging.getLogger(__name__)

MEMORY_SHARE, DISK_SHARE = 0.5, 0.9
"""Of what is free, the most that features take."""


@dataclass(frozen=True)
class FeatureSettings:
    """As `tailorfl.settings.execution` declares it; `folder` is where files are made, by default that of the system."""

    place: FeaturePlace = DEFAULT.engine.features
    gigabytes: float = DEFAULT.engine.features_memory
    folder: Path | None = None


FEATURES = FeatureSettings("off")
"""Of a run that is made by hand: its cohorts then hold the samples as they were given."""


@dataclass(frozen=True)
class Features:
    """A run whose frozen front is computed once.

    Attributes:
        model: what comes after the front; of the same state as the whole network.
        federation: the samples as that reads them.
        see: any further source as that reads it.
        bytes: what all features take.
        on_disk: whether they lie in a file.
    """

    model: Model
    federation: Federation
    see: Callable[[Source], Source]
    bytes: int
    on_disk: bool

    @property
    def tables(self) -> list[FeatureTable]:
        """Those of the clients' samples, of the public set and of the shifted sets."""
        sources = (self.federation.source, self.federation.public, *self.federation.shifted.values())
        return [table for source in sources if (table := getattr(source, "table", None)) is not None]

    def compute(self) -> None:
        """Compute all of them, which otherwise happens when a sample is first asked for."""
        for table in self.tables:
            table.fill(HOST)

    def seconds(self) -> float:
        """Seconds that all of them take to compute on this machine."""
        return sum(table.seconds() for table in self.tables)


def frozen_front(
    models: Mapping[str, Model], federation: Federation, seed: int, settings: FeatureSettings
) -> tuple[Features | None, str]:
    """Return what a run goes on with, or None where it runs as it is, and why in words.

    Args:
        models: the model that clients train, by architecture.
        federation: the samples.
        seed: of the run.
        settings: whether it may, and what it may take.
    """
    reason = _hindrance(models, federation, settings)
    if reason:
        return None, reason
    (model,) = models.values()
    state, source = tree.tensors(model.init(seed)), federation.source
    try:
        boundary = find_boundary(model, state, source.take(torch.arange(SAMPLES)))
    except NoFeaturesError as no_features:
        return None, str(no_features)
    front = FeatureExtractor(model, boundary, state)
    other_sources = [s for s in (federation.public, *federation.shifted.values()) if s is not None]
    samples = len(dealt_rows(federation)) + sum(map(len, other_sources))
    size = samples * boundary.width * boundary.dtype.itemsize
    folder, reason = _where(size, settings)
    if not reason:
        tables = Tables(federation, front, folder)
        try:
            featured = replace(
                federation,
                source=tables.see(source),
                public=None if federation.public is None else tables.see(federation.public),
                shifted={name: tables.see(s) for name, s in federation.shifted.items()},
            )
        except (RunError, OSError) as error:
            reason = f"their file cannot be made: {error}"
        else:
            location = "in memory" if folder is None else f"in a file in {folder}"
            note = (
                f"frozen layers up to '{boundary.name}' are computed once for each sample: "
                f"{size / 1e6:,.1f} MB {location}"
            )
            log.info("%s", note, extra={"once": note})
            return Features(
                model.from_features(boundary.apply), featured, tables.see, size, folder is not None
            ), note
    log.warning(
        "frozen layers are computed anew in every pass, since what they give out is not kept: %s",
        reason,
        extra={"once": reason},
    )
    return None, reason


def _hindrance(models: Mapping[str, Model], federation: Federation, settings: FeatureSettings) -> str:
    """Return why nothing can be computed once, whatever the networks are; "" where it may."""
    if settings.place == "off":
        return "engine.features is off"
    if not any(model.frozen for model in models.values()):
        return "nothing is frozen"
    if len(models) > 1:
        return "clients have different architectures"
    source, public = federation.source, federation.public
    if source.task == "generation":
        return "a model that generates text reads the text"
    if any(s is not None and s.augment != "none" for s in (source, public)):
        return "images are augmented, so no two passes see the same ones"
    return f"there are fewer than {SAMPLES} samples" if len(source) < SAMPLES else ""


def _where(size: int, settings: FeatureSettings) -> tuple[Path | None, str]:
    """(folder of the file that holds so many bytes, or None for memory; why they cannot be held, else "")."""
    free = free_memory(HOST)
    fits = size <= settings.gigabytes * 1e9 and (free is None or size <= MEMORY_SHARE * free)
    if settings.place == "auto" and fits:
        return None, ""
    folder = Path(tempfile.gettempdir()) if settings.folder is None else settings.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_on_disk = shutil.disk_usage(folder).free
    except OSError as error:
        return (
            None,
            f"it takes {size / 1e9:,.1f} GB, and '{folder}' cannot be used: {error.strerror or error}",
        )
    if size <= DISK_SHARE * free_on_disk:
        return folder, ""
    return None, (
        f"it takes {size / 1e9:,.1f} GB, of which engine.features_memory allows {settings.gigabytes:g} GB of memory, "
        f"and the disk of '{folder}' has {free_on_disk / 1e9:,.1f} GB left"
    )
