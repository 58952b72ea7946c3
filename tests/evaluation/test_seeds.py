"""Intervals over seeds against scipy and a table, and their coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tailorfl.evaluation.seeds import Paired, interval, paired


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
def test_interval_equals_scipy(level: float) -> None:
    values = np.random.default_rng(0).normal(3, 2, 7).tolist()
    mean, half_width = interval(values, level)
    low, high = stats.t.interval(level, 6, loc=np.mean(values), scale=stats.sem(values))
    assert (mean - half_width, mean + half_width) == pytest.approx((low, high))


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
