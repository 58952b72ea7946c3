"""The frozen front of a network, computed once for each sample and kept (`engine.features`).

`Featured` is a data set whose samples are the features of another data set's samples, computed by the extractor of
`tailorfl.models.frozen_features`. Clients, the server and evaluations read it like any other data set. Rows are
computed on first use, in fixed blocks, so a run is bit-identical whichever process reads a row first.
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
"""Number of samples that go through the front at once."""


class FeatureTable:
    """Features of a source's samples, [samples, width], computed in blocks on first use.

    The features, and flags of the computed blocks, are in memory that worker processes share: each block is computed
    once.

    Args:
        source: the samples.
        front: computes the features.
        order: int64, every row of the source once; rows that are used together are adjacent.
        used: number of rows, from the start of `order`, that some client has; `ensure` computes others too.
        folder: of the file that holds the features; None keeps them in memory.

    Raises:
        RunError: the file cannot be made, or the disk has no space for it.
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
        """Compute missing features of the samples `rows`, int64 of any shape in host memory."""
        if self._is_full:
            return
        blocks = self._block_of[rows.reshape(-1).numpy()]
        if not self._there[blocks].all():
            self._fill(np.unique(blocks[self._there[blocks] == 0]).tolist(), HOST)
        self._is_full = bool(self._there.all())

    def fill(self, device: torch.device) -> None:
        """Compute missing features of the samples that clients have, on a device; set all others to NaN."""
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
        """Return the estimated seconds that all of it takes on this machine, from the time of one block."""
        rows = torch.from_numpy(self._blocks[0])
        self.front(self.source.take(rows))
        begin = time.perf_counter()
        self.front(self.source.take(rows))
        return (time.perf_counter() - begin) * self.used / max(len(rows), 1)


class Featured(Source):
    """A data set whose samples are the features of another data set's samples, [samples, width]."""

    table: FeatureTable

    @classmethod
    def of(cls, source: Source, table: FeatureTable) -> Featured:
        """Return `source` with its samples replaced by the features of a table; the targets stay."""
        return copied(cls, source, mean=None, std=None, augment="none", x=table.values, table=table)

    @property
    def original(self) -> Source:
        """The samples from which the features are computed."""
        return self.table.source

    def at_hand(self, device: torch.device) -> Source:
        """Return an ordinary data set in host memory, with all features computed on a device."""
        self.table.fill(device)
        return copied(Source, self)

    def _picked(self, rows: Tensor) -> Tensor:
        self.table.ensure(rows)
        return super()._picked(rows)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it with all features computed, for a process that does not share this one's memory."""
        return copied, (Source, copied(Source, self.at_hand(HOST), x=self.x.clone()))


class Tables:
    """The tables of one front for the sources of a federation; runs on one federation share equal tables."""

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
        """Return the rows of a source, grouped by client, then those of no client; and the number of the former."""
        rows = np.arange(len(source), dtype=np.int64)
        if source.x is not self._federation.source.x:
            return rows, len(rows)
        dealt = dealt_rows(self._federation)
        return np.concatenate([dealt, np.setdiff1d(rows, dealt)]), len(dealt)


def dealt_rows(federation: Federation) -> Ints:
    """Return the rows of the clients' source that some client has, each once, grouped by client."""
    parts = [federation.part(part) for part in ("train", "val", "test")]
    rows = np.concatenate([rows_of[client] for client in range(len(federation)) for rows_of in parts])
    return rows[np.sort(np.unique(rows, return_index=True)[1])]


def digest_of(source: Source) -> str:
    """Return a hash of the samples of a source as a network sees them."""
    return hashlib.blake2b(
        f"{tensor_digest(source.x)} {source.mean} {source.std}".encode(), digest_size=16
    ).hexdigest()


def _digest(front: FeatureExtractor) -> str:
    """Return a hash of all that features depend on but the samples: frozen weights, layers and the boundary."""
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
"""Largest shares of free memory and disk space that features take."""


@dataclass(frozen=True)
class FeatureSettings:
    """Settings as in `tailorfl.settings.execution`; files are made in `folder`, by default the temporary folder."""

    place: FeaturePlace = DEFAULT.engine.features
    gigabytes: float = DEFAULT.engine.features_memory
    folder: Path | None = None


FEATURES = FeatureSettings("off")
"""Settings of a run built directly in Python: its cohorts hold the original samples."""


@dataclass(frozen=True)
class Features:
    """A run whose frozen front is computed once.

    Attributes:
        model: the layers after the front; its state is that of the whole network.
        federation: the federation with features as samples.
        see: returns the features of any further source.
        bytes: size of all features.
        on_disk: whether they are in a file.
    """

    model: Model
    federation: Federation
    see: Callable[[Source], Source]
    bytes: int
    on_disk: bool

    @property
    def tables(self) -> list[FeatureTable]:
        """The tables of the clients' samples, the public set and the shifted sets."""
        sources = (self.federation.source, self.federation.public, *self.federation.shifted.values())
        return [table for source in sources if (table := getattr(source, "table", None)) is not None]

    def compute(self) -> None:
        """Compute all features now instead of on first use."""
        for table in self.tables:
            table.fill(HOST)

    def seconds(self) -> float:
        """Return the estimated seconds to compute all features on this machine."""
        return sum(table.seconds() for table in self.tables)


def frozen_front(
    models: Mapping[str, Model], federation: Federation, seed: int, settings: FeatureSettings
) -> tuple[Features | None, str]:
    """Return the features that a run uses, or None if nothing is computed once; and the reason as text.

    Args:
        models: the model that clients train, by architecture.
        federation: the samples.
        seed: of the run.
        settings: whether and where features are kept, and how much memory they may take.
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
            reason = f"their file cannot be created: {error}"
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
        "frozen layers are computed again in every pass, since their outputs are not kept: %s",
        reason,
        extra={"once": reason},
    )
    return None, reason


def _hindrance(models: Mapping[str, Model], federation: Federation, settings: FeatureSettings) -> str:
    """Return why features cannot be computed once, judged before looking at the network's layers; "" if they can."""
    if settings.place == "off":
        return "engine.features is off"
    if not any(model.frozen for model in models.values()):
        return "nothing is frozen"
    if len(models) > 1:
        return "clients have different architectures"
    source, public = federation.source, federation.public
    if source.task == "generation":
        return "a model that generates text needs the text itself"
    if any(s is not None and s.augment != "none" for s in (source, public)):
        return "images are augmented, so they differ in every pass"
    return f"there are fewer than {SAMPLES} samples" if len(source) < SAMPLES else ""


def _where(size: int, settings: FeatureSettings) -> tuple[Path | None, str]:
    """Return (folder of a file for `size` bytes, or None for memory; why they cannot be kept, else "")."""
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
            f"the outputs take {size / 1e9:,.1f} GB, and '{folder}' cannot be used: {error.strerror or error}",
        )
    if size <= DISK_SHARE * free_on_disk:
        return folder, ""
    return None, (
        f"the outputs take {size / 1e9:,.1f} GB, but engine.features_memory allows {settings.gigabytes:g} GB of "
        f"memory, and the disk of '{folder}' has {free_on_disk / 1e9:,.1f} GB left"
    )
