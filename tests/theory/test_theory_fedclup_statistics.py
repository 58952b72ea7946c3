"""Corollary 1's lam satisfies what its proof needs, and the bounds hold where the error is known."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tailorfl.theory.fedclup_statistics import (
    Problem,
    lambda_range,
    slack,
    statistical_bound,
)


def power(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


problems = st.builds(
    lambda mu, kappa, rho, radius, samples, clients: Problem(mu, mu * kappa, rho, radius, samples, clients),
    mu=power(-2, 2),
    kappa=power(0, 3),
    rho=power(-2, 2),
    radius=power(-5, 2),
    samples=st.integers(1, 100_000),
    clients=st.integers(1, 1000),
)
PUBLISHED = {"mu": 1.0, "smoothness": 10.0, "rho": 2.0, "samples": 200, "clients": 10}


def published(radius: float) -> Problem:
    return Problem(mu=1, smoothness=10, rho=2, radius=radius, samples=200, clients=10)


def test_published_ranges() -> None:
    near, far = lambda_range(published(0.05)), lambda_range(published(0.5))
    assert published(0.05).threshold == pytest.approx(0.070711, abs=1e-6)
    assert (near.together, near.lower, near.upper) == (True, 63_999, math.inf)
    assert (far.together, far.lower) == (False, 0)
    assert far.upper == pytest.approx(0.08)


def test_heterogeneity_at_the_threshold_counts_as_small() -> None:
    edge = published(0.05).threshold
    assert lambda_range(published(edge)).together
    assert not lambda_range(published(edge * (1 + 1e-9))).together


def test_second_term_of_the_lower_bound() -> None:
    """With the same data everywhere and kappa = 1 it is `5 mu m - mu`, once m outgrows 64/5."""
    alike = Problem(mu=2, smoothness=2, rho=1, radius=0, samples=50, clients=100)
    assert lambda_range(alike).lower == pytest.approx(5 * 2 * 100 - 2)


@settings(deadline=None)
@given(problems, power(0, 4))
def test_lower_bound_implies_both_conditions_of_the_proof(problem: Problem, times: float) -> None:
    """g <= 1/(8 L^2), and 1/q_1 at most what the constants 192 and 198 leave to it."""
    assume(lambda_range(problem).together)
    lam = lambda_range(problem).lower * times
    assert slack(problem, lam) <= 1 / (8 * problem.smoothness**2)
    noise, kappa = (problem.rho / problem.mu) ** 2, problem.kappa
    without = 48 * noise / problem.total + (48 * kappa**2 + 3) * problem.radius**2
    excess = statistical_bound(problem, lam).pooled - without
    assert excess <= 144 * noise / problem.total + (150 * kappa**2 - 3) * problem.radius**2


@pytest.mark.parametrize(("eighths", "holds"), [(0.999, True), (1.001, False)])
def test_the_pooled_bound_asks_for_a_slack_of_an_eighth_of_the_squared_smoothness(
    eighths: float, holds: bool
) -> None:
    """Where 4/mu (1/x + L/x^2) = s for x = mu + lam: x = (2 + 2 sqrt(1 + mu L s)) / (mu s)."""
    mu, L = 0.5, 2.0
    s = eighths / (8 * L**2)
    lam = 2 * (1 + math.sqrt(1 + mu * L * s)) / (mu * s) - mu
    problem = Problem(mu=mu, smoothness=L, rho=1, radius=0.1, samples=50, clients=10)
    assert slack(problem, lam) == pytest.approx(s)
    assert math.isfinite(statistical_bound(problem, lam).pooled) == holds


@settings(deadline=None)
@given(problems, st.floats(0, 1))
def test_bound_in_the_range_is_of_the_minimax_form(problem: Problem, share: float) -> None:
    """At most c3 / N + c4 min(R^2, 1/n), with the constants of Theorem 1's minimax form."""
    found, noise = lambda_range(problem), problem.rho / problem.mu
    c2 = max(((1 + math.sqrt(3)) * noise) ** 2, 32 * problem.kappa**2)
    c3, c4 = 192 * noise**2, max((noise * (1 + math.sqrt(4 * c2 + 5))) ** 2, 198 * problem.kappa**2)
    lam = found.lower if found.together else share * found.upper
    limit = c3 / problem.total + c4 * min(problem.radius**2, 1 / problem.samples)
    assert statistical_bound(problem, lam).value <= limit


@settings(deadline=None)
@given(power(-2, 3), power(-2, 1), power(-3, 2), st.integers(1, 500), st.integers(2, 50))
def test_bound_holds_for_means(lam: float, rho: float, radius: float, samples: int, clients: int) -> None:
    """Estimating means with squared loss (mu = L = 1), where the error of every lam is known exactly."""
    own, shared = 1 / (1 + lam), lam / (1 + lam)
    variance = own**2 + (2 * own * shared + shared**2) / clients
    error = rho**2 / samples * variance + (shared * radius) ** 2
    problem = Problem(1, 1, rho, radius, samples, clients)
    bound = statistical_bound(problem, lam)
    assert error <= bound.separate
    assert error <= bound.pooled


@settings(deadline=None)
@given(problems, power(-3, 3))
def test_formulas_written_out(problem: Problem, lam: float) -> None:
    mu, L, rho, R = problem.mu, problem.smoothness, problem.rho, problem.radius
    n, N, s = problem.samples, problem.total, problem.mu + lam
    bound = statistical_bound(problem, lam)
    q2 = 8 * lam**2 * R**2 / mu**2 + 4 * lam * R**2 / mu
    noise = 4 * rho**2 / (mu**2 * n)
    assert bound.separate == pytest.approx(noise + 16 * rho**2 * lam / (mu**3 * n) + q2)
    g = 4 / mu * (1 / s + L / s**2)
    if g > 1 / (8 * L**2):
        assert bound.pooled == math.inf
        return
    local = 4 * L**2 * R**2 + 2 * rho**2 / n
    excess = 12 / s**2 * local + (48 * L**2 / s**2 + 3) * g / (1 - 4 * L**2 * g) * local
    excess += 96 * L**2 / s**2 * (8 * rho**2 / (mu**2 * N) + 8 * L**2 * R**2 / mu**2)
    first = 48 * rho**2 / (mu**2 * N) + (48 * L**2 / mu**2 + 3) * R**2
    assert bound.pooled == pytest.approx(first + excess)
