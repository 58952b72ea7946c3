"""The process that runs an experiment: signals to end it, refusals of the system, and a small memory footprint.

By default Python dies at once from the signals that ask it to end (SIGTERM, or SIGHUP when its terminal is closed), and
the status stays "running". Here they raise an exception in the main thread, as Ctrl-C does, so that everything is
cleaned up on the way out, and the exit code is 128 plus the signal's number, as in shells.

Any request for memory, open files, space or processes can be the one that fails: in torch, numpy, an import, a pipe. So
`as_library_error` wraps whole experiments and commands.

Libraries are imported without optional parts only in processes of this program, such as a client's; a program that uses
this package imports them unchanged.
"""

from __future__ import annotations

import errno
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tailorfl.errors import MemoryLimitError, RunError, TailorflError
from tailorfl.runs.files import REMEDIES

TOLD = (signal.SIGTERM, signal.SIGHUP)
LEAST_ADDRESS_SPACE = 1.5e9
"""Bytes that the smallest run needs on Linux (measured), with a small margin."""
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
_REMEDIES = {
    **REMEDIES,
    errno.EAGAIN: "too many processes or threads are running; lower engine.workers or threads, or raise ulimit -u",
}
_MAPPING = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory", "unable to mmap")
"""Messages of torch, and of packages that cannot be loaded, about exhausted address space."""
_MARKS = {
    "Too many open files": errno.EMFILE,
    "No space left on device": errno.ENOSPC,
    "can't start new thread": errno.EAGAIN,
}
"""Messages about refusals of the system, of packages without an error class for them."""


class Terminated(SystemExit):
    """The process was asked to end by a signal; `exit_code` is its exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.exit_code = 128 + number
        self.name = signal.Signals(number).name


_told: list[int] = []
"""The first signal that came, kept until the process ends: other code may have swallowed its exception."""


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Raise `Terminated` in the block when a signal asks the process to end; other handlers of signals are kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in TOLD if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        if handled:
            _told.clear()


def raise_if_told() -> None:
    """Raise `Terminated` if a signal has asked the process to end."""
    if _told:
        raise Terminated(_told[0])


def why(stop: BaseException) -> str:
    """Return a readable reason why a run stopped."""
    if isinstance(stop, Terminated):
        return f"stopped by {stop.name}"
    return "stopped by Ctrl-C" if isinstance(stop, KeyboardInterrupt) else f"{type(stop).__name__}: {stop}"


def _end(number: int, frame: FrameType | None) -> None:
    if not _told:  # once: a second signal must not disturb the cleaning up after the first one
        _told.append(number)
        raise Terminated(number)


@contextmanager
def as_library_error() -> Iterator[None]:
    """Turn refusals of the system inside the block into errors of the library; all other errors stay.

    Raises:
        MemoryLimitError: memory or address space is exhausted, or too small even to load the packages.
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
    """Raise MemoryLimitError if there is too little to load the packages, some of which would hang."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        raise MemoryLimitError(
            f"this process may use {limit / 1e9:.2g} GB of address space, but torch and its libraries need "
            f"{LEAST_ADDRESS_SPACE / 1e9:g} GB before computing anything; raise the limit (ulimit -v unlimited)"
        )


def _of(error: Exception) -> TailorflError | None:
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    number = next((code for mark, code in _MARKS.items() if mark in text), number)
    if number == errno.ENOMEM or _no_memory(error, text):
        return MemoryLimitError(
            f"there is not enough memory for this ({_first_line(text) or 'the system refused more'}); use a smaller "
            "model, fewer samples, or fewer clients at once (engine.chunk, engine.workers), or raise the limit of the "
            "process (ulimit -v, a container's memory)"
        )
    if number in _TOO_MANY_FILES:
        return RunError(
            f"this process cannot open more files (at most {open_files_limit()} at once); raise the limit (ulimit -n "
            "4096), or lower engine.workers"
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
        return False  # a command without torch, or click's Exit, which is a RuntimeError too
    from tailorfl.engines.memory import out_of_memory

    return out_of_memory(error)


def open_files_limit() -> int:
    """Return how many files this process may have open at once."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else ""


def import_tensordict() -> None:
    """Import tensordict without torch's compiler, for which it only marks three functions.

    This saves 85 MB and 0.7 s of CPU time.
    """
    if "tensordict" in sys.modules:
        return
    import torch.compiler

    marks = torch.compiler.allow_in_graph, torch.compiler.assume_constant_result
    torch.compiler.allow_in_graph = torch.compiler.assume_constant_result = lambda fn: fn
    try:
        import tensordict  # noqa: F401
    finally:
        torch.compiler.allow_in_graph, torch.compiler.assume_constant_result = marks


def import_pandas() -> None:
    """Import pandas without pyarrow, which it imports only to check that it is installed.

    Strings are then Python objects in columns of the same type `str`; parquet files can still be read and written. This
    saves 35 MB.
    """
    if "pandas" in sys.modules or "pyarrow" in sys.modules:
        return
    sys.modules["pyarrow"] = None  # type: ignore[assignment]  # importing it fails, as if it were not installed
    try:
        import pandas  # noqa: F401
    finally:
        del sys.modules["pyarrow"]
