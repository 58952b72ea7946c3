"""Small calculators: envelopes of quadratics, L2GD's probability, the minimax rate, releases of a training."""

from __future__ import annotations

import math

import coupled_quadratics
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.theory import l2gd
from tailorfl.theory.fedclup import moreau_constants
from tailorfl.theory.fedclup_statistics import minimax_rate
from tailorfl.theory.privacy import releases


def test_published_form_of_the_envelope() -> None:
    found = moreau_constants(mu=1, smoothness=10, lam=1)
    assert found.global_smoothness == pytest.approx(10 / 11)
    assert found.global_convexity == pytest.approx(1 / 2)
    assert (found.local_smoothness, found.local_convexity, found.prox_lipschitz) == (11, 2, 0.5)
    assert found.condition == pytest.approx(20 / 11)


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    mu=st.floats(0.1, 5),
    kappa=st.floats(1.01, 50),
    lam=st.floats(0.01, 100),
)
def test_constants_are_the_extreme_curvatures_of_the_envelope(
    seed: int, mu: float, kappa: float, lam: float
) -> None:
    problem = coupled_quadratics.draw(seed, mu, mu * kappa, lam, clients=1)
    found = moreau_constants(mu, mu * kappa, lam)
    jacobian = lam * problem.local_inverse[0]  # of w -> v*(w)
    hessian = lam * (np.eye(3) - jacobian)  # of F^lam, whose gradient is lam (w - v*(w))
    assert np.linalg.eigvalsh(hessian)[[0, -1]] == pytest.approx(
        [found.global_convexity, found.global_smoothness]
    )
    assert np.linalg.norm(jacobian, 2) == pytest.approx(found.prox_lipschitz)


def test_gradient_of_the_envelope() -> None:
    problem = coupled_quadratics.draw(0, 1, 10, lam=0.7, clients=1)

    def envelope(w: np.ndarray) -> float:
        v = problem.prox(w)[0]
        off = v - problem.c[0]
        return float(0.5 * off @ problem.H[0] @ off + 0.35 * ((v - w) ** 2).sum())

    w, step = np.array([1.0, -2.0, 0.5]), 1e-5
    slopes = [(envelope(w + step * e) - envelope(w - step * e)) / (2 * step) for e in np.eye(3)]
    assert slopes == pytest.approx(0.7 * (w - problem.prox(w)[0]), rel=1e-6)


@settings(deadline=None)
@given(
    mu=st.floats(0.1, 10),
    kappa=st.floats(1, 100),
    lam=st.floats(0.01, 100),
    p=st.floats(0.001, 0.999),
)
def test_no_other_probability_of_averaging_is_better(mu: float, kappa: float, lam: float, p: float) -> None:
    L = mu * kappa
    best, other = l2gd.plan(mu, L, lam, 10, 1e-4), l2gd.plan(mu, L, lam, 10, 1e-4, p)
    assert best.p == lam / (lam + L)
    assert best.iterations <= other.iterations * (1 + 1e-12)
    assert best.communications <= other.communications * (1 + 1e-12)
    expected = 2 * lam * kappa / (lam + L) * math.log(1e4)
    assert best.communications == pytest.approx(expected)


def test_l2gd_written_out() -> None:
    found = l2gd.plan(1, 10, 1, clients=5, target=1e-6, p=0.5)
    assert found.expected_smoothness == pytest.approx(20 / 5)
    assert found.step == pytest.approx(1 / 8)
    assert found.iterations == pytest.approx(40 * math.log(1e6))
    assert found.communications == pytest.approx(0.25 * found.iterations)
    assert l2gd.plan(1, 10, 1, clients=5, target=1e-6).expected_smoothness == pytest.approx(11 / 5)


def test_expected_smoothness_bounds_the_random_gradient() -> None:
    """`E ||G(x) - G(x*)||^2 <= 2 Lcal D(x, x*)`, D the objective's Bregman distance; one weight a client."""
    rng, lam = np.random.default_rng(0), 2.0
    curvature = np.array([1.0, 3.0, 10.0])
    coupling = lam * (np.eye(3) - 1 / 3)
    for p in (0.1, l2gd.best_probability(10, lam), 0.8):
        bound = l2gd.plan(1, 10, lam, clients=3, target=0.1, p=p).expected_smoothness
        for _ in range(100):
            off = rng.standard_normal(3)
            local, pull = curvature * off / (3 * (1 - p)), coupling @ off / (3 * p)
            second_moment = (1 - p) * (local**2).sum() + p * (pull**2).sum()
            bregman = 0.5 * off @ (np.diag(curvature) + coupling) @ off / 3
            assert second_moment <= 2 * bound * bregman * (1 + 1e-12)


@pytest.mark.parametrize(
    ("radius", "regime", "order"),
    [
        (0.0, "pooled", 1 / 2500),
        (0.02, "pooled", 1 / 2500),
        (0.05, "between", 0.0025),
        (0.1, "between", 0.01),
        (0.2, "alone", 0.01),
    ],
)
def test_regimes_of_the_minimax_rate(radius: float, regime: str, order: float) -> None:
    found = minimax_rate(samples=100, clients=25, radius=radius)
    assert (found.pooled_below, found.alone_above) == (0.02, 0.1)
    assert found.regime == regime
    assert found.order == pytest.approx(order)
    assert found.rate == pytest.approx(1 / 2500 + min(radius**2, 0.01))


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 10**4), st.floats(0, 10))
def test_rate_is_of_its_order_and_never_better_than_pooled(samples: int, clients: int, radius: float) -> None:
    found = minimax_rate(samples, clients, radius)
    assert found.order <= found.rate <= 2 * found.order
    assert found.rate >= 1 / (samples * clients)
    assert found.rate <= minimax_rate(samples, clients, radius * 1.1).rate


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"samples": 500, "batch": 10, "epochs": 1, "rounds": 10}, (0.02, 1.0, 500)),
        ({"samples": 505, "batch": 10, "epochs": 1, "rounds": 10}, (10 / 505, 1.0, 510)),
        ({"samples": 500, "batch": 10, "epochs": 2, "rounds": 10, "trainings": 2}, (0.02, 1.0, 2000)),
        ({"samples": 500, "batch": 0, "epochs": 3, "rounds": 4}, (1.0, 1.0, 12)),
        ({"samples": 5, "batch": 10, "epochs": 3, "rounds": 4}, (1.0, 1.0, 12)),
        (
            {"samples": 500, "batch": 10, "epochs": 1, "rounds": 1, "gradients": 4, "noise": 3.0},
            (0.02, 1.5, 50),
        ),
    ],
)
def test_rate_noise_and_steps(given: dict[str, int], expected: tuple[float, float, int]) -> None:
    q, sigma, steps = releases(**given)
    assert (q, steps) == (pytest.approx(expected[0]), expected[2])
    assert math.isclose(sigma, expected[1])
