"""The best probability of averaging is the best for iterations and for communications."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.errors import ConfigError
from tailorfl.theory.l2gd import best_probability, plan


@settings(deadline=None)
@given(
    mu=st.floats(0.1, 10),
    kappa=st.floats(1, 100),
    lam=st.floats(0.01, 100),
    p=st.floats(0.001, 0.999),
)
def test_no_other_probability_is_better(mu: float, kappa: float, lam: float, p: float) -> None:
    L = mu * kappa
    best, other = plan(mu, L, lam, 10, 1e-4), plan(mu, L, lam, 10, 1e-4, p)
    assert best.p == lam / (lam + L)
    assert best.iterations <= other.iterations * (1 + 1e-12)
    assert best.communications <= other.communications * (1 + 1e-12)
    expected = 2 * lam * kappa / (lam + L) * math.log(1e4)
    assert best.communications == pytest.approx(expected)


def test_values_written_out() -> None:
    found = plan(1, 10, 1, clients=5, reduction=1e-6, p=0.5)
    assert found.expected_smoothness == pytest.approx(20 / 5)
    assert found.step == pytest.approx(1 / 8)
    assert found.iterations == pytest.approx(40 * math.log(1e6))
    assert found.communications == pytest.approx(0.25 * found.iterations)
    assert plan(1, 10, 1, clients=5, reduction=1e-6).expected_smoothness == pytest.approx(11 / 5)


def test_expected_smoothness_bounds_the_random_gradient() -> None:
    """`E ||G(x) - G(x*)||^2 <= 2 Lcal D(x, x*)`, D the objective's Bregman distance; one weight a client."""
    rng, lam = np.random.default_rng(0), 2.0
    curvature = np.array([1.0, 3.0, 10.0])
    coupling = lam * (np.eye(3) - 1 / 3)
    for p in (0.1, best_probability(10, lam), 0.8):
        bound = plan(1, 10, lam, clients=3, reduction=0.1, p=p).expected_smoothness
        for _ in range(100):
            off = rng.standard_normal(3)
            local, pull = curvature * off / (3 * (1 - p)), coupling @ off / (3 * p)
            second_moment = (1 - p) * (local**2).sum() + p * (pull**2).sum()
            bregman = 0.5 * off @ (np.diag(curvature) + coupling) @ off / 3
            assert second_moment <= 2 * bound * bregman * (1 + 1e-12)


def test_limits() -> None:
    assert best_probability(10, 1e-9) == pytest.approx(0, abs=1e-9)
    assert best_probability(10, 1e9) == pytest.approx(1)
    assert plan(1, 10, 1e-9, 5, 1e-3).communications == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1, 10, 0, 5, 0.1), "lam must be a positive number"),
        ((1, 10, 1, 0, 0.1), "clients must be at least 1"),
        ((1, 10, 1, 5, 1.0), "reduction must lie strictly between 0 and 1"),
        ((1, 10, 1, 5, 0.1, 0.0), "p must lie strictly between 0 and 1"),
        ((1, 10, 0, 5, 0.1, 0.5), "lam must be a positive number"),
    ],
)
def test_impossible_values(values: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(*values)  # type: ignore[arg-type]
