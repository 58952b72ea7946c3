"""Intervals over seeds against scipy and a table, and their coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tailorfl.evaluation.seeds import Paired, interval, noise, paired


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


def test_noise_of_two_means_is_welchs() -> None:
    ours, theirs = [0.81, 0.84, 0.78, 0.9], [0.7, 0.8, 0.75]
    expected = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.9)
    assert noise(ours, float(np.std(theirs, ddof=1)), 3, 0.9) == pytest.approx(
        (expected.high - expected.low) / 2
    )


def test_a_deviation_that_is_missing_on_one_side_is_that_of_the_other() -> None:
    ours = [0.81, 0.84, 0.78]
    deviation = np.std(ours, ddof=1)
    assert noise(ours, None, 1) == pytest.approx(stats.t.ppf(0.975, 2) * deviation * math.sqrt(1 / 3 + 1))
    assert noise(ours, None, 5) == pytest.approx(stats.t.ppf(0.975, 2) * deviation * math.sqrt(1 / 3 + 1 / 5))
    assert noise(ours, 0.5, 1) == noise(ours, None, 1)  # a deviation of one run is none
    assert noise([0.8], 0.02, 3) == pytest.approx(stats.t.ppf(0.975, 2) * 0.02 * math.sqrt(1 + 1 / 3))
    assert noise([0.8, 0.8], 0.0, 3) == 0
    for values, std, runs in (([0.8], None, 3), ([0.8], 0.1, 1), ([], 0.1, 3), ([0.8, math.nan], 0.1, 3)):
        assert math.isnan(noise(values, std, runs))


def test_runs_of_one_experiment_differ_by_more_than_the_noise_in_one_of_twenty() -> None:
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=3), rng.normal(size=5)) for _ in range(2000)]
    beyond = [abs(a.mean() - b.mean()) > noise(a.tolist(), float(b.std(ddof=1)), 5) for a, b in pairs]
    assert np.mean(beyond) == pytest.approx(0.05, abs=0.02)
    alone = [abs(a.mean() - b[0]) > noise(a.tolist(), None, 1) for a, b in pairs]
    assert np.mean(alone) == pytest.approx(0.05, abs=0.02)


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
