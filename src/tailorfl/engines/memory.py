"""Keeps freed memory in the process, so that every training step does not ask the kernel for the same pages
again.

Training allocates and frees tensors of the same few megabytes thousands of times. glibc gives blocks of that
size back to the kernel at once, and each new one costs a page fault per 4 KiB: a third of the time of a round
of logistic regression. Raising two thresholds of its allocator stops that; peak memory stays as it is. Blocks above
the highest threshold, such as the replies of a whole cohort, have a `Room` that keeps them.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""glibc ignores more."""


@functools.cache
def keep_freed_memory() -> bool:
    """Tells glibc's allocator to keep freed blocks.

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
        """Returns a tensor whose numbers are whatever lay there."""
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
