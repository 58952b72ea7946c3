"""R, V and v_k from two halves: free of bias where the plain distances are not, by simulation of the halves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tailorfl.theory.recommend import best_pull, expected_errors
from tailorfl.theory.spread import Floats, client_spread, heterogeneity, interval

CLIENTS, DIM, NOISE = 8, 6, 0.5
"""NOISE is the variance of one weight of a half's model."""


def halves(rng: np.random.Generator, optima: Floats, noise: float = NOISE) -> tuple[Floats, Floats]:
    shape = optima.shape
    return tuple(optima + noise**0.5 * rng.standard_normal(shape) for _ in range(2))  # type: ignore[return-value]


def around(rng: np.random.Generator, radius: float) -> Floats:
    """Optima of mean 3 in every weight and root mean square distance `radius` from it."""
    offsets = rng.standard_normal((CLIENTS, DIM))
    offsets -= offsets.mean(0)
    return 3 + offsets * radius / max(float(np.sqrt((offsets**2).sum(1).mean())), 1e-300)


@pytest.mark.parametrize("radius", [0.0, 0.3, 2.0])
def test_heterogeneity_is_unbiased_and_the_plain_distance_is_not(radius: float) -> None:
    rng = np.random.default_rng(0)
    optima, found, plain = around(rng, radius), [], []
    for _ in range(4000):
        a, b = halves(rng, optima)
        found.append(heterogeneity(a @ b.T))
        both = (a + b) / 2
        plain.append(((both - both.mean(0)) ** 2).sum(1).mean())
    error = np.std(found) / np.sqrt(len(found))
    assert abs(np.mean(found) - radius**2) < 3.5 * error
    inflated = (1 - 1 / CLIENTS) * DIM * NOISE / 2
    assert np.mean(plain) - radius**2 == pytest.approx(inflated, rel=0.05)


def test_clients_that_were_drawn_speak_for_all() -> None:
    """The mean over all draws of three clients is R^2 of the eight."""
    optima = around(np.random.default_rng(0), 2.0)
    drawn = [optima[list(some)] for some in itertools.combinations(range(CLIENTS), 3)]
    found = [heterogeneity(some @ some.T, among=CLIENTS) for some in drawn]
    assert np.mean(found) == pytest.approx(2.0**2)
    resampled = [heterogeneity(s @ s.T, np.array([0, 1, 2]), CLIENTS) * 2 / 3 for s in drawn]
    assert resampled == pytest.approx(found)
    assert heterogeneity(optima @ optima.T, among=CLIENTS) == heterogeneity(optima @ optima.T)


def test_a_resample_of_two_is_narrower_by_half() -> None:
    gram = np.array([[4.0, 1.0], [1.0, 2.0]])
    assert heterogeneity(gram) == pytest.approx(3 - 2)
    assert heterogeneity(gram, np.array([0, 1])) == pytest.approx(2 * (3 - 2))
    assert heterogeneity(gram, np.array([1, 1])) == 0.0


def test_an_interval_holds_its_value_and_the_middle_of_the_draws() -> None:
    found = interval(-1.0, np.arange(101.0))
    assert (found.value, found.low, found.high) == (-1.0, -1.0, 95.0)
    assert (found.root().value, found.root().high) == (0.0, 95.0**0.5)
    half = interval(50.0, np.arange(101.0), level=0.5)
    assert (half.value, half.low, half.high) == (50.0, 25.0, 75.0)


def test_client_spread_recovers_every_clients_own() -> None:
    """With many weights and little noise: standard deviations are sqrt(2/d) = 7 % and, near 0, 0.05/sqrt(d)."""
    rng, dim = np.random.default_rng(2), 400
    v2 = np.array([0.01, 0.1, 0.1, 0.5, 1.0, 1.0, 2.0, 4.0])
    optima = np.sqrt(v2)[:, None] * rng.standard_normal((len(v2), dim)) + 5
    a, b = halves(rng, optima, noise=0.05)
    found = client_spread(a @ b.T, ((a - b) ** 2).sum(1) / 2, dim)
    assert found == pytest.approx(((optima - 5) ** 2).mean(1), rel=0.1, abs=0.02)
    assert found == pytest.approx(v2, rel=0.25, abs=0.02)


def test_client_spread_is_empirical_bayes_with_the_scatter_that_simulation_gives() -> None:
    """Each client beside the weighted mean of the others, its estimate pulled to the mean by how much is noise."""
    rng, dim = np.random.default_rng(5), 30
    optima = rng.standard_normal((CLIENTS, dim)) * np.sqrt(rng.uniform(0.3, 4, (CLIENTS, 1)))
    a, b = halves(rng, optima, noise=2.0)
    noise, weights = ((a - b) ** 2).sum(1) / 2, np.ones(CLIENTS)
    draw, first, second = rng.standard_normal((3, 100_000))
    for _ in range(5):
        system, products = np.eye(CLIENTS), np.empty(CLIENTS)
        for k in range(CLIENTS):
            others = np.delete(np.arange(CLIENTS), k)
            share = weights[others] / weights[others].sum()
            products[k] = (a[k] - share @ a[others]) @ (b[k] - share @ b[others])
            system[k, others] = share**2
        raw = np.linalg.solve(system, products) / dim
        pairs = (
            (v**0.5 * draw + p**0.5 * first, v**0.5 * draw + p**0.5 * second)
            for v, p in zip(raw, noise / dim, strict=True)
        )
        scatter = np.array([(x * y).var() / dim for x, y in pairs])
        between = raw.var(ddof=1) - scatter.mean()
        spread = raw.mean() + between / (between + scatter) * (raw - raw.mean())
        weights = 1 / (spread + noise / dim / 2)
    assert client_spread(a @ b.T, noise, dim) == pytest.approx(spread, rel=0.01)


def test_client_spread_is_pulled_together_where_clients_do_not_differ_in_it() -> None:
    """One spread for all: the estimates' scatter is noise, and shrinking takes most of it away."""
    rng, raw_error, error = np.random.default_rng(3), 0.0, 0.0
    for _ in range(200):
        optima = rng.standard_normal((CLIENTS, DIM))
        a, b = halves(rng, optima)
        gram = a @ b.T
        found = client_spread(gram, ((a - b) ** 2).sum(1) / 2, DIM)
        assert (found >= 0).all()
        centred = (a - a.mean(0)) * (b - b.mean(0))
        raw_error += float(((centred.mean(1) - 1) ** 2).sum())
        error += float(((found - 1) ** 2).sum())
    assert error < 0.6 * raw_error


@pytest.mark.parametrize("clients", [2, 5, 50])
def test_best_pull_is_the_minimum_of_the_error_in_every_direction(clients: int) -> None:
    """The error of the module's docstring, over lam on a fine grid, for curvatures 1, 3 and 10 at once."""
    curvature, sigma2, samples, r2 = np.array([1.0, 3.0, 10.0]), 2.0, 40, 0.03
    noise = sigma2 / curvature / samples

    def error(lam: float) -> Floats:
        keep = curvature / (curvature + lam)
        return np.asarray(noise / clients + (1 - 1 / clients) * keep**2 * noise + (1 - keep) ** 2 * r2)

    lam = best_pull(excess=sigma2 * 3 / samples, radius2=3 * r2, clients=clients)
    grid = lam * np.geomspace(0.1, 10, 2001)
    table = np.array([error(x) for x in grid])
    assert grid[table.argmin(0)] == pytest.approx(np.full(3, lam), rel=2e-3)
    flat = expected_errors(float(noise[0]), r2, clients)
    assert flat.coupled == pytest.approx(error(best_pull(sigma2 / samples, r2, clients))[0])
    assert flat.alone == pytest.approx(error(0.0)[0])
    assert flat.pooled == pytest.approx(error(1e12)[0])
    alike = expected_errors(0.4, -1.0, clients)  # an estimate below 0 counts as 0
    assert alike.coupled == alike.pooled == 0.4 / clients
    assert expected_errors(0.0, 0.0, clients).coupled == 0
