"""Memory: how much there is, what to do when it was not enough, keeping what was freed, and sharing it with processes.

Training allocates and frees tensors of the same few megabytes thousands of times. glibc gives blocks of that
size back to the kernel at once, and each new one costs a page fault per 4 KiB: a third of the time of a round
of logistic regression. Raising two thresholds of its allocator stops that; peak memory stays as it is. Blocks above
the highest threshold, such as the replies of a whole cohort, have a `Room` that keeps them.

Memory that several processes see is an unnamed file that is mapped, and that may grow. Where there is one on Linux, the
file is a piece of memory of its own, which no size of a shared-memory file system limits and which is gone with the
last process that has it open, however that one ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import logging
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tailorfl.errors import MemoryLimitError, RunError
from tailorfl.training.cohort import Cohort

log = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""glibc ignores more."""
COPIES = 6
"""A client in training holds about so many times its parameters: state, message, copy, gradient, two of the step."""

USABLE = 0.8
"""The share of the free memory that a chunk may take."""

_MEMINFO = Path("/proc/meminfo")

_MARKS = ("DefaultCPUAllocator", "not enough memory", "can't allocate memory", "Cannot allocate memory")
"""Parts of torch's messages that the host has no memory left; it has no type of its own for that."""


@functools.cache
def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep freed blocks.

    Returns whether there is one to tell (Linux with glibc).
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))


class Room:
    """Memory of large tensors: used again by one of the same size when the last tensor that lies in it is gone.

    What is free is given back as soon as a tensor of another size is asked for.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor whose numbers are whatever lay there."""
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        if size <= _LARGEST_MMAP_THRESHOLD:
            return torch.empty(tuple(shape), dtype=dtype)
        fitting = [k for k, block in enumerate(self._free) if len(block) == size]
        if not fitting:
            self._free.clear()
        block = self._free.pop(fitting[0]) if fitting else torch.empty(size, dtype=torch.uint8)
        # Tensors made of an array keep it, and all that share their memory do: its end is the end of their use.
        array = block.numpy()
        weakref.finalize(array, self._free.append, block).atexit = False
        return torch.from_numpy(array).view(dtype).reshape(tuple(shape))

    def __reduce__(self) -> tuple[type[Room], tuple[()]]:
        """Another process gets room of its own."""
        return Room, ()


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that are free on a device; None where nobody says."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    if device.type == "cpu" and _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def fitting(device: torch.device, bytes_each: float) -> int:
    """Return how many clients that take `bytes_each` fit into the free memory, at least one."""
    free = free_memory(device)
    return sys.maxsize if free is None else max(1, int(USABLE * free / max(bytes_each, 1.0)))


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that caused it, says that memory was not enough."""
    return any(
        isinstance(e, torch.OutOfMemoryError | MemoryError)
        or (isinstance(e, RuntimeError) and any(mark in str(e) for mark in _MARKS))
        for e in _causes(error)
    )


def halved(cohort: Cohort, device: torch.device, error: BaseException) -> int:
    """Return how many clients to try after those of `cohort` did not fit together, and say so in the log.

    Raises:
        MemoryLimitError: it was a single one.
    """
    clients = len(cohort.ids)
    if clients == 1:
        raise too_large(cohort, device) from error
    log.warning(
        "round %d: out of memory on %s with %d clients at once; going on with %d",
        cohort.round + 1,
        device,
        clients,
        clients // 2,
    )
    return clients // 2


def too_large(cohort: Cohort, device: torch.device) -> MemoryLimitError:
    """Return the error of a client that does not fit into memory even alone; `cohort` holds it alone."""
    config = cohort.config
    length = f"{config.epochs:,} epochs" if config.steps is None else f"{config.steps:,} steps"
    return MemoryLimitError(
        f"client {cohort.ids[0]} alone does not fit into the memory of {device} in round {cohort.round + 1} (a model "
        f"of {cohort.model.scalars:,} trained scalars, {length} of batches of {config.batch_size}); lower "
        "train.batch_size, train.steps or train.epochs, take a smaller model or fewer trained layers "
        "(model.trainable), or another engine.device"
    )


def release(device: torch.device) -> None:
    """Give back what a failed chunk has left behind."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Peak:
    """The most memory that a GPU held between the start and a call of `bytes`, beyond what it held at the start."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._start = torch.cuda.memory_allocated(device)

    def bytes(self) -> int:
        """Return it."""
        return int(torch.cuda.max_memory_allocated(self.device)) - self._start


def _causes(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__


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
