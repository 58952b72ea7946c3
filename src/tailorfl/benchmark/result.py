"""Results of `tailorfl bench`: measured times, and the engine to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tailorfl.engines.devices import WORTH as WORTH_ROUNDING
from tailorfl.settings.experiment import DEFAULT

SAME, SAME_OF_FEW = 0.03, 0.1
"""Ways whose times differ by a smaller share are as good as each other; the second where repetitions are few."""
ENOUGH = 5
"""Repetitions that are not few."""
WORTH = 0.9
"""Several processes are advised where they need no more than this share of the wall time of one."""
FEWEST = 3
"""With fewer repetitions, times on the wall are not trusted."""
BUSY = 1.3
"""Wall time over process time from which the machine is said to be busy."""
CLOSEST = 3
"""So many of the slower ways are named, the closest ones."""
LOOP = "plain loop"
FULL = DEFAULT.engine.precision


@dataclass(frozen=True)
class Way:
    """One way to do a round, measured."""

    name: str
    settings: str
    """What chooses it, as KEY=VALUE; "" for the plain loop, which is no engine."""
    kind: str
    """The engine that trains, an automatic one's choice; "" for the plain loop."""
    chunk: int
    """Clients that train together, at most."""
    workers: int
    """Processes."""
    precision: str
    """What networks multiply in."""
    seconds: tuple[float, ...]
    """Of every repetition: of the process on one thread; of the wall where there are several threads or workers."""
    wall_seconds: tuple[float, ...]
    seconds_min: float
    seconds_median: float
    clients_per_second: float
    """At the median."""
    times_faster: float
    """The plain loop's time over this one's, the median over repetitions."""
    spread: tuple[float, float]
    """First and third quartile of it."""
    note: str = ""


@dataclass(frozen=True)
class EngineRecommendation:
    """What to put into the experiment."""

    settings: str
    """As KEY=VALUE."""
    way: str
    why: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Bench:
    """A round of an experiment's first method, done in several ways."""

    experiment: str
    method: str
    title: str
    model: str
    scalars: int
    """Of the model, that may change."""
    clients: int
    """That train in a round."""
    measured: int
    """How many of them were measured; fewer than all where a round is long."""
    gradients: int
    """Gradients of single samples that the method takes of the measured clients; the plain loop takes as many."""
    threads: int
    clock: str
    """process or wall: what `Way.seconds` of a single process are."""
    ways: tuple[Way, ...]
    recommendation: EngineRecommendation
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    """The experiment."""
    features: str = ""
    """What computing frozen layers once takes, in words, where that is done."""

    def way(self, name: str) -> Way:
        """Return the way of that name."""
        return next(timing for timing in self.ways if timing.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return asdict(self)


def recommend(timings: Sequence[Way]) -> EngineRecommendation:
    """Return what to set, given the measured ways, the plain loop among them, in the order of how little they need."""
    loop = next(timing for timing in timings if timing.name == LOOP)
    candidates = [timing for timing in timings if timing.settings and timing.workers == 1 and timing.seconds]
    # Another precision gives other numbers, so it is named and not taken.
    single = [timing for timing in candidates if timing.precision == FULL]
    best = min(single, key=lambda timing: timing.seconds_median)
    equal = [timing for timing in single if timing is best or same(timing, best)]
    chosen = equal[0]
    reasons = [f"{chosen.name}: {chosen.times_faster:.2f} x the speed of the plain loop"]
    slower = sorted(
        (timing for timing in single if timing not in equal), key=lambda timing: timing.seconds_median
    )
    reasons += [_against(chosen, timing) for timing in slower[:CLOSEST]]
    warnings = []
    if len(equal) > 1:
        rivals = ", ".join(timing.name for timing in equal if timing is not chosen)
        warnings.append(
            f"as fast within the noise of this measurement: {rivals}; the simplest setting was taken"
        )
    if chosen.times_faster < 1 - SAME:
        warnings.append(
            f"the plain loop is {1 / chosen.times_faster:.2f} x faster than any engine here; it has no states and no "
            "checks, and does nothing of what a method adds to FedAvg"
        )
    warnings += [_rounded(chosen, timing) for timing in candidates if timing.precision != FULL]
    workers = _workers(timings, chosen)
    if workers is not None:
        reasons.append(
            f"{workers.name}: {wall(chosen) / wall(workers):.2f} x the speed of {chosen.name} by the clock on the wall"
        )
        chosen = workers
    repeats = min(len(timing.seconds) for timing in timings if timing.seconds)
    if repeats < ENOUGH:
        warnings.append(f"only {repeats} repetitions fitted into the time; --seconds gives more")
    busy = sum(loop.wall_seconds) / max(sum(loop.seconds), 1e-12)
    if busy > BUSY:
        warnings.append(
            f"the clock on the wall shows {busy:.1f} x the time of the process: other work kept the machine busy"
        )
    return EngineRecommendation(chosen.settings, chosen.name, tuple(reasons), tuple(warnings))


def same(a: Way, b: Way) -> bool:
    """Return whether two engines are the same, or their paired times do not differ.

    Times do not differ if their median ratio is within 3 % (10 % of few repetitions), or if half of the ratios lie on
    both sides of 1.
    """
    if (a.kind, a.chunk, a.workers) == (b.kind, b.chunk, b.workers):
        return True
    low, middle, high = paired(a.seconds, b.seconds)
    least = SAME if len(a.seconds) >= ENOUGH else SAME_OF_FEW
    return abs(middle - 1.0) < least or low <= 1.0 <= high


def wall(timing: Way) -> float:
    """Return the median wall seconds of a way."""
    return float(np.median(timing.wall_seconds))


def paired(loop: Sequence[float], candidate: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles of one time over the other, repetition by repetition."""
    low, middle, high = np.quantile(np.array(loop) / np.array(candidate), (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def _against(chosen: Way, rival: Way) -> str:
    return f"{rival.seconds_median / chosen.seconds_median:.2f} x the speed of {rival.name}"


def _rounded(chosen: Way, rival: Way) -> str:
    """Return what a lower precision would bring; it is worth it where three of four repetitions are so much faster."""
    times, settings = chosen.seconds_median / rival.seconds_median, f"engine.precision={rival.precision}"
    if paired(chosen.seconds, rival.seconds)[0] < WORTH_ROUNDING:
        return f"{settings} is not worth it here: {times:.2f} x the speed of {chosen.name}"
    return (
        f"{settings} is {times:.2f} x the speed of {chosen.name}, and rounds what goes into products to 8 bits: where "
        f"that does no harm, {rival.settings}"
    )


def _workers(timings: Sequence[Way], single: Way) -> Way | None:
    """Return the fastest way with several processes, where three of four repetitions show that they are worth it."""
    several = [timing for timing in timings if timing.workers > 1 and len(timing.seconds) >= FEWEST]
    fastest = min(several, key=wall, default=None)
    if fastest is None:
        return None
    _, _, high = paired(fastest.wall_seconds, single.wall_seconds)
    return fastest if high <= WORTH else None
