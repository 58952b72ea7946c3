"""The expected best of n draws against all draws, one by one."""

from __future__ import annotations

import itertools

import pytest

from tailorfl.evaluation.expected import expected_best

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


@pytest.mark.parametrize(("scores", "draws"), [([], [1]), ([float("nan")], [1]), ([0.5], [0])])
def test_what_has_no_expectation_is_refused(scores: list[float], draws: list[int]) -> None:
    with pytest.raises(ValueError, match="expected_best"):
        expected_best(scores, draws)
