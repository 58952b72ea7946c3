"""Verdicts on published differences: against scipy's t interval, brute force, published tables and known answers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from claimed import differences_of
from studies.claims.verdicts import half_width, judge, judge_at_most, judge_order, p_value, sampling_error


@pytest.mark.parametrize("seeds", [2, 3, 4, 10, 30])
def test_without_noise_of_the_test_set_it_is_scipys_t_interval(seeds: int) -> None:
    found = np.random.default_rng(seeds).normal(0.3, 1, seeds)
    low, high = stats.t.interval(0.95, seeds - 1, found.mean(), stats.sem(found))
    judged = judge(found.tolist(), 0.2)
    assert (judged.low, judged.high) == pytest.approx((low, high))
    assert judged.p_value == pytest.approx(stats.ttest_1samp(found, 0).pvalue, rel=1e-6)


def test_half_widths_are_those_of_a_table_of_t() -> None:
    table = {2: 8.98, 3: 2.48, 4: 1.59, 5: 1.24, 6: 1.05, 8: 0.84, 10: 0.72, 15: 0.55}
    assert {n: round(half_width(1.0, n), 2) for n in table} == table
    assert half_width(1.0, 1) == math.inf
    # both errors add in squares, and many seeds leave that of the test set
    both = math.hypot(stats.t.ppf(0.975, 3) * 0.03 / 2, stats.norm.ppf(0.975) * 0.01)
    assert half_width(0.03, 4, 0.01) == pytest.approx(both)
    assert half_width(0.03, 10**6, 0.01) == pytest.approx(0.0196, rel=1e-3)


def test_a_test_set_of_finite_size_has_its_own_error() -> None:
    """Brute force: two models that are right on samples of a set of 400 drawn anew each time."""
    rng = np.random.default_rng(0)
    q, n = 0.2, 400
    draws = rng.choice([1, -1, 0], p=[q / 2, q / 2, 1 - q], size=(20_000, n)).mean(1)
    assert sampling_error(q, n) == pytest.approx(draws.std(), rel=0.02)
    assert sampling_error(0.2, 10_000) == pytest.approx(0.0045, abs=5e-5)
    with pytest.raises(ValueError, match="share"):
        sampling_error(1.2, 10)


def test_the_interval_covers_the_truth_19_times_of_20() -> None:
    """Seeds and one common test set, both drawn anew 4,000 times."""
    rng = np.random.default_rng(1)
    truth, s, se, n = 0.02, 0.02, 0.01, 5
    inside = 0
    for _ in range(4000):
        found = truth + rng.normal(0, se) + rng.normal(0, s, n)
        inside += abs(found.mean() - truth) <= half_width(found.std(ddof=1), n, se)
    assert 0.94 < inside / 4000 < 0.98


@pytest.mark.parametrize("error", [0.0, 0.004])
@pytest.mark.parametrize("seeds", [3, 8])
def test_p_is_the_level_at_which_the_interval_touches_zero(seeds: int, error: float) -> None:
    found = np.array(differences_of(0.02, 0.015, seeds))
    p = p_value(found.mean(), found.std(ddof=1), seeds, error)
    assert half_width(found.std(ddof=1), seeds, error, 1 - p) == pytest.approx(0.02, rel=1e-6)
    assert p_value(0.0, 0.01, 5) == 1.0
    assert p_value(0.1, 0.0, 5) == 0.0
    assert math.isnan(p_value(0.1, 0.0, 1))


@pytest.mark.parametrize(
    ("mean", "width", "gap", "verdict"),
    [
        (0.05, 0.01, 0.05, "holds"),
        (0.0251, 0.01, 0.05, "holds"),  # half of it is enough
        (0.024, 0.01, 0.05, "holds in sign"),
        (0.01, 0.012, 0.05, "does not hold"),
        (0.01, 0.012, 0.04, "undecided"),  # half of the gap is still possible
        (-0.03, 0.01, 0.05, "reversed"),
        (-0.03, 0.04, 0.05, "does not hold"),
        (-0.01, 0.012, 0.001, "does not hold"),  # less than half a point, though more than g/2
        (0.03, 0.04, 0.05, "undecided"),
        (0.003, 0.001, 0.0, "holds"),
        (-0.003, 0.001, 0.0, "reversed"),
    ],
)
def test_every_verdict(mean: float, width: float, gap: float, verdict: str) -> None:
    for seeds in (3, 7):
        assert judge(differences_of(mean, width, seeds), gap).verdict == verdict


def test_two_seeds_are_never_a_result() -> None:
    assert judge([0.05, 0.0500001], 0.05).verdict == "undecided"
    assert judge([0.05, 0.0500001], 0.05).needed == 3
    assert judge([0.05, 0.05, 0.0500001], 0.05).verdict == "holds"
    for some in ([], [0.1]):
        judged = judge(some, 0.05)
        assert (judged.verdict, judged.seeds) == ("undecided", len(some))
        assert math.isnan(judged.p_value)


def test_seeds_that_would_decide_do() -> None:
    """The same estimate and spread with so many seeds is a verdict, and with one fewer it is none."""
    found = differences_of(0.02, 0.03, 4)
    judged = judge(found, 0.05)
    assert judged.verdict == "undecided"
    assert judged.needed is not None

    def with_seeds(n: int) -> str:
        more = np.linspace(-1, 1, n)
        more -= more.mean()
        return judge((0.02 + more * np.std(found, ddof=1) / more.std(ddof=1)).tolist(), 0.05).verdict

    assert with_seeds(judged.needed) != "undecided"
    assert with_seeds(judged.needed - 1) == "undecided"


def test_a_small_test_set_leaves_it_undecided_whatever_the_seeds() -> None:
    judged = judge([0.02, 0.021, 0.019, 0.02], 0.03, sampling_error(0.2, 400))
    assert (judged.verdict, judged.needed) == ("undecided", None)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        (differences_of(0.002, 0.003, 5), "holds"),
        (differences_of(0.02, 0.003, 5), "does not hold"),
        (differences_of(0.008, 0.003, 5), "undecided"),
        ([0.0, 0.0], "undecided"),
    ],
)
def test_at_most(differences: list[float], verdict: str) -> None:
    judged = judge_at_most(differences, 0.01)
    assert judged.verdict == verdict
    if len(differences) > 2:
        assert judged.p_value == pytest.approx(stats.ttest_1samp(differences, 0.01).pvalue, rel=1e-6)
        assert (judged.needed is not None and judged.needed > 5) == (verdict == "undecided")


def order_of(means: dict[str, float], width: float = 0.004, seeds: int = 5) -> dict[str, list[float]]:
    """Numbers of methods whose paired differences all have about the same small spread."""
    rng = np.random.default_rng(3)
    return {label: (mean + rng.normal(0, width, seeds)).tolist() for label, mean in means.items()}


PUBLISHED = {"a": 0.9, "b": 0.8, "c": 0.796, "d": 0.6}


def test_an_order_counts_only_pairs_that_can_be_told_apart() -> None:
    order = judge_order(order_of({"a": 0.95, "b": 0.7, "c": 0.75, "d": 0.5}), PUBLISHED)
    assert {(one, two) for one, two, _ in order.pairs} == set(itertools.combinations("abcd", 2)) - {
        ("b", "c")
    }
    assert (order.judged.verdict, order.in_order, order.backwards) == ("holds", 1.0, 0)
    wide = judge_order(order_of({"a": 0.95, "b": 0.7, "c": 0.75, "d": 0.5}), PUBLISHED, error=0.06)
    assert {(one, two) for one, two, _ in wide.pairs} == {("a", "d"), ("b", "d"), ("c", "d")}
    with pytest.raises(ValueError, match="far enough"):
        judge_order({"a": [1.0], "b": [0.0]}, {"a": 0.5, "b": 0.499})


@pytest.mark.parametrize(
    ("means", "width", "seeds", "verdict"),
    [
        ((0.9, 0.8, 0.8, 0.85), 0.004, 5, "does not hold"),
        ((0.8, 0.8, 0.8, 0.6), 0.004, 5, "does not hold"),  # surely no ten points between a and b
        ((0.5, 0.8, 0.8, 0.9), 0.004, 5, "reversed"),
        ((0.9, 0.8, 0.7, 0.6), 0.004, 2, "undecided"),
        ((0.94, 0.9, 0.89, 0.84), 0.03, 5, "undecided"),
        # of a, b and c only (a, b) and (a, c) were published far enough apart
        ((0.8, 0.7, 0.9), 0.001, 5, "does not hold"),  # (a, c) is backwards, (a, b) is not
        ((0.8, 0.85, 0.9), 0.001, 5, "reversed"),  # more pairs are backwards than forwards
        ((0.8, 0.7, 0.75), 0.001, 5, "holds"),
    ],
)
def test_verdicts_on_orders(means: tuple[float, ...], width: float, seeds: int, verdict: str) -> None:
    values = order_of(dict(zip("abcd", means, strict=False)), width, seeds)
    order = judge_order(values, {label: PUBLISHED[label] for label in values})
    assert order.judged.verdict == verdict
    assert len(order.pairs) == (5 if len(means) == 4 else 2)


def test_equal_numbers_are_in_no_order() -> None:
    values = order_of({"a": 0.9, "b": 0.9, "c": 0.8, "d": 0.6})
    assert judge_order(values, PUBLISHED).judged.verdict != "holds"


def test_kendalls_tau_is_that_of_all_permutations() -> None:
    values = order_of({"a": 0.9, "b": 0.7, "c": 0.75, "d": 0.72})
    order = judge_order(values, PUBLISHED)
    means = [float(np.mean(values[x])) for x in "abcd"]

    def concordance(ranked: tuple[float, ...]) -> int:
        return sum(int(one > two) - int(one < two) for one, two in itertools.combinations(ranked, 2))

    every = [concordance(p) for p in itertools.permutations(means)]
    here = concordance(tuple(means))  # the published order is descending
    assert order.tau == pytest.approx(here / 6)
    assert order.tau_p == pytest.approx(np.mean([one >= here for one in every]))


def test_an_order_has_the_p_value_and_the_difference_of_its_weakest_pair() -> None:
    values = order_of({"a": 0.9, "b": 0.8, "c": 0.79, "d": 0.77}, width=0.02)
    order = judge_order(values, PUBLISHED)
    by_scipy = {
        (one, two): (
            np.mean(values[one]) - np.mean(values[two]),
            stats.ttest_rel(values[one], values[two]).pvalue,
        )
        for one, two, _ in order.pairs
    }
    assert len({round(p, 6) for _, p in by_scipy.values()}) == len(by_scipy) == 5
    assert order.judged.p_value == pytest.approx(max(p for _, p in by_scipy.values()), rel=1e-6)
    assert order.judged.estimate == pytest.approx(min(gap for gap, _ in by_scipy.values()))
