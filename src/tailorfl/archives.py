"""Arrays from .npz files, whose size is checked before they are read: a few megabytes may unpack to any size."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_UNPACKED = 200
"""Largest compression factor of a file of more than `SMALL` bytes unpacked, unless all its values are the same."""
SMALL = 2**28


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a .npz file by name.

    Raises:
        ValueError: it is not a .npz file, is damaged, or does not fit into half of this machine's memory; says which.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
        unpacked = sum(member.file_size for member in members)
        packed = sum(member.compress_size for member in members)
        if unpacked > half_of_memory() or (unpacked > SMALL and unpacked > MOST_UNPACKED * packed):
            raise ValueError(
                f"its {packed / 1e6:,.1f} MB unpack to {unpacked / 1e9:,.1f} GB, which is too much to read; save the "
                "arrays in separate files, or uncompressed (numpy.savez)"
            )
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except MemoryError as error:
        raise ValueError(f"one of its arrays is larger than the memory ({error})") from error
    except (
        ArithmeticError, AttributeError, EOFError, LookupError, NotImplementedError, OSError, RuntimeError, SyntaxError,
        TypeError, zipfile.BadZipFile, zlib.error,
    ) as error:  # fmt: skip
        # Damaged files cause all of these, in different parts of the readers of zip files and arrays.
        raise ValueError(f"it is damaged or not an .npz file ({error or type(error).__name__})") from error


def half_of_memory() -> int:
    """Return half of this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
