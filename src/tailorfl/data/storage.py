"""Folders of data: data files in TAILORFL_DATA, and data converted or generated once in TAILORFL_CACHE.

Cached data are made in a temporary folder, which is renamed when they are complete. An interruption leaves nothing that
could be taken for complete data, and they are made again. Samples are in mapped files: pages are read when they are
used, and released when memory is short.
"""

from __future__ import annotations

import glob
import hashlib
import math
import os
import platform
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
"""Names the folder of cached data; by default tailorfl in the user's cache folder."""
OF_DATA = "data:"
"""Prefix of a file in the folder of data files, where a setting names a file."""
_PART = ".part"
_FINITE = WeakIdKeyDictionary()
"""Tensors that are known to hold only finite numbers."""
_REPOSITORY = Path(__file__).resolve().parents[3]

Content = TypeVar("Content")
Opened = TypeVar("Opened")


def data_folders() -> tuple[Path, ...]:
    """Return the folders searched for data files, in order.

    If TAILORFL_DATA names a folder, only that one is searched, so that a wrong setting is an error and does not
    find another file.
    """
    setting = os.environ.get(DATA_VARIABLE)
    if setting:
        return (Path(setting).expanduser(),)
    relative = Path("..") / "shared" / "data"
    return tuple(dict.fromkeys([(Path.cwd() / relative).resolve(), (_REPOSITORY / relative).resolve()]))


def has_data_file(name: str) -> bool:
    """Return whether one of the searched folders holds data file `name`."""
    return any((folder / name).is_file() for folder in data_folders())


def is_file(name: str) -> bool:
    """Return whether the file exists that a setting names, see `named_file`."""
    return has_data_file(name.removeprefix(OF_DATA)) if name.startswith(OF_DATA) else Path(name).is_file()


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


def named_file(name: str) -> Path:
    """Return the path that a setting names: `data:NAME` is a file of the data folder, anything else a path.

    Raises:
        DataError: no searched folder holds NAME, see `data_file`.
    """
    return data_file(name.removeprefix(OF_DATA)) if name.startswith(OF_DATA) else Path(name)


def read_data_file(name: str, read: Callable[[Path], Content]) -> Content:
    """Return the content of data file `name` as `read` returns it.

    Raises:
        DataError: it is missing, see `data_file`, or cannot be read.
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
    """Return the cache key of data made from these facts, a hash of their `repr`."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def cached(
    folder: Path, key: str, make: Callable[[Path], None], opened: Callable[[Path], Opened | None]
) -> Opened:
    """Return the data cached under a key; if they are missing or incomplete, make them.

    Processes that make the same data at the same time do not disturb each other.

    Args:
        folder: the cache.
        key: identifies the data.
        make: writes the data into the folder it gets.
        opened: reads the data from the folder it gets; returns None if something is missing.
    """
    entry = folder / key
    content = opened(entry)
    if content is not None:
        return content
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    prefix = f"{key}.{platform.node()}.{os.getpid()}."
    working = Path(tempfile.mkdtemp(prefix=prefix, suffix=_PART, dir=folder))
    try:
        make(working)
        shutil.rmtree(entry, ignore_errors=True)  # damaged
        try:
            working.rename(entry)
        except OSError:  # another process was faster
            if opened(entry) is None:
                raise
    finally:
        shutil.rmtree(working, ignore_errors=True)
    done = opened(entry)
    assert done is not None
    return done


def mapped(file: Path, shape: Sequence[int], kind: torch.dtype) -> Tensor:
    """Return the numbers in a file as a tensor of a shape; writes to it stay in this process."""
    return torch.from_file(str(file), shared=False, size=math.prod(shape), dtype=kind).view(*shape)


def mark_finite(values: Tensor) -> Tensor:
    """Mark `values` as finite, so that no file has to be read to check it, and return them."""
    _FINITE[values] = True
    return values


def is_known_finite(values: Tensor) -> bool:
    """Return whether `mark_finite` marked this very tensor."""
    return values in _FINITE


def _sweep(folder: Path) -> None:
    """Delete incomplete data of processes of this machine that no longer run; several machines may share the folder."""
    for partial in folder.glob(f"*.{glob.escape(platform.node())}.*.*{_PART}"):
        number = partial.name.removesuffix(_PART).split(".")[-2]
        if number.isdigit() and not Path(f"/proc/{number}").exists() and Path("/proc").is_dir():
            shutil.rmtree(partial, ignore_errors=True)
