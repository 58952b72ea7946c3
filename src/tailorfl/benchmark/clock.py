"""Clocks and memory of a round, and measuring several things in alternation."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

STATUS, PROCESSORS = Path("/proc/self/status"), Path("/proc/cpuinfo")


class Seconds(NamedTuple):
    """What something took."""

    process: float
    """Of this process on all its threads, which other processes do not disturb."""
    wall: float


def timed(run: Callable[[], object]) -> Seconds:
    """Returns what a call took."""
    process, wall = time.process_time(), time.perf_counter()
    run()
    return Seconds(time.process_time() - process, time.perf_counter() - wall)


def alternate(
    runs: Mapping[str, Callable[[], object]],
    until: float,
    least: int,
    most: int,
    before: Callable[[], object],
    watch: Callable[[str], None],
) -> dict[str, list[Seconds]]:
    """Returns the times of all `runs`, one after the other and again, so that a slow moment hits all of them.

    Ends after `most` passes, or when another one would end later than `until` (of `time.perf_counter`) and `least` are
    done. `before` is called before each run, outside the clock.
    """
    found: dict[str, list[Seconds]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for number in range(1, most + 1):
        watch(f"pass {number} over {len(runs)} ways")
        for name, run in runs.items():
            before()
            found[name].append(timed(run))
        now = time.perf_counter()
        if number >= least and now + (now - begin) / number > until:
            break
    return found


def extra_memory(run: Callable[[], object]) -> float | None:
    """Returns by how many bytes the resident memory of this process grew at its peak during a call.

    What the allocator keeps free is handed back to the system first, so it is not hidden in there. None where the
    system does not tell (other than Linux).
    """
    try:
        _hand_back()
        Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
        before = _status("VmRSS")
    except (OSError, AttributeError):
        run()
        return None
    run()
    return max(_status("VmHWM") - before, 0.0)


def _status(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())
    if found is None:
        raise OSError(f"{STATUS} has no {name}")
    return 1024.0 * int(found[1])


def _hand_back() -> None:
    if sys.platform != "linux":
        raise OSError("only Linux tells the peak of a process")
    ctypes.CDLL(None).malloc_trim(0)


def processor() -> str:
    """Returns the name of the processor where the system tells it, else of its kind."""
    told = PROCESSORS.read_text() if PROCESSORS.exists() else ""
    found = re.search(r"^model name\s*:\s*(\S.*)$", told, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def one_thread() -> bool:
    """Whether torch computes on one thread, so that process time is the time it takes."""
    return torch.get_num_threads() == 1
