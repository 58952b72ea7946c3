"""The constants are those of the envelopes of quadratics."""

from __future__ import annotations

import coupled_quadratics
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.theory.moreau import moreau_constants


def test_published_form() -> None:
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
