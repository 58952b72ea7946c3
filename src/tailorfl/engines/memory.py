"""Memory: how much is free, what to do if it was not enough, reusing freed memory, and sharing it between processes.

Training allocates and frees tensors of the same few megabytes thousands of times. glibc returns blocks of that size to
the kernel at once, and each new one costs a page fault per 4 KiB: a third of the time of a round of logistic
regression. Raising two thresholds of its allocator avoids that; peak memory does not change. Blocks above the highest
threshold, such as the replies of a whole cohort, are kept by a `Room`.

Memory shared by several processes is an unnamed mapped file, which may grow. On Linux it is an anonymous memory file
(memfd), which is not limited by the size of a shared-memory file system and disappears with the last process that has
it open, however that one ends.
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
"""glibc ignores larger values."""
COPIES = 6
"""Copies of its parameters that a client holds in training: state, message, copy, gradient, two in the step."""

USABLE = 0.8
"""The share of the free memory that a chunk may take."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
"""Where a container finds its own limit (cgroup v2)."""

_MARKS = ("DefaultCPUAllocator", "not enough memory", "can't allocate memory", "Cannot allocate memory")
"""Parts of torch's messages when host memory runs out; torch has no error type for it."""


@functools.cache
def keep_freed_memory() -> bool:
    """Make glibc's allocator keep freed blocks.

    Returns whether this is possible (Linux with glibc).
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))


class Room:
    """Memory of large tensors: reused for a tensor of the same size when no tensor uses it any more.

    Free memory is returned to the system when a tensor of another size is requested.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor."""
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        if size <= _LARGEST_MMAP_THRESHOLD:
            return torch.empty(tuple(shape), dtype=dtype)
        fitting = [k for k, block in enumerate(self._free) if len(block) == size]
        if not fitting:
            self._free.clear()
        block = self._free.pop(fitting[0]) if fitting else torch.empty(size, dtype=torch.uint8)
        # All tensors that share an array's memory keep it alive, so its finalizer runs when none uses it any more.
        array = block.numpy()
        weakref.finalize(array, self._free.append, block).atexit = False
        return torch.from_numpy(array).view(dtype).reshape(tuple(shape))

    def __reduce__(self) -> tuple[type[Room], tuple[()]]:
        """Pickle it empty: another process gets its own room."""
        return Room, ()


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a device; None if unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    if device.type == "cpu" and _MEMINFO.exists():
        known = [_field(_MEMINFO, "MemAvailable:", 1024), _free_in_container()]
        return min((free for free in known if free is not None), default=None)
    return None


def _free_in_container() -> int | None:
    """Return the free bytes below a container's limit, None without one; cached files can be given up at any time."""
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if not limit.exists() or not used.exists() or (most := limit.read_text().strip()) == "max":
        return None
    cached = _field(_CGROUP / "memory.stat", "inactive_file", 1) or 0
    return max(int(most) - int(used.read_text()) + cached, 0)


def _field(file: Path, name: str, unit: int) -> int | None:
    """Return a number of a file with lines of `name number`, times `unit`; None if it has no such line."""
    for line in file.read_text().splitlines() if file.exists() else ():
        if line.startswith(f"{name} "):
            return unit * int(line.split()[1])
    return None


def fitting(device: torch.device, bytes_each: float) -> int:
    """Return the number of clients of `bytes_each` that fit into free memory, at least one."""
    free = free_memory(device)
    return sys.maxsize if free is None else max(1, int(USABLE * free / max(bytes_each, 1.0)))


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, means that memory was not enough."""
    return any(
        isinstance(e, torch.OutOfMemoryError | MemoryError)
        or (isinstance(e, RuntimeError) and any(mark in str(e) for mark in _MARKS))
        for e in _causes(error)
    )


def halved(cohort: Cohort, device: torch.device, error: BaseException) -> int:
    """Return the number of clients to try after those of `cohort` did not fit together, and log it.

    Raises:
        MemoryLimitError: it was a single client.
    """
    clients = len(cohort.ids)
    if clients == 1:
        raise too_large(cohort, device) from error
    log.warning(
        "round %d: out of memory on %s with %d clients at once; continuing with %d",
        cohort.round + 1,
        device,
        clients,
        clients // 2,
    )
    return clients // 2


def too_large(cohort: Cohort, device: torch.device) -> MemoryLimitError:
    """Return the error for a client that does not fit into memory even alone; `cohort` has only this client."""
    config = cohort.config
    length = f"{config.epochs:,} epochs" if config.steps is None else f"{config.steps:,} steps"
    return MemoryLimitError(
        f"client {cohort.ids[0]} alone does not fit into the memory of {device} in round {cohort.round + 1} (a model "
        f"of {cohort.model.scalars:,} trained scalars, {length} of batches of {config.batch_size}); lower "
        "train.batch_size, train.steps or train.epochs, use a smaller model, fewer trained layers (model.trainable), "
        "or another engine.device"
    )


def release(device: torch.device) -> None:
    """Free the memory that a failed chunk has left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Peak:
    """Peak memory of a GPU from the start to a call of `bytes`, beyond the memory used at the start."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._start = torch.cuda.memory_allocated(device)

    def bytes(self) -> int:
        """Return the peak."""
        return int(torch.cuda.max_memory_allocated(self.device)) - self._start


def _causes(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__


ALIGNMENT = 64
"""Bytes; as torch aligns its own tensors, since other alignments change the rounding of products on some processors."""


class Block:
    """Bytes that a process and the workers it starts share. Only one process at a time enlarges a block.

    A block takes one open file, whatever it holds. On disk its bytes are allocated when they are reserved: otherwise
    writing to the mapping on a full disk would end the process by SIGBUS, without a message.

    Args:
        folder: of an unnamed file that holds the bytes; None keeps them in memory.

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
        """Enlarge the block to at least `size` bytes; its contents stay in place.

        Raises:
            RunError: the disk has no space for them; the block is then unchanged.
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
                f"bytes are needed in addition to {before:,}); free some space and continue with --resume, choose "
                "another disk with --out, or keep them in memory (engine.states=memory)"
            ) from error

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> Tensor:
        """Return the tensor at `offset`, not a copy: all processes see what is written to it."""
        count = int(torch.Size(shape).numel())
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        end = offset + count * dtype.itemsize
        if self._map is None or len(self._map) < end:
            # Tensors on the old mapping keep it alive.
            self._map = mmap.mmap(self._file.fileno(), os.fstat(self._file.fileno()).st_size)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
        return flat.reshape(tuple(shape))

    def rows(self, dtype: torch.dtype, shape: Sequence[int], offset: int, stride: int) -> Tensor:
        """Return the tensor of `shape` [rows, ...] whose first row is at `offset`, and each next one `stride` later.

        `offset` and `stride` are multiples of `ALIGNMENT`.
        """
        rows, *inner = shape
        row_bytes = int(torch.Size(inner).numel()) * dtype.itemsize
        if not rows or not row_bytes:
            return torch.empty(tuple(shape), dtype=dtype)
        table = self.tensor(torch.uint8, (rows, stride))
        return table[:, offset : offset + row_bytes].view(dtype).view(tuple(shape))

    def release(self) -> None:
        """Drop a file's bytes from this process's memory; they are read again on access."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def __getstate__(self) -> Any:
        """Return the open file, for a process that is being started."""
        from multiprocessing.reduction import DupFd

        return cast(Any, DupFd)(self._file.fileno())

    def __setstate__(self, state: Any) -> None:
        self._map, self._folder, self._file = None, None, os.fdopen(state.detach(), "r+b", buffering=0)


def _allocate(file: Any, offset: int, size: int) -> None:
    """Allocate `size` bytes on disk for a file from `offset` on. Raises OSError if there is not enough space."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), offset, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise  # the remaining errors are of file systems without support for it
    piece = bytes(min(size, 2**20))
    file.seek(offset)
    while size > 0:
        size -= file.write(piece[:size])


def aligned(offset: int) -> int:
    """Return the first offset from `offset` on at which a tensor may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
