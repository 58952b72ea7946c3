"""A process that is told to end (SIGTERM, or SIGHUP where its terminal is closed) ends like one stopped by Ctrl-C.

By default Python dies of these signals at once, and what it was doing still says "running". Here they raise an
exception in the main thread, so that everything is put in order on the way out, and the exit code is 128 plus the
signal's number, as shells have it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TOLD = (signal.SIGTERM, signal.SIGHUP)


class Terminated(SystemExit):
    """The process was told to end; `exit_code` is what it ends with."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.exit_code = 128 + number
        self.name = signal.Signals(number).name


_told: list[int] = []
"""The first signal that came, until the process ends by it: code that swallows exceptions may have swallowed it."""


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Raise `Terminated` in the block when the process is told to end; signals that others handle stay theirs."""
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
    """Raise `Terminated` where the process was told to end."""
    if _told:
        raise Terminated(_told[0])


def why(stop: BaseException) -> str:
    """Return what stopped a run, for people."""
    if isinstance(stop, Terminated):
        return f"stopped by {stop.name}"
    return "stopped by Ctrl-C" if isinstance(stop, KeyboardInterrupt) else f"{type(stop).__name__}: {stop}"


def _end(number: int, frame: FrameType | None) -> None:
    if not _told:  # once: a second signal must not disturb what the first one has to put in order
        _told.append(number)
        raise Terminated(number)
