"""What the system refuses (memory, open files, space, processes) as errors of the library, with what to do.

Whatever asks for it first fails first: torch, numpy, an import, a pipe. So this stands around whole experiments and
commands, as the last place where it can be told.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tailorfl.errors import MemoryLimitError, RunError, TailorflError
from tailorfl.runs.files import REMEDIES

LEAST_ADDRESS_SPACE = 1.5e9
"""Bytes; what a smallest run was measured to need on Linux, with a little to spare."""
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
_REMEDIES = {
    **REMEDIES,
    errno.EAGAIN: "too many processes or threads are running; lower engine.workers or threads, or raise ulimit -u",
}
_MAPPING = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory", "unable to mmap")
"""How a package that cannot be loaded, and torch, say that there is no more address space."""
_MARKS = {
    "Too many open files": errno.EMFILE,
    "No space left on device": errno.ENOSPC,
    "can't start new thread": errno.EAGAIN,
}
"""How packages that have no error of their own for it say what the system refused."""


@contextmanager
def as_library_error() -> Iterator[None]:
    """Turn what the system refuses inside the block into an error of the library; all other errors stay.

    Raises:
        MemoryLimitError: there was no more memory or address space, or too little for the packages to begin with.
        RunError: files, space or processes ran out, or a file cannot be used.
    """
    _check_address_space()
    try:
        yield
    except TailorflError:
        raise
    except (OSError, MemoryError, RuntimeError, ImportError) as error:
        converted = _of(error)
        if converted is None:
            raise
        raise converted from error


def _check_address_space() -> None:
    """Raise MemoryLimitError where packages could not even be loaded: some of them then wait for ever."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        raise MemoryLimitError(
            f"this process may use {limit / 1e9:.2g} GB of address space, and torch with its company needs "
            f"{LEAST_ADDRESS_SPACE / 1e9:g} GB before anything is computed; raise the limit (ulimit -v unlimited)"
        )


def _of(error: Exception) -> TailorflError | None:
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    number = next((code for mark, code in _MARKS.items() if mark in text), number)
    if number == errno.ENOMEM or _no_memory(error, text):
        return MemoryLimitError(
            f"there is not enough memory for this ({_first_line(text) or 'the system refused more'}); take a smaller "
            "model, fewer samples or clients at once (engine.chunk, engine.workers), or raise the limit of the process "
            "(ulimit -v, a container's memory)"
        )
    if number in _TOO_MANY_FILES:
        return RunError(
            f"this process may open no more files ({open_files_limit()} at once); raise the limit (ulimit -n 4096), or "
            "lower engine.workers"
        )
    if number is None or number == errno.EPIPE:
        return None
    file = f" '{error.filename}'" if isinstance(error, OSError) and error.filename else ""
    remedy = _REMEDIES.get(number, "check the name, the disk and the limits of the process")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(text)
    return RunError(f"the system refuses{file}: {reason}; {remedy}")


def _no_memory(error: Exception, text: str) -> bool:
    if isinstance(error, MemoryError) or any(mark in text for mark in _MAPPING):
        return True
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:
        return False  # a command that needs no torch, or click's Exit, which is a RuntimeError too
    from tailorfl.engines.memory import out_of_memory

    return out_of_memory(error)


def open_files_limit() -> int:
    """Return how many files this process may have open at once."""
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else ""
