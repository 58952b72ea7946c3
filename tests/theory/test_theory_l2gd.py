"""The best probability of averaging is the best for iterations and for communications."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
