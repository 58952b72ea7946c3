"""Results of `tailorfl bench`: measured times, and the engine to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tailorfl.engines.devices import WORTH as WORTH_ROUNDING
from tailorfl.settings.experiment import DEFAULT

SAME, SAME_OF_FEW = 0.03, 0.1
"""Ways whose times differ by a smaller share count as equally fast; the second if repetitions are few."""
ENOUGH = 5
"""With this many repetitions or more, they are not few."""
WORTH = 0.9
"""Several processes are recommended if they need no more than this share of the wall time of one."""
FEWEST = 3
"""With fewer repetitions, wall times are not trusted."""
BUSY = 1.3
"""Wall time divided by process time above which the machine counts as busy."""
CLOSEST = 3
"""Number of slower ways that are named, the closest ones."""
LOOP = "plain loop"
FULL = DEFAULT.engine.precision


@dataclass(frozen=True)
class Way:
    """One way to do a round, measured."""

    name: str
    settings: str
    """Settings that choose it, as KEY=VALUE; "" for the plain loop, which is not an engine."""
    kind: str
    """The engine that trains, or the one that an automatic engine chose; "" for the plain loop."""
    chunk: int
    """Largest number of clients that train together."""
    workers: int
    """Number of processes."""
    precision: str
    """Precision of the networks' products."""
    seconds: tuple[float, ...]
    """Time of every repetition: process time on one thread, wall time with several threads or workers."""
    wall_seconds: tuple[float, ...]
    seconds_min: float
    seconds_median: float
    clients_per_second: float
    """At the median time."""
    times_faster: float
    """The plain loop's time divided by this one's, the median over repetitions."""
    spread: tuple[float, float]
    """First and third quartiles of the same ratio."""
    note: str = ""


@dataclass(frozen=True)
class EngineRecommendation:
    """The settings to put into the experiment."""

    settings: str
    """As KEY=VALUE."""
    way: str
    why: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Bench:
    """A round of an experiment's first method, measured in several ways."""

    experiment: str
    method: str
    title: str
    model: str
    scalars: int
    """Scalars of the model that may change."""
    clients: int
    """Clients that train in a round."""
    measured: int
    """Clients that were measured; fewer if a round is long."""
    gradients: int
    """Per-sample gradients that the method computes for the measured clients; the plain loop computes as many."""
    threads: int
    clock: str
    """process or wall: the clock of `Way.seconds` of a single process."""
    ways: tuple[Way, ...]
    recommendation: EngineRecommendation
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    """Settings of the experiment."""
    features: str = ""
    """Cost of computing frozen layers once, in words, if that is done."""

    def way(self, name: str) -> Way:
        """Return the way of that name."""
        return next(timing for timing in self.ways if timing.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return asdict(self)


def recommend(timings: Sequence[Way]) -> EngineRecommendation:
    """Return the settings to use, given the measured ways and the plain loop among them, the simplest first."""
    loop = next(timing for timing in timings if timing.name == LOOP)
    candidates = [timing for timing in timings if timing.settings and timing.workers == 1 and timing.seconds]
    # Another precision changes the numbers, so it is mentioned but not chosen.
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
            f"equally fast within the noise of this measurement: {rivals}; the simplest setting is recommended"
        )
    if chosen.times_faster < 1 - SAME:
        warnings.append(
            f"the plain loop is {1 / chosen.times_faster:.2f} x as fast as the fastest engine; it has no states and no "
            "checks, and omits what a method adds to FedAvg"
        )
    warnings += [_rounded(chosen, timing) for timing in candidates if timing.precision != FULL]
    workers = _workers(timings, chosen)
    if workers is not None:
        reasons.append(
            f"{workers.name}: {wall(chosen) / wall(workers):.2f} x the speed of {chosen.name} in wall-clock time"
        )
        chosen = workers
    repeats = min(len(timing.seconds) for timing in timings if timing.seconds)
    if repeats < ENOUGH:
        warnings.append(f"only {repeats} repetitions fitted into the time; increase --seconds")
    busy = sum(loop.wall_seconds) / max(sum(loop.seconds), 1e-12)
    if busy > BUSY:
        warnings.append(f"wall-clock time is {busy:.1f} x the process time: other work kept the machine busy")
    return EngineRecommendation(chosen.settings, chosen.name, tuple(reasons), tuple(warnings))


def same(a: Way, b: Way) -> bool:
    """Return whether two engines are the same, or their paired times do not differ.

    Times do not differ if the median of their ratios is within 3 % of 1 (10 % if repetitions are few), or if 1 lies
    between the quartiles of the ratios.
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
    """Return the quartiles of the loop's time divided by the candidate's, repetition by repetition."""
    low, middle, high = np.quantile(np.array(loop) / np.array(candidate), (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def _against(chosen: Way, rival: Way) -> str:
    return f"{rival.seconds_median / chosen.seconds_median:.2f} x the speed of {rival.name}"


def _rounded(chosen: Way, rival: Way) -> str:
    """Return the gain of a lower precision in words; it is worth it if three of four repetitions are fast enough."""
    times, settings = chosen.seconds_median / rival.seconds_median, f"engine.precision={rival.precision}"
    if paired(chosen.seconds, rival.seconds)[0] < WORTH_ROUNDING:
        return f"{settings} is not worth it here: {times:.2f} x the speed of {chosen.name}"
    return (
        f"{settings} is {times:.2f} x the speed of {chosen.name}, but rounds the factors of products to 8 bits; if "
        f"that does no harm, set {rival.settings}"
    )


def _workers(timings: Sequence[Way], single: Way) -> Way | None:
    """Return the fastest way with several processes, if three of four repetitions show that they are worth it."""
    several = [timing for timing in timings if timing.workers > 1 and len(timing.seconds) >= FEWEST]
    fastest = min(several, key=wall, default=None)
    if fastest is None:
        return None
    _, _, high = paired(fastest.wall_seconds, single.wall_seconds)
    return fastest if high <= WORTH else None
