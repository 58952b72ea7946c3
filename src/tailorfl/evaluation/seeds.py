"""What several seeds say together: Student-t intervals and paired comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NAN = float("nan")


@dataclass(frozen=True)
class Paired:
    """Comparison of two methods on the same seeds."""

    mean: float  # mean difference, first minus second
    half_width: float  # half width of its confidence interval
    p_value: float  # two-sided paired t-test of "no difference"
    seeds: int


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Mean over seeds and half width of its two-sided Student-t confidence interval.

    One seed has no half width (NaN), no seed has no mean either. A NaN among the values is kept: a seed that
    failed must show. Raises ValueError unless 0 < level < 1.
    """
    from scipy.special import stdtrit

    if not 0 < level < 1:
        raise ValueError(f"level is a probability between 0 and 1, got {level}")
    mean, error = _mean_and_error(np.asarray(values, dtype=np.float64))
    if np.isnan(error):
        return mean, NAN
    return mean, float(stdtrit(len(values) - 1, 0.5 + level / 2) * error)


def noise(values: Sequence[float], std: float | None, runs: int, level: float = 0.95) -> float:
    """Return how far the mean over our seeds may lie from a published mean of the same experiment.

    That is the half width of the two-sided Student-t interval of the difference of both means.

    Args:
        values: our results, one a seed.
        std: standard deviation over published runs; None where it is not printed, and ours stands for it.
        runs: how many runs the published mean is of.
        level: of the interval.

    Returns:
        NaN where neither side has a deviation, or a value is missing.
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
    """Paired comparison of two methods, `first[s]` and `second[s]` being their results with the same seed s.

    Differences cancel what both methods owe to the seed (partition, initial weights), so fewer seeds decide
    than with two separate intervals. Differences that are all equal leave no doubt: p is 0, or 1 where they
    are all zero. One pair has no interval (NaN). Raises ValueError where the lengths differ.
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
    """Mean and its standard error (sample standard deviation over root n), NaN where values are too few."""
    if len(values) == 0:
        return NAN, NAN
    if len(values) == 1:
        return float(values[0]), NAN
    if (values == values[0]).all():
        # exact: the mean of equal numbers is rounded, and would leave a standard error of about 1e-17
        return float(values[0]), 0.0
    with np.errstate(invalid="ignore"):  # an infinite value leaves no interval
        return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))
