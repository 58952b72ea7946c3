"""What the frozen front of a network gives out, computed once for each sample and kept.

`Featured` is a data set whose samples are what the extractor of `tailorfl.models.frozen_features` makes of those of
another one: clients, the server and evaluations read it like any other. Rows are computed when they are first asked
for, in blocks that do not depend on who asks, so a run has the same bits whoever comes first, in whichever process.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.federation import Federation
from tailorfl.data.rows import Ints
from tailorfl.data.source import Source, copied
from tailorfl.engines.devices import HOST
from tailorfl.engines.shared_memory import Block
from tailorfl.models.frozen_features import FeatureExtractor
from tailorfl.models.module_tensors import tensors_of

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
        f"{_of_tensor(source.x)} {source.mean} {source.std}".encode(), digest_size=16
    ).hexdigest()


def _digest(front: FeatureExtractor) -> str:
    """Return a hash of everything that features depend on but for the samples.

    Frozen weights, layers, where they end.
    """
    module = front.model.module
    tensors = tensors_of(module)
    frozen = [f"{name} {_of_tensor(tensors[name])}" for name in sorted(front.model.frozen)]
    return hashlib.blake2b(repr((front.boundary, repr(module), frozen)).encode(), digest_size=16).hexdigest()


def _of_tensor(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {_of_array(tensor.detach().cpu().contiguous())}"


def _of_array(array: Any) -> str:
    flat = array.view(torch.uint8).numpy() if isinstance(array, Tensor) and array.dim() else np.asarray(array)
    return hashlib.blake2b(np.ascontiguousarray(flat).data, digest_size=16).hexdigest()
