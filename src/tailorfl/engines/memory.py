"""Memory: how much there is, what to do when it was not enough, and keeping what was freed.

Training allocates and frees tensors of the same few megabytes thousands of times. glibc gives blocks of that
size back to the kernel at once, and each new one costs a page fault per 4 KiB: a third of the time of a round
of logistic regression. Raising two thresholds of its allocator stops that; peak memory stays as it is. Blocks above
the highest threshold, such as the replies of a whole cohort, have a `Room` that keeps them.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tailorfl.errors import MemoryLimitError
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
