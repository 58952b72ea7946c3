"""What several seeds say together: Student-t intervals and paired comparisons."""

from __future__ import annotations

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
