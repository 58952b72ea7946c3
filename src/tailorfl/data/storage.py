"""Where data lie: files that are given, in the folder TAILORFL_DATA, and what was made once, in TAILORFL_CACHE.

Data are made in a folder of their own, which gets its name when all is there. What was interrupted leaves nothing that
anybody takes for whole, and is made again. Samples lie in files that are mapped: pages are read when they are used, and
given back when memory is short.
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

from tailorfl.errors import DataError

DATA_VARIABLE = "TAILORFL_DATA"
"""Names the folder of data files; by default `../shared/data` next to the project."""
CACHE_VARIABLE = "TAILORFL_CACHE"
"""Names the folder of data that are cached; by default tailorfl in the user's cache folder."""
_PART = ".part"
_FINITE = WeakIdKeyDictionary()
"""Tensors of which somebody has seen that all numbers are finite."""
_REPOSITORY = Path(__file__).resolve().parents[3]

Content = TypeVar("Content")
Opened = TypeVar("Opened")


def data_folders() -> tuple[Path, ...]:
    """Return the folders searched for data files, in order.

    The folder that TAILORFL_DATA names is searched alone, so that a wrong setting is an error and not another
    file.
    """
    setting = os.environ.get(DATA_VARIABLE)
    if setting:
        return (Path(setting).expanduser(),)
    relative = Path("..") / "shared" / "data"
    return tuple(dict.fromkeys([(Path.cwd() / relative).resolve(), (_REPOSITORY / relative).resolve()]))


def has_data_file(name: str) -> bool:
    """Return whether one of the searched folders holds data file `name`."""
    return any((folder / name).is_file() for folder in data_folders())


def data_file(name: str) -> Path:
    """Return the path of data file `name`, such as `"mnist.npz"`.

    Raises:
        DataError: if no searched folder holds it; the message says which file, where, and how to set
            TAILORFL_DATA.
    """
    folders = data_folders()
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    state = "names this folder" if os.environ.get(DATA_VARIABLE) else "is not set"
    raise DataError(
        f"data file '{name}' was not found in {' or '.join(map(str, folders))} ({DATA_VARIABLE} {state}). "
        f"Point {DATA_VARIABLE} at the folder that holds it: export {DATA_VARIABLE}=/path/to/data"
    )


def read_data_file(name: str, read: Callable[[Path], Content]) -> Content:
    """Return what `read` makes of data file `name`.

    Raises:
        DataError: it is nowhere, see `data_file`, or cannot be read.
    """
    path = data_file(name)
    try:
        return read(path)
    except (OSError, ValueError) as error:
        raise DataError(f"data file {path} cannot be read: {error}; fetch it again") from error


def cache_folder() -> Path:
    """Return the folder in which data are cached by default."""
    setting = os.environ.get(CACHE_VARIABLE)
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
