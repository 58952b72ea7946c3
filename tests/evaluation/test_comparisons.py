"""Numbers of several runs against scipy and published tables: over seeds, over federations, and over trials."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import betainc
from scipy.stats import friedmanchisquare, wilcoxon

from tailorfl.evaluation.comparisons import Paired, expected_best, holm, interval, noise, paired, ranking

# -- intervals over seeds --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_a_level_is_no_certainty(level: float) -> None:
    with pytest.raises(ValueError, match="level"):
        interval([1.0, 2.0], level)


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


# -- ranks over federations ------------------------------------------------------------------------------------------


# Table 6 of Demšar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 7 (2006): the area under
# the curve of C4.5, C4.5+m, C4.5+cf and C4.5+m+cf on 14 data sets.
DEMSAR = np.array(
    [
        [0.763, 0.768, 0.771, 0.798],
        [0.599, 0.591, 0.590, 0.569],
        [0.954, 0.971, 0.968, 0.967],
        [0.628, 0.661, 0.654, 0.657],
        [0.882, 0.888, 0.886, 0.898],
        [0.936, 0.931, 0.916, 0.931],
        [0.661, 0.668, 0.609, 0.685],
        [0.583, 0.583, 0.563, 0.625],
        [0.775, 0.838, 0.866, 0.875],
        [1.000, 1.000, 1.000, 1.000],
        [0.940, 0.962, 0.965, 0.962],
        [0.619, 0.666, 0.614, 0.669],
        [0.972, 0.981, 0.97501, 0.975],  # printed alike, but ranked 2 and 3 in the paper
        [0.957, 0.978, 0.946, 0.970],
    ]
)


def test_the_published_example_has_its_published_numbers() -> None:
    """Average ranks, F(3, 39) for them, and the critical difference of 4 methods on 14 data sets."""
    found = ranking(DEMSAR)
    assert found.average == pytest.approx([3.143, 2.000, 2.893, 1.964], abs=5e-4)
    # The paper computes χ² without the correction for ties: 12 N / (k (k + 1)) (Σ R² − k (k + 1)² / 4) = 9.28.
    n, k = DEMSAR.shape
    plain = 12 * n / (k * (k + 1)) * (float((found.average**2).sum()) - k * (k + 1) ** 2 / 4)
    assert plain == pytest.approx(9.28, abs=0.005)
    assert (n - 1) * plain / (n * (k - 1) - plain) == pytest.approx(3.69, abs=0.005)
    assert found.critical == pytest.approx(2.569 * math.sqrt(4 * 5 / (6 * 14)), abs=1e-3)
    assert found.critical == pytest.approx(1.25, abs=0.01)
    # At 0.05 the largest difference, 3.143 − 1.964, is below 1.25: nobody differs.
    assert found.nemenyi_groups == [(3, 1, 2, 0)]


@pytest.mark.parametrize(("k", "q"), [(2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)])
def test_critical_values_are_those_of_the_published_table(k: int, q: float) -> None:
    """Table 5 (a) of the same paper: q at 0.05 of the Nemenyi test."""
    scores = np.random.default_rng(k).normal(size=(6, k))
    assert ranking(scores).critical == pytest.approx(q * math.sqrt(k * (k + 1) / 36), abs=1e-3)


@pytest.mark.parametrize("digits", [8, 1], ids=["no ties", "ties"])
def test_friedman_is_that_of_scipy(digits: int) -> None:
    scores = np.random.default_rng(3).normal(size=(9, 5)).round(digits)
    found = ranking(scores)
    statistic, p = friedmanchisquare(*scores.T)
    assert found.chi2 == pytest.approx(statistic)
    assert found.chi2_p == pytest.approx(p)
    assert ranking(-scores, higher_is_better=False).average == pytest.approx(found.average)


def test_federations_may_be_measured_in_ways_that_point_apart() -> None:
    scores = np.array([[0.9, 0.8, 0.7], [0.1, 0.2, 0.3], [0.9, 0.8, 0.7]])
    found = ranking(scores, higher_is_better=[True, False, True])
    assert found.ranks.tolist() == [[1, 2, 3]] * 3
    assert found.f == math.inf
    assert found.f_p == pytest.approx(1 / 6**2)  # two federations have the order of the first, one of six
    assert ranking([[2.0, 1.0, 1.0]] * 2).f_p == pytest.approx(1 / 3)


def test_equal_methods_do_not_differ() -> None:
    found = ranking(np.ones((5, 3)))
    assert found.average.tolist() == [2, 2, 2]
    assert (found.chi2, found.chi2_p) == (0, 1)
    assert set(found.wilcoxon.values()) == {1.0}
    assert found.nemenyi_groups == found.wilcoxon_groups == [(0, 1, 2)]


def test_wilcoxon_is_that_of_scipy_with_holm_by_hand() -> None:
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(12, 3)) + np.array([0.0, 0.2, 2.5])
    raw = {
        (a, b): wilcoxon(scores[:, a], scores[:, b]).pvalue for a, b in itertools.combinations(range(3), 2)
    }
    order = sorted(raw, key=lambda pair: raw[pair])
    found = ranking(scores)
    assert found.wilcoxon[order[0]] == pytest.approx(3 * raw[order[0]])
    assert found.wilcoxon[order[1]] == pytest.approx(max(3 * raw[order[0]], 2 * raw[order[1]]))
    assert found.wilcoxon_groups == [(1, 0)]  # best first; the third is better than both


def test_groups_overlap_and_none_is_part_of_another() -> None:
    """Five methods whose average ranks are 1 to 5: with a critical difference of 2.5 each reaches two further."""
    scores = np.tile([5.0, 4.0, 3.0, 2.0, 1.0], (8, 1))
    found = ranking(scores)
    assert 2 < found.critical < 3
    assert found.nemenyi_groups == [(0, 1, 2), (1, 2, 3), (2, 3, 4)]


@pytest.mark.parametrize("scores", [np.ones((1, 3)), np.ones((3, 1)), [[1.0, math.nan], [1.0, 2.0]]])
def test_no_ranks_without_a_full_table(scores: object) -> None:
    with pytest.raises(ValueError, match="full table"):
        ranking(scores)  # type: ignore[arg-type]


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    some = holm([math.nan, 0.02, 0.03])
    assert math.isnan(some[0])
    assert some[1:] == pytest.approx([0.04, 0.04])


@pytest.mark.parametrize("shape", [(4, 3), (6, 4)])
def test_iman_davenport_is_the_analysis_of_variance_of_ranks(shape: tuple[int, int]) -> None:
    """Mean square between methods over that of what methods and federations leave, with k − 1 and (n − 1)(k − 1)."""
    scores = np.random.default_rng(1).normal(size=shape) + 0.2 * np.arange(shape[1])
    found = ranking(scores)
    n, k = shape
    places = np.array([[1 + sum(other > own for other in row) for own in row] for row in scores], dtype=float)
    methods, rows, mean = places.mean(0), places.mean(1, keepdims=True), places.mean()
    between = n * ((methods - mean) ** 2).sum() / (k - 1)
    rest = ((places - methods - rows + mean) ** 2).sum() / ((n - 1) * (k - 1))
    assert 0 < found.f < math.inf
    assert found.f == pytest.approx(between / rest)
    ratio, upper, lower = between / rest, k - 1, (n - 1) * (k - 1)
    tail = betainc(lower / 2, upper / 2, lower / (lower + upper * ratio))  # P(F > ratio)
    assert found.f_p == pytest.approx(float(tail))


# -- the expected best of n draws ------------------------------------------------------------------------------------


SCORES = [0.3, 0.9, 0.1, 0.9, 0.55]


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_equals_the_mean_over_all_draws_with_replacement(higher_is_better: bool) -> None:
    best = max if higher_is_better else min
    every = [
        sum(best(draw) for draw in itertools.product(SCORES, repeat=n)) / len(SCORES) ** n
        for n in (1, 2, 3, 4)
    ]
    found = expected_best(SCORES, [1, 2, 3, 4], higher_is_better=higher_is_better)
    assert found == pytest.approx(every, abs=1e-14)
    assert expected_best(SCORES, []) == []


@pytest.mark.parametrize(("scores", "draws"), [([], [1]), ([math.nan], [1]), ([math.inf], [1]), ([0.5], [0])])
def test_what_has_no_expectation_is_refused(scores: list[float], draws: list[int]) -> None:
    with pytest.raises(ValueError, match="expected_best"):
        expected_best(scores, draws)
