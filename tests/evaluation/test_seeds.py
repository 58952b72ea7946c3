"""Intervals over seeds against scipy and a table, and their coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tailorfl.evaluation.seeds import Paired, interval, paired


def test_interval_by_hand() -> None:
    # 1, 2, 3: mean 2, standard error 1/sqrt(3), t(0.975, 2 degrees of freedom) = 4.302653
    mean, half_width = interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
def test_interval_equals_scipy(level: float) -> None:
    values = np.random.default_rng(0).normal(3, 2, 7).tolist()
    mean, half_width = interval(values, level)
    low, high = stats.t.interval(level, 6, loc=np.mean(values), scale=stats.sem(values))
    assert (mean - half_width, mean + half_width) == pytest.approx((low, high))


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    draws = np.random.default_rng(1).normal(size=(2000, 5))
    covered = np.mean([abs(mean) <= width for mean, width in (interval(row.tolist()) for row in draws)])
    assert covered == pytest.approx(0.95, abs=0.015)  # three standard errors of 2000 draws


def test_few_values() -> None:
    assert interval([0.1, 0.1, 0.1]) == (0.1, 0.0)
    assert interval([0.5])[0] == 0.5
    assert math.isnan(interval([0.5])[1])
    assert all(math.isnan(value) for value in interval([]))
    assert all(math.isnan(value) for value in interval([0.5, math.nan]))


@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_paired_equals_scipy(level: float) -> None:
    rng = np.random.default_rng(2)
    first, second = rng.normal(0.8, 0.1, 6), rng.normal(0.75, 0.1, 6)
    found = paired(first.tolist(), second.tolist(), level)
    expected = stats.ttest_rel(first, second)
    low, high = expected.confidence_interval(level)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx((low, high))
    assert found.seeds == 6


def test_pairs_cancel_what_both_owe_to_the_seed() -> None:
    rng = np.random.default_rng(3)
    luck = rng.normal(0, 1, 8)
    first = (luck + 0.1 + rng.normal(0, 0.01, 8)).tolist()
    found = paired(first, luck.tolist())
    assert found.p_value < 1e-6
    assert found.half_width < interval(first)[1] / 10


def test_pairs_without_spread() -> None:
    assert paired([1.0, 2.0], [1.0, 2.0]) == Paired(0.0, 0.0, 1.0, 2)
    assert paired([1.5, 2.5], [1.0, 2.0]) == Paired(0.5, 0.0, 0.0, 2)
    single = paired([1.0], [0.5])
    assert single.mean == 0.5
    assert math.isnan(single.half_width)
    assert math.isnan(single.p_value)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="same seeds on both sides, got 2 and 1"):
        paired([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="between 0 and 1"):
        interval([1.0, 2.0], 95)
