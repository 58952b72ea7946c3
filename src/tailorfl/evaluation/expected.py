"""The validation performance to expect of a tuning budget (Dodge et al., "Show Your Work", EMNLP 2019).

Of N scores with sorted values v_(1) ≤ … ≤ v_(N), the best of n that are drawn with replacement is v_(i) with
probability (i/N)ⁿ − ((i−1)/N)ⁿ: the exact expectation over the empirical distribution, no simulation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def expected_best(
    scores: Sequence[float], draws: Sequence[int], *, higher_is_better: bool = True
) -> list[float]:
    """Return the expected best of so many scores drawn with replacement, one number for each of `draws`.

    Args:
        scores: those of the trials, in any order.
        draws: how many trials a budget pays for, each at least 1.
        higher_is_better: whether the best is the largest.

    Raises:
        ValueError: there are no scores, one is not finite, or fewer than one is drawn.
    """
    values = np.sort(np.asarray(scores, dtype=np.float64))
    if not len(values) or not np.isfinite(values).all():
        raise ValueError(f"expected_best needs finite scores, at least one, but was given {list(scores)}")
    if min(draws, default=1) < 1:
        raise ValueError(f"expected_best draws at least one score, but was asked for {min(draws)}")
    if not higher_is_better:
        values = values[::-1]
    share = np.arange(len(values) + 1) / len(values)
    return [float(values @ np.diff(share**n)) for n in draws]
