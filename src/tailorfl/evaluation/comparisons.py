"""Statistics of comparisons: intervals over seeds, paired tests, Holm's correction, ranks, and the best of n trials.

Means over several seeds have Student-t intervals; two methods with the same seeds are compared in pairs.

Methods are ranked over several federations (Demšar, JMLR 2006) in a table [federations, methods]: 1 is the best of its
row, and equal numbers share their mean rank. Friedman's test decides whether all methods are equal; if it rejects this,
Nemenyi's critical difference, or Wilcoxon's signed ranks with Holm's correction, show which of them differ.

A tuning budget of n trials has an expected validation performance (Dodge et al., "Show Your Work", EMNLP 2019). For N
scores with sorted values v_(1) ≤ … ≤ v_(N), the best of n scores drawn with replacement is v_(i) with probability
(i/N)ⁿ − ((i−1)/N)ⁿ, which gives the exact expectation over the empirical distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

NAN = float("nan")
LEVEL = 0.05
"""Significance level: probability of finding any difference among equal methods, over all comparisons together."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Paired:
    """Comparison of two methods on the same seeds."""

    mean: float  # mean difference, first minus second
    half_width: float  # half width of its confidence interval
    p_value: float  # two-sided paired t-test of "no difference"
    seeds: int


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return the mean over seeds and the half width of its two-sided Student-t confidence interval.

    With one seed the half width is NaN, without seeds the mean as well. A NaN among the values makes both NaN, so that
    a failed seed is visible. Raises ValueError unless 0 < level < 1.
    """
    from scipy.special import stdtrit

    if not 0 < level < 1:
        raise ValueError(f"level is a probability between 0 and 1, got {level}")
    mean, error = _mean_and_error(np.asarray(values, dtype=np.float64))
    if np.isnan(error):
        return mean, NAN
    return mean, float(stdtrit(len(values) - 1, 0.5 + level / 2) * error)


def noise(values: Sequence[float], std: float | None, runs: int, level: float = 0.95) -> float:
    """Return how far the mean over our seeds may be from a published mean of the same experiment.

    It is the half width of the two-sided Student-t interval of the difference of the two means.

    Args:
        values: our results, one for each seed.
        std: standard deviation over published runs; None if it is not published, and ours is used instead.
        runs: number of runs of the published mean.
        level: of the interval.

    Returns:
        The half width; NaN if neither side has a deviation, or a value is missing.
    """
    from scipy.special import stdtrit

    seeds = len(values)
    ours = (float(np.var(values, ddof=1)), seeds - 1) if seeds > 1 else None
    theirs = (std**2, runs - 1) if std is not None and runs > 1 else None
    known = ours or theirs
    if known is None or seeds == 0:
        return NAN
    parts = (ours or known)[0] / seeds, (theirs or known)[0] / runs
    degrees: float = known[1]
    if ours and theirs and sum(parts) > 0:  # Welch and Satterthwaite
        degrees = sum(parts) ** 2 / (parts[0] ** 2 / ours[1] + parts[1] ** 2 / theirs[1])
    return float(stdtrit(degrees, 0.5 + level / 2)) * math.sqrt(sum(parts))


def paired(first: Sequence[float], second: Sequence[float], level: float = 0.95) -> Paired:
    """Compare two methods in pairs: `first[s]` and `second[s]` are their results with the same seed s.

    Differences cancel the effects of the seed on both methods (partition, initial weights), so fewer seeds are needed
    than with two separate intervals. If all differences are equal, p is 0, or 1 if they are all zero. A single pair has
    no interval (NaN). Raises ValueError if the lengths differ.
    """
    from scipy.special import stdtr

    if len(first) != len(second):
        raise ValueError(f"pairs need the same seeds on both sides, got {len(first)} and {len(second)}")
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    mean, half_width = interval(differences.tolist(), level)
    _, error = _mean_and_error(differences)
    if np.isnan(error):
        p_value = NAN
    elif error == 0:
        p_value = 1.0 if mean == 0 else 0.0
    else:
        p_value = float(2 * stdtr(len(differences) - 1, -abs(mean) / error))
    return Paired(mean, half_width, p_value, len(differences))


def _mean_and_error(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> tuple[float, float]:
    """Return the mean and its standard error (sample standard deviation over root n); NaN with too few values."""
    if len(values) == 0:
        return NAN, NAN
    if len(values) == 1:
        return float(values[0]), NAN
    if (values == values[0]).all():
        # exact: rounding in the mean of equal numbers would leave a standard error of about 1e-17
        return float(values[0]), 0.0
    with np.errstate(invalid="ignore"):  # an infinite value leaves no interval
        return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for multiple comparisons (Holm, 1979); NaN are not counted as tests and stay NaN.

    The k-th smallest of m is multiplied by m − k + 1; it is at least its predecessor and at most 1.
    """
    raw = np.asarray(p_values, dtype=np.float64)
    adjusted = np.full_like(raw, np.nan)
    order = [int(test) for test in np.argsort(raw, kind="stable") if not math.isnan(raw[test])]
    least = 0.0
    for position, test in enumerate(order):
        least = max(least, min(1.0, (len(order) - position) * float(raw[test])))
        adjusted[test] = least
    return [float(value) for value in adjusted]


@dataclass(frozen=True)
class Ranking:
    """Methods ranked over federations.

    Attributes:
        ranks: `[federations, methods]` the ranks, 1 for the best.
        average: `[methods]` the mean ranks over federations.
        chi2, chi2_p: Friedman's statistic, corrected for ties, and its p-value (χ² with methods − 1 degrees).
        f, f_p: the statistic of Iman and Davenport, which is less conservative, and its p-value; if all federations
            agree, f is infinite and f_p the exact probability of this among equal methods.
        critical: average ranks that differ by this or more are significantly different (Nemenyi).
        wilcoxon: (method, method) -> p-value of Wilcoxon's signed ranks, corrected by Holm.
    """

    ranks: NDArray[np.float64]
    average: NDArray[np.float64]
    chi2: float
    chi2_p: float
    f: float
    f_p: float
    critical: float
    wilcoxon: dict[Pair, float]

    @property
    def nemenyi_groups(self) -> list[tuple[int, ...]]:
        """The largest groups of methods, best first, in which no average ranks differ by `critical` or more."""
        return self._groups(lambda a, b: bool(abs(self.average[a] - self.average[b]) < self.critical))

    @property
    def wilcoxon_groups(self) -> list[tuple[int, ...]]:
        """The largest groups of neighbours by average rank in which no corrected p-value is below `LEVEL`."""
        return self._groups(lambda a, b: not self.wilcoxon[min(a, b), max(a, b)] < LEVEL)

    def _groups(self, alike: Callable[[int, int], bool]) -> list[tuple[int, ...]]:
        order = [int(method) for method in np.argsort(self.average, kind="stable")]
        runs: list[tuple[int, ...]] = []
        for begin in range(len(order)):
            end = begin + 1
            while end < len(order) and all(alike(order[end], member) for member in order[begin:end]):
                end += 1
            run = tuple(order[begin:end])
            if len(run) > 1 and not any(set(run) <= set(run_before) for run_before in runs):
                runs.append(run)
        return runs


def ranking(scores: ArrayLike, *, higher_is_better: bool | Sequence[bool] = True) -> Ranking:
    """Rank the methods of a table `scores` [federations, methods] and test whether they differ.

    `higher_is_better` may be one value for each federation, since federations may have different metrics.

    Raises:
        ValueError: there are fewer than two methods or federations, or a number is missing.
    """
    from scipy.stats import chi2, f, rankdata, studentized_range

    table = np.asarray(scores, dtype=np.float64)
    if table.ndim != 2 or min(table.shape) < 2 or np.isnan(table).any():
        raise ValueError(
            f"ranks need a full table of at least 2 federations and 2 methods, got shape {table.shape} with "
            f"{int(np.isnan(table).sum())} missing numbers"
        )
    n, k = table.shape
    sign = np.where(np.broadcast_to(np.asarray(higher_is_better), (n,)), -1.0, 1.0)[:, None]
    ranks = np.asarray(rankdata(sign * table, axis=1), dtype=np.float64)
    average = ranks.mean(axis=0)
    between = float(((ranks.sum(axis=0) - n * (k + 1) / 2) ** 2).sum())
    within = float(((ranks - (k + 1) / 2) ** 2).sum())
    statistic = (k - 1) * between / within if within else 0.0
    remainder = n * (k - 1) - statistic
    ratio = (n - 1) * statistic / remainder if remainder > 1e-12 else math.inf
    p_value = float(f.sf(ratio, k - 1, (k - 1) * (n - 1)))
    if ratio == math.inf:  # the same order everywhere, which chance gives as well
        ties = np.unique(ranks[0], return_counts=True)[1].tolist()
        p_value = (math.factorial(k) / math.prod(map(math.factorial, ties))) ** (1 - n)
    return Ranking(
        ranks,
        average,
        statistic,
        float(chi2.sf(statistic, k - 1)),
        ratio,
        p_value,
        float(studentized_range.ppf(1 - LEVEL, k, math.inf)) * math.sqrt(k * (k + 1) / (12.0 * n)),
        _wilcoxon(sign * table),
    )


def _wilcoxon(costs: NDArray[np.float64]) -> dict[Pair, float]:
    """Return corrected p-values of all pairs of columns; pairs that are equal everywhere have 1."""
    from scipy.stats import wilcoxon

    pairs = list(combinations(range(costs.shape[1]), 2))
    raw = []
    for a, b in pairs:
        differences = costs[:, a] - costs[:, b]
        raw.append(float(wilcoxon(differences).pvalue) if differences.any() else 1.0)
    return dict(zip(pairs, holm(raw), strict=True))


def expected_best(
    scores: Sequence[float], draws: Sequence[int], *, higher_is_better: bool = True
) -> list[float]:
    """Return the expected best of n scores drawn with replacement, for each n in `draws`.

    Args:
        scores: of the trials, in any order.
        draws: numbers of trials of a budget, each at least 1.
        higher_is_better: whether the best is the largest.

    Raises:
        ValueError: there are no scores, one is not finite, or fewer than one is drawn.
    """
    values = np.sort(np.asarray(scores, dtype=np.float64))
    if not len(values) or not np.isfinite(values).all():
        raise ValueError(f"expected_best needs at least one score, all finite, but got {list(scores)}")
    if min(draws, default=1) < 1:
        raise ValueError(f"expected_best must draw at least one score, but draws has {min(draws)}")
    if not higher_is_better:
        values = values[::-1]
    share = np.arange(len(values) + 1) / len(values)
    return [float(values @ np.diff(share**n)) for n in draws]
