"""The folder of data files: the one named by TAILORFL_DATA, else `../shared/data` next to the project."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tailorfl.errors import DataError

VARIABLE = "TAILORFL_DATA"
_REPOSITORY = Path(__file__).resolve().parents[3]

Content = TypeVar("Content")


def data_folders() -> tuple[Path, ...]:
    """Return the folders searched for data files, in order.

    The folder that TAILORFL_DATA names is searched alone, so that a wrong setting is an error and not another
    file.
    """
    setting = os.environ.get(VARIABLE)
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
    state = "names this folder" if os.environ.get(VARIABLE) else "is not set"
    raise DataError(
        f"data file '{name}' was not found in {' or '.join(map(str, folders))} ({VARIABLE} {state}). "
        f"Point {VARIABLE} at the folder that holds it: export {VARIABLE}=/path/to/data"
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
