"""Many comparisons at once: Holm's correction, and methods ranked over several federations (Demšar, JMLR 2006).

Ranks are those of a table [federations, methods]: 1 is the best of its row, equal numbers share the mean of their
places. Friedman's test asks whether all methods are equal; where it says no, Nemenyi's critical difference, or
Wilcoxon's signed ranks with Holm's correction, say which of them differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.05
"""Probability at which a difference that is none is taken for one, over all comparisons together."""

Pair = tuple[int, int]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for being looked at together (Holm, 1979); NaN are no tests and stay NaN.

    The k-th smallest of m is multiplied by m − k + 1, is at least its predecessor, and at most 1.
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
        average: `[methods]` their means over federations.
        chi2, chi2_p: Friedman's statistic, corrected for ties, and its p-value (χ² with methods − 1 degrees).
        f, f_p: that of Iman and Davenport, which is less conservative, and its p-value.
        critical: average ranks that differ by more are different (Nemenyi).
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
        """The largest groups of methods, best first, within which no average ranks differ by `critical` or more."""
        return self._groups(lambda a, b: bool(abs(self.average[a] - self.average[b]) < self.critical))

    @property
    def wilcoxon_groups(self) -> list[tuple[int, ...]]:
        """The largest runs of neighbours by average rank within which no corrected p-value is below `LEVEL`."""
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
    """Ranks the methods of a table `scores` [federations, methods] and tests whether they differ.

    `higher_is_better` may be told for every federation, since federations may be measured in different ways.

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
    return Ranking(
        ranks,
        average,
        statistic,
        float(chi2.sf(statistic, k - 1)),
        ratio,
        float(f.sf(ratio, k - 1, (k - 1) * (n - 1))),
        float(studentized_range.ppf(1 - LEVEL, k, math.inf)) * math.sqrt(k * (k + 1) / (12.0 * n)),
        _wilcoxon(sign * table),
    )


def _wilcoxon(costs: NDArray[np.float64]) -> dict[Pair, float]:
    """Corrected p-values of all pairs of columns; pairs that are equal everywhere have 1."""
    from scipy.stats import wilcoxon

    pairs = list(combinations(range(costs.shape[1]), 2))
    raw = []
    for a, b in pairs:
        differences = costs[:, a] - costs[:, b]
        raw.append(float(wilcoxon(differences).pvalue) if differences.any() else 1.0)
    return dict(zip(pairs, holm(raw), strict=True))
