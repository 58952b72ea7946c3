"""Data made once and cached under a key: in a folder of its own, which gets its name when all is there.

What was interrupted leaves nothing that anybody takes for whole, and is made again. Samples lie in files that are
mapped: pages are read when they are used, and given back when memory is short.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

VARIABLE = "TAILORFL_CACHE"
"""Names the folder of data that are cached; by default tailorfl in the user's cache folder."""
_PART = ".part"
_FINITE = WeakIdKeyDictionary()
"""Tensors of which somebody has seen that all numbers are finite."""

Opened = TypeVar("Opened")


def cache_folder() -> Path:
    """Return the folder in which data are cached by default."""
    setting = os.environ.get(VARIABLE)
    if setting:
        return Path(setting).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tailorfl"


def key_of(*facts: object) -> str:
    """Return the key of what is made of such facts, by how they print themselves."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def cached(
    folder: Path, key: str, make: Callable[[Path], None], opened: Callable[[Path], Opened | None]
) -> Opened:
    """Return what lies under a key in a folder; if nothing does, or not all of it, it is made.

    Processes that make the same at the same time do not disturb each other.

    Args:
        folder: of all that is cached.
        key: names what is made: the same for the same.
        make: puts it into the folder that it is given.
        opened: reads it from the folder that it is given; None where something is missing.
    """
    entry = folder / key
    content = opened(entry)
    if content is not None:
        return content
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    working = Path(tempfile.mkdtemp(prefix=f"{key}.{os.getpid()}.", suffix=_PART, dir=folder))
    try:
        make(working)
        shutil.rmtree(entry, ignore_errors=True)  # damaged
        try:
            working.rename(entry)
        except OSError:  # another process was quicker
            if opened(entry) is None:
                raise
    finally:
        shutil.rmtree(working, ignore_errors=True)
    done = opened(entry)
    assert done is not None
    return done


def mapped(file: Path, shape: Sequence[int], kind: torch.dtype) -> Tensor:
    """Return the numbers in a file as a tensor of a shape; what is written to it stays in this process."""
    return torch.from_file(str(file), shared=False, size=math.prod(shape), dtype=kind).view(*shape)


def mark_finite(values: Tensor) -> Tensor:
    """Return `values`, of which it is known from now on that all are finite: nobody has to read a file for it."""
    _FINITE[values] = True
    return values


def is_known_finite(values: Tensor) -> bool:
    """Return whether `mark_finite` marked this very tensor."""
    return values in _FINITE


def _sweep(folder: Path) -> None:
    """Delete what processes left that were killed at work."""
    for partial in folder.glob(f"*{_PART}"):
        number = partial.name.removesuffix(_PART).split(".")[1]
        if number.isdigit() and not Path(f"/proc/{number}").exists() and Path("/proc").is_dir():
            shutil.rmtree(partial, ignore_errors=True)
