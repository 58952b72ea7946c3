"""Memory that several processes see: an unnamed file that is mapped, and that may grow.

Where there is one on Linux, the file is a piece of memory of its own, which no size of a shared-memory file system
limits and which is gone with the last process that has it open, however that one ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; as torch aligns its own tensors, since matrix products round otherwise elsewhere on some processors."""


class Block:
    """Bytes that a process and the workers it starts share. Only the process that made a block makes it larger.

    Args:
        folder: where a file holds them that no one else can open; None keeps them in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._map: mmap.mmap | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        if folder is None and hasattr(os, "memfd_create"):
            self._file: Any = os.fdopen(os.memfd_create("tailorfl"), "r+b", buffering=0)
        else:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  open as long as the block

    def reserve(self, size: int) -> None:
        """Makes the block hold at least `size` bytes; what it held stays where it is."""
        if size > os.fstat(self._file.fileno()).st_size:
            self._file.truncate(size)

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> Tensor:
        """Returns the tensor that lies at `offset`: not a copy, whoever writes into it writes for all."""
        count = int(torch.Size(shape).numel())
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        end = offset + count * dtype.itemsize
        if self._map is None or len(self._map) < end:
            # Tensors on the mapping before this one keep it alive for themselves.
            self._map = mmap.mmap(self._file.fileno(), os.fstat(self._file.fileno()).st_size)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
        return flat.reshape(tuple(shape))

    def release(self) -> None:
        """Takes a file's bytes out of this process's memory; they are read again where they are looked at."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def __getstate__(self) -> Any:
        """What a process that is being started gets in its place: the open file."""
        from multiprocessing.reduction import DupFd

        return cast(Any, DupFd)(self._file.fileno())

    def __setstate__(self, state: Any) -> None:
        self._map, self._file = None, os.fdopen(state.detach(), "r+b", buffering=0)


def aligned(offset: int) -> int:
    """Returns the first offset from `offset` on at which a tensor may lie."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
