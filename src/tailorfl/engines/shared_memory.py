"""Memory that several processes see: an unnamed file that is mapped, and that may grow.

Where there is one on Linux, the file is a piece of memory of its own, which no size of a shared-memory file system
limits and which is gone with the last process that has it open, however that one ends.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tailorfl.errors import RunError

ALIGNMENT = 64
"""Bytes; as torch aligns its own tensors, since matrix products round otherwise elsewhere on some processors."""


class Block:
    """Bytes that a process and the workers it starts share. Only the process that made a block makes it larger.

    A block takes one open file, whatever lies in it. Its bytes on a disk are taken when they are reserved: a write to a
    mapped byte that a full disk has no place for would end the process by SIGBUS, without a word.

    Args:
        folder: where a file holds them that no one else can open; None keeps them in memory.

    Raises:
        RunError: the folder or a file in it cannot be made.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._map: mmap.mmap | None = None
        self._folder = folder
        try:
            self._file = self._open(folder)
        except OSError as error:
            if folder is None:
                raise
            raise RunError(
                f"cannot keep private states in '{folder}': {error.strerror or error}; choose another folder with "
                "--out, or keep them in memory (engine.states=memory)"
            ) from error

    @staticmethod
    def _open(folder: Path | None) -> Any:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        if folder is None and hasattr(os, "memfd_create"):
            return os.fdopen(os.memfd_create("tailorfl"), "r+b", buffering=0)
        return tempfile.TemporaryFile(dir=folder, buffering=0)

    def reserve(self, size: int) -> None:
        """Make the block hold at least `size` bytes; what it held stays where it is.

        Raises:
            RunError: the disk has no place for them; the block is then as it was.
        """
        before = os.fstat(self._file.fileno()).st_size
        if size <= before:
            return
        if self._folder is None:
            self._file.truncate(size)
            return
        try:
            _allocate(self._file, before, size - before)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            raise RunError(
                f"cannot keep private states in '{self._folder}': {error.strerror or error} ({size - before:,} more "
                f"bytes are needed beside {before:,}); free some space and continue with --resume, choose another disk "
                "with --out, or keep them in memory (engine.states=memory)"
            ) from error

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> Tensor:
        """Return the tensor that lies at `offset`: not a copy, whoever writes into it writes for all."""
        count = int(torch.Size(shape).numel())
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        end = offset + count * dtype.itemsize
        if self._map is None or len(self._map) < end:
            # Tensors on the mapping before this one keep it alive for themselves.
            self._map = mmap.mmap(self._file.fileno(), os.fstat(self._file.fileno()).st_size)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
        return flat.reshape(tuple(shape))

    def rows(self, dtype: torch.dtype, shape: Sequence[int], offset: int, stride: int) -> Tensor:
        """Return the tensor of `shape` [rows, ...] whose first row lies at `offset`, and each next one `stride` on.

        `offset` and `stride` are multiples of `ALIGNMENT`.
        """
        rows, *inner = shape
        row_bytes = int(torch.Size(inner).numel()) * dtype.itemsize
        if not rows or not row_bytes:
            return torch.empty(tuple(shape), dtype=dtype)
        table = self.tensor(torch.uint8, (rows, stride))
        return table[:, offset : offset + row_bytes].view(dtype).view(tuple(shape))

    def release(self) -> None:
        """Take a file's bytes out of this process's memory; they are read again where they are looked at."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def __getstate__(self) -> Any:
        """Return what a process that is being started gets in its place: the open file."""
        from multiprocessing.reduction import DupFd

        return cast(Any, DupFd)(self._file.fileno())

    def __setstate__(self, state: Any) -> None:
        self._map, self._folder, self._file = None, None, os.fdopen(state.detach(), "r+b", buffering=0)


def _allocate(file: Any, offset: int, size: int) -> None:
    """Take `size` bytes of the disk for a file from `offset` on. Raises OSError where there are not so many."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), offset, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise  # what is left are file systems that cannot do it by themselves
    piece = bytes(min(size, 2**20))
    file.seek(offset)
    while size > 0:
        size -= file.write(piece[:size])


def aligned(offset: int) -> int:
    """Return the first offset from `offset` on at which a tensor may lie."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
