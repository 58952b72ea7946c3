"""Clocks of a round, and timing of several functions in alternation."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

PROCESSORS = Path("/proc/cpuinfo")


class Seconds(NamedTuple):
    """The time that a call took."""

    process: float
    """CPU time of this process on all its threads, which other processes do not disturb."""
    wall: float


def timed(run: Callable[[], object]) -> Seconds:
    """Return the time that a call took."""
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
    """Return the times of all `runs`, measured in turn over several passes, so that a slow moment hits all of them.

    It ends after `most` passes, or when `least` are done and another one would end after `until` (of
    `time.perf_counter`). `before` is called before each run and is not timed.
    """
    times: dict[str, list[Seconds]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for number in range(1, most + 1):
        watch(f"pass {number} over {len(runs)} ways")
        for name, run in runs.items():
            before()
            times[name].append(timed(run))
        current = time.perf_counter()
        if number >= least and current + (current - begin) / number > until:
            break
    return times


def processor() -> str:
    """Return the processor's name if the system reports it, else its kind."""
    text = PROCESSORS.read_text() if PROCESSORS.exists() else ""
    match = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def one_thread() -> bool:
    """Whether torch computes on one thread, so that process time is the time it takes."""
    return torch.get_num_threads() == 1
