"""Quadratics: after many rounds every method stands at its known optimum, whatever p_i, also if clients are sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from methods.quadratics import (
    CLIENTS,
    DIM,
    LR,
    MU,
    Floats,
    L,
    Reference,
    curvature,
    global_weight,
    limit_simulation,
    optimum,
    personal_weights,
    quadratic_simulation,
    shares,
)
from methods.settings import LAM, Kind, in_turn, make, one_of, with_limit
from methods.small import after
from tailorfl.core.method import make_method
from tailorfl.data.synthetic import closed_form, pooled_optimum
from tailorfl.rounds.simulation import Simulation

ROUNDS = 45
ATOL = 2e-5
BLOCKS, BURN = 20, 16
TOLERANCE = 5.0
"""Standard errors; about 20 numbers are compared a method, with 19 degrees of freedom each."""


@pytest.mark.parametrize(
    ("name", "weights"), in_turn(("uniform",), ("samples",), names=with_limit(), share=3)
)
def test_every_method_stands_at_its_closed_form(name: str, weights: str) -> None:
    sim, limit = limit_simulation(name, weights=weights)
    after(sim, 80 if name == "apfl" else ROUNDS)  # its mixture nears the end half as fast
    # Pooled data weight clients by their samples, whatever the option says.
    used = "samples" if sim.method.pooled else sim.weights
    w, v = optimum(limit.kind, shares(used))
    if sim.method.has_global:
        np.testing.assert_allclose(global_weight(sim), w, atol=ATOL)
    if sim.method.has_personal:
        np.testing.assert_allclose(personal_weights(sim), v, atol=ATOL)
    else:
        everywhere = np.tile(global_weight(sim), (CLIENTS, 1))
        np.testing.assert_allclose(personal_weights(sim), everywhere, atol=1e-6)


def test_the_weightings_have_different_optima() -> None:
    """Otherwise the tests of this file could not tell them apart."""
    kinds: tuple[Kind, ...] = ("pooled", "coupled")
    for kind in kinds:
        (a, _), (b, _) = optimum(kind, shares("samples")), optimum(kind, shares("uniform"))
        assert np.abs(a - b).max() > 0.1  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["coupled", "ditto"])
def test_the_optima_are_stationary(kind: Kind) -> None:
    """∇F_i(v_i) = λ(w − v_i), and for the coupled problem w = Σ p_i v_i; Ditto's w ignores the personal models."""
    p, local = shares("samples"), Reference()
    w, v = optimum(kind, p)
    assert w is not None
    for i in range(CLIENTS):
        np.testing.assert_allclose(local.grad(i, v[i]), LAM * (w - v[i]), atol=1e-12)
    gap = float(np.abs(w - p.numpy() @ v).max())
    assert gap > 0.05 if kind == "ditto" else gap < 1e-12


class TestFedCLUP:
    @pytest.mark.parametrize("lam", [pytest.param(0.3, marks=pytest.mark.slow), 4.0])
    def test_contracts_at_least_at_the_rate_of_theorem_2(self, lam: float) -> None:
        """With γ = 1/(2 L_g) and K of Corollary 2, ‖w − w*‖² shrinks every round by r = 1 −
        (λ+L)/(4κ(λ+μ)) or more, also by the sharper 1 − γμ_g/2 − (γμ_g)²/2.
        """
        kappa = L / MU
        steps = int(np.ceil(2 + (lam + L) / (lam + MU) * np.log(1056 * kappa**2)))
        options = {"gamma": "theory", "smoothness": L, "lr_rule": "deterministic", "weights": "uniform"}
        sim = quadratic_simulation(make("fedclup", lam=lam, **options), steps)
        H, c = curvature()
        w_star, _ = closed_form(H, c, shares("uniform"), lam)
        rate = 1 - (lam + L) / (4 * kappa * (lam + MU))
        gamma_mu = (lam + L) / (2 * lam * L) * (lam * MU / (lam + MU))
        sharper = 1 - gamma_mu / 2 - gamma_mu**2 / 2
        assert sharper <= rate < 1
        errors = [float(((global_weight(sim) - w_star.numpy()) ** 2).sum())]
        while errors[-1] > 1e-8 and len(errors) < 60:
            sim.step()
            errors.append(float(((global_weight(sim) - w_star.numpy()) ** 2).sum()))
        assert errors[-1] <= 1e-8
        ratios = np.divide(errors[1:-1], errors[:-2])
        assert (ratios <= sharper + 1e-6).all(), ratios


@pytest.mark.parametrize("name", ["fedavg", "ditto", "apfl"])
def test_fedavg_with_several_local_steps_is_biased(name: str) -> None:
    """It stops at (Σ p_i (I − (I−ηH_i)^K))⁻¹ Σ p_i (I − (I−ηH_i)^K) c_i, which is not the pooled optimum."""
    K = 5
    sim = after(quadratic_simulation(make_method(name), K), 12)
    H, c = curvature()
    p = shares(sim.weights)
    eye = torch.eye(DIM, dtype=torch.float64)
    moved = eye - torch.linalg.matrix_power(eye - LR * H, K)
    biased = pooled_optimum(moved, c, p).numpy()
    pooled = pooled_optimum(H, c, p).numpy()
    np.testing.assert_allclose(global_weight(sim), biased, atol=ATOL)
    assert np.abs(biased - pooled).max() > 0.05


def tail(sim: Simulation, rounds: int, personal: bool) -> tuple[Floats, Floats]:
    """Mean of the models after each round, and its standard error.

    The global model, then the personal ones, [1 + N, dim].
    """
    seen = []
    for number in range(BURN + rounds):
        sim.step()
        if number >= BURN:
            w = [global_weight(sim)] if sim.method.has_global else []
            seen.append(np.array([*w, *(personal_weights(sim) if personal else [])]))
    means = np.array(seen).reshape(BLOCKS, rounds // BLOCKS, *seen[0].shape).mean(1)
    return means.mean(0), means.std(0, ddof=1) / np.sqrt(BLOCKS)


def distance(found: Floats, error: Floats, target: Floats) -> float:
    """The largest deviation in standard errors; below float32 accuracy counts as none."""
    return float((np.maximum(np.abs(found - target) - 3e-5, 0) / np.maximum(error, 1e-9)).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of(3, with_limit()))
def test_the_iterates_average_to_the_closed_form(name: str) -> None:
    sim, limit = limit_simulation(name, weights="uniform", fraction=0.67, seed=1)
    # Beside a global model, personal models without a state of their own are w, or tuned from w to the
    # exact c_i.
    personal = bool(sim.start.keys()) or not sim.method.has_global
    found, error = tail(sim, 60, personal)

    def targets(weights: str) -> Floats:
        w, v = optimum(limit.kind, shares(weights))
        return np.array([w] * sim.method.has_global + list(v) * personal)

    right, wrong = ("samples", "uniform") if sim.method.pooled else ("uniform", "samples")
    assert distance(found, error, targets(right)) < TOLERANCE
    if limit.kind != "local":
        assert distance(found, error, targets(wrong)) > 2 * TOLERANCE
