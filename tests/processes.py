"""Processes that tests start by a fork: they have imported what a new one would import for seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import IO


def fork(program: Callable[[], None]) -> tuple[int, IO[str]]:
    """(process id, all that it prints) of a process that runs `program` and stops at Ctrl-C as a new one does."""
    heard, said = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            # a test run in the background of a shell would pass on that it ignores Ctrl-C
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(said, 1)
            os.dup2(said, 2)
            # Inherited files are let go, but keep their numbers: an inherited object that closes its own later would
            # close another file of that number otherwise.
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in {*map(int, os.listdir("/dev/fd"))} - {0, 1, 2, nothing}:
                with contextlib.suppress(OSError):  # that of the listing itself is closed by now
                    os.fstat(number)
                    os.dup2(nothing, number)
            sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
            program()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(said)
    return process, os.fdopen(heard)
