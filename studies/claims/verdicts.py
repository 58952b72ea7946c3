"""Whether a published difference between two methods holds.

Verdicts from paired seeds and the test set's own noise.

Seeds fix partition, initial weights, sampling and batches for all methods, so differences are paired. They do not
average a common test set away: on N samples, of which a share q is right with one method and wrong with the other, a
difference has the further standard error √(q/N). With half width² = (t s/√n)² + (z √(q/N))², estimate d and
interval [L, U], and published gap g:

    holds            L > 0 and d ≥ g/2
    holds in sign    L > 0 and d < g/2
    reversed         U < 0 and U < max(g/2, half a point)
    does not hold    L ≤ 0 and U < max(g/2, half a point)
    undecided        the rest, and whatever has fewer than three seeds

Printed numbers are "reproduced" or "not", see `judge_cells`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Verdict = Literal[
    "holds", "holds in sign", "does not hold", "reversed", "undecided", "reproduced", "not reproduced"
]
FEWEST = 3
"""Seeds; two are never a result."""
MOST = 1000
"""Seeds beyond which nobody would go."""
POINT = 0.01
"""One point of a share."""
LEVEL = 0.95
SMALLEST = 1e-15
"""p-values below are not told apart."""


@dataclass(frozen=True)
class Judged:
    """A difference over seeds, and what it says of a published one.

    Attributes:
        verdict: one of the module's rules.
        estimate, low, high: mean difference over seeds and its interval; NaN without (enough) seeds.
        p_value: of no difference, with the test set's noise in it; it is below 1 − level where 0 is outside the
            interval.
        p_against: of a difference that is just large enough to hold, max(g/2, half a point), where the estimate is
            smaller: what "does not hold" rests on. 1 where it is not smaller, NaN where nothing of the kind is asked.
        seeds: how many pairs there are.
        needed: with how many seeds an undecided one would be decided if estimate and spread stayed; None where
            it is decided, or no number of seeds would do.
    """

    verdict: Verdict
    estimate: float
    low: float
    high: float
    p_value: float
    seeds: int
    needed: int | None = None
    p_against: float = math.nan


def sampling_error(discordance: float, samples: float) -> float:
    """Return the standard error √(q/N) of a difference of two accuracies on `samples` common samples.

    Raises ValueError unless 0 ≤ discordance ≤ 1 and there are samples.
    """
    if not 0 <= discordance <= 1 or not samples > 0:
        raise ValueError(f"a share in [0, 1] and some samples expected, got {discordance} and {samples}")
    return math.sqrt(discordance / samples)


def half_width(spread: float, seeds: int, error: float = 0.0, level: float = LEVEL) -> float:
    """Half width of the two-sided interval of a mean over `seeds`, of standard deviation `spread` over them.

    `error` is the standard error that seeds do not average away. Infinite for one seed.
    """
    from scipy.special import ndtri, stdtrit

    if seeds < 2:
        return math.inf
    upper = 0.5 + level / 2
    over_seeds = float(stdtrit(seeds - 1, upper)) * spread / math.sqrt(seeds)
    return math.hypot(over_seeds, float(ndtri(upper)) * error)


def p_value(mean: float, spread: float, seeds: int, error: float = 0.0) -> float:
    """Return the two-sided p-value that belongs to `half_width`: 1 − the level at which the interval just touches 0."""
    if seeds < 2 or math.isnan(mean):
        return math.nan
    if mean == 0 or (spread == 0 and error == 0):
        return 1.0 if mean == 0 else 0.0
    low, high = SMALLEST, 1.0  # the interval of level 1 - low contains 0, that of 1 - high does not
    if half_width(spread, seeds, error, 1 - low) < abs(mean):
        return low
    for _ in range(100):
        middle = math.sqrt(low * high)
        if half_width(spread, seeds, error, 1 - middle) >= abs(mean):
            low = middle
        else:
            high = middle
    return high


def judge(differences: Sequence[float], gap: float, error: float = 0.0, point: float = POINT) -> Judged:
    """Return whether a published difference of `gap` ≥ 0 holds; with 0 only its sign is claimed.

    `differences` are first minus second, one a seed; `error` is `sampling_error`, `point` a point of the metric.
    Raises ValueError for a negative gap.
    """
    if gap < 0:
        raise ValueError(f"the gap of a claim is positive, got {gap}; exchange the two methods")
    mean, spread, seeds = _moments(differences)
    wide = half_width(spread, seeds, error)
    verdict = _verdict(mean, wide, seeds, gap, point)
    p = p_value(mean, spread, seeds, error)
    short = max(gap, point) / 2 - mean
    against = 1.0 if short <= 0 else p_value(short, spread, seeds, error)
    needed = None
    if verdict == "undecided":
        needed = _needed(lambda n: _verdict(mean, half_width(spread, n, error), n, gap, point), seeds)
    return Judged(verdict, mean, mean - wide, mean + wide, p, seeds, needed, against)


def judge_at_most(differences: Sequence[float], margin: float, error: float = 0.0) -> Judged:
    """Return whether first − second is at most `margin`: holds if U ≤ margin, does not if L > margin.

    So "loses no more than a point" is second − first at most 0.01. The p-value is that of a difference equal to
    `margin`.
    """
    mean, spread, seeds = _moments(differences)
    wide = half_width(spread, seeds, error)

    def verdict(n: int) -> Verdict:
        width = half_width(spread, n, error)
        if n < FEWEST or math.isnan(mean):
            return "undecided"
        if mean + width <= margin:
            return "holds"
        return "does not hold" if mean - width > margin else "undecided"

    found = verdict(seeds)
    p = p_value(mean - margin, spread, seeds, error)
    needed = _needed(verdict, seeds) if found == "undecided" else None
    return Judged(found, mean, mean - wide, mean + wide, p, seeds, needed)


def judge_cells(
    values: Mapping[str, Sequence[float]],
    published: Mapping[str, float],
    repeats: int,
    widest: float,
    point: float = POINT,
) -> tuple[Judged, str]:
    """Return whether printed numbers come out again, and the label of the cell that lies farthest off.

    A printed number is the mean of `repeats` runs like ours, so it should differ from the mean of n seeds of ours by
    no more than t s √(1/n + 1/repeats), with t at a level that all cells share (Bonferroni). `reproduced`: no cell
    differs by more than that or half a point, and this noise is nowhere wider than `widest` but where a cell comes out
    to half a point. `not reproduced`: a cell differs by more. Estimate and interval are those of the cell farthest off.
    """
    cells = []
    level = 1 - (1 - LEVEL) / len(published)
    for label, number in published.items():
        mean, spread, seeds = _moments(values[label])
        wide = half_width(spread * math.sqrt(1 + seeds / repeats), seeds, level=level)
        cells.append((mean - number, wide, seeds, label))
    seeds = min(n for _, _, n, _ in cells)
    away, wide, _, farthest = max(cells, key=lambda cell: abs(cell[0]) / max(cell[1], SMALLEST))
    verdict: Verdict = "undecided"
    if seeds >= FEWEST:
        if any(abs(d) > max(w, point / 2) for d, w, *_ in cells):
            verdict = "not reproduced"
        elif all(w <= widest or abs(d) <= point / 2 for d, w, *_ in cells):
            verdict = "reproduced"
    return Judged(verdict, away, away - wide, away + wide, math.nan, seeds), farthest


@dataclass(frozen=True)
class Order:
    """Methods in the order of a paper.

    Attributes:
        judged: the whole: `holds` if every pair that can be told apart stands so beyond its interval, `does not hold`
            if a pair does not, `reversed` if most are beyond their intervals, else `undecided`. Its estimate is the
            smallest difference of all pairs, its p-value the largest; `p_against` is the smallest of all pairs times
            their number, since one pair is enough to be out of order.
        pairs: the pairs whose published gap is at least a point and twice the sampling error: (first, second,
            judged).
        in_order: the share of them whose estimate has the published sign.
        backwards: how many are reversed beyond their interval.
        tau, tau_p: Kendall's τ between published and found means, and its one-sided p-value over permutations.
    """

    judged: Judged
    pairs: tuple[tuple[str, str, Judged], ...]
    in_order: float
    backwards: int
    tau: float
    tau_p: float


def judge_order(
    values: Mapping[str, Sequence[float]],
    published: Mapping[str, float],
    error: float = 0.0,
    point: float = POINT,
) -> Order:
    """Return whether methods stand in the published order.

    `values` has one number a seed of each, of the same seeds.

    Raises ValueError where fewer than two methods are told, or no pair can be told apart.
    """
    from scipy.stats import kendalltau

    labels = sorted(published, key=lambda label: -published[label])
    apart = [
        (one, two)
        for one, two in itertools.combinations(labels, 2)
        if published[one] - published[two] >= max(point, 2 * error)
    ]
    if not apart:
        raise ValueError(f"no two of {', '.join(labels)} are published far enough apart")
    pairs = tuple(
        (
            one,
            two,
            judge(
                (np.asarray(values[one]) - np.asarray(values[two])).tolist(),
                published[one] - published[two],
                error,
                point,
            ),
        )
        for one, two in apart
    )
    found = [judged for _, _, judged in pairs]
    seeds = min(judged.seeds for judged in found)
    right = sum(judged.estimate > 0 for judged in found)
    beyond = sum(judged.low > 0 for judged in found)
    backwards = sum(judged.high < 0 for judged in found)
    verdict: Verdict = "undecided"
    if seeds >= FEWEST:
        if beyond == len(found):
            verdict = "holds"
        elif any(judged.verdict in ("does not hold", "reversed") for judged in found):
            verdict = "reversed" if backwards > right else "does not hold"
    means = [float(np.mean(values[label])) if len(values[label]) else math.nan for label in labels]
    tau = kendalltau([published[label] for label in labels], means, alternative="greater")
    least = min(found, key=lambda judged: judged.estimate)
    p = max((judged.p_value for judged in found), default=math.nan)
    against = min(1.0, len(found) * min(judged.p_against for judged in found))
    open_pairs = [judged.needed for judged in found if judged.low <= 0]
    known = [number for number in open_pairs if number is not None]
    needed = (
        max(known, default=None) if len(known) == len(open_pairs) else None
    )  # one that no number would decide
    if verdict != "undecided":
        needed = None
    whole = Judged(verdict, least.estimate, least.low, least.high, p, seeds, needed, against)
    return Order(whole, pairs, right / len(found), backwards, float(tau.statistic), float(tau.pvalue))


def _moments(differences: Sequence[float]) -> tuple[float, float, int]:
    """Mean, standard deviation over seeds (0 where all are equal), and how many."""
    found = np.asarray(differences, dtype=np.float64)
    if len(found) == 0:
        return math.nan, math.nan, 0
    if (found == found[0]).all():
        return float(found[0]), 0.0 if len(found) > 1 else math.nan, len(found)
    return float(found.mean()), float(found.std(ddof=1)), len(found)


def _verdict(mean: float, wide: float, seeds: int, gap: float, point: float) -> Verdict:
    if seeds < FEWEST or math.isnan(mean):
        return "undecided"
    low, high = mean - wide, mean + wide
    if low > 0:
        return "holds" if mean >= gap / 2 else "holds in sign"
    if high < max(gap, point) / 2:
        return "reversed" if high < 0 else "does not hold"
    return "undecided"


def _needed(verdict: Callable[[int], Verdict], seeds: int) -> int | None:
    """Return the fewest seeds with which `verdict` is a decision."""
    return next((n for n in range(max(seeds + 1, FEWEST), MOST) if verdict(n) != "undecided"), None)
