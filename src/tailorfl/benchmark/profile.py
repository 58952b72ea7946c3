"""Where the time of a round goes, and how near to what the machine can do it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from tailorfl.benchmark.clock import one_thread, timed
from tailorfl.benchmark.plain_loop import LoopFit
from tailorfl.benchmark.result import Operator, Profile, Way
from tailorfl.benchmark.ways import Loop, Round
from tailorfl.benchmark.work import Work
from tailorfl.engines.base import Engine

SHOWN = 12
PRODUCT, COPY = 1024, 2**24
"""The large matrix product is of two square matrices of that many rows; the large copy is of that many floats."""
REPEAT = 5
TOUCHED = 3
"""Weights are read in the forward and in the backward pass, and a gradient is written, for every gradient."""
UPDATED = 3
"""Weights and gradient are read and weights written, for every step."""


def profiled(round_: Round, work: Sequence[Work], engine: Engine, way: Way) -> Profile:
    """Returns the profile of a round with the engine of a way, and the machine's limits, measured on the spot."""
    round_.reset()
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        round_.run(engine)
    events = sorted(watched.key_averages(), key=lambda e: -e.self_cpu_time_total)
    total = sum(e.self_cpu_time_total for e in events) or 1.0
    operators = tuple(
        Operator(e.key, int(e.count), e.self_cpu_time_total / 1e6, e.self_cpu_time_total / total)
        for e in events[:SHOWN]
    )
    flops, moved = flops_of(work), moved_by(work)
    return Profile(
        way=way.name,
        operators=operators,
        seconds=total / 1e6,
        flops=flops,
        flops_per_second=flops / way.seconds_min,
        machine_flops_per_second=_product(),
        moved_bytes=moved,
        moved_per_second=moved / way.seconds_min,
        machine_bytes_per_second=_copy(),
    )


def flops_of(work: Sequence[Work]) -> float:
    """Returns the floating point operations of all gradients of a round, counted in the plain loop."""
    total = 0.0
    for loop, mine in zip(Loop(work).loops, work, strict=True):
        rows = torch.from_numpy(max(mine.part.cohort.members, key=len))
        for trained, samples in mine.samples().items():
            batch = rows[: max(mine.part.cohort.config.batch_size, 1)]
            counter = FlopCounterMode(display=False)
            with counter:
                loop.gradients(LoopFit([batch], trained))
            total += counter.get_total_flops() / len(batch) * samples
    return total


def moved_by(work: Sequence[Work]) -> float:
    """Returns the bytes of weights and gradients that the plain steps of a round read and write."""
    total = 0
    for mine in work:
        sizes = mine.part.cohort.model.sizes
        for fits in mine.fits:
            for fit in fits:
                scalars = sum(sizes[n] for n in fit.trained)
                total += 4 * scalars * fit.steps * (TOUCHED * fit.gradients + UPDATED * fit.models)
    return float(total)


def _product() -> float:
    a, b = torch.randn(PRODUCT, PRODUCT), torch.randn(PRODUCT, PRODUCT)
    return 2.0 * PRODUCT**3 / _shortest(lambda: a @ b)


def _copy() -> float:
    a, b = torch.randn(COPY), torch.empty(COPY)
    return 2.0 * 4 * COPY / _shortest(lambda: b.copy_(a))


def _shortest(run: Callable[[], object]) -> float:
    run()
    times = [timed(run) for _ in range(REPEAT)]
    return min(t.process if one_thread() else t.wall for t in times)
