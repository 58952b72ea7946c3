"""Keeps freed memory in the process, so that every training step does not ask the kernel for the same pages
again.

Training allocates and frees tensors of the same few megabytes thousands of times. glibc gives blocks of that
size back to the kernel at once, and each new one costs a page fault per 4 KiB: a third of the time of a round
of logistic regression. Raising two thresholds of its allocator stops that; peak memory stays as it is.
"""

from __future__ import annotations

import ctypes
import functools
import sys

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
