"""Full participation on quadratics.

After many rounds every method stands at its known optimum, whatever p_i.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from methods.quadratics import (
    CLIENTS,
    DIM,
    LR,
    MU,
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
from methods.settings import LAM, Kind, in_turn, make, row, with_limit
from tailorfl.core.method import make_method
from tailorfl.data.synthetic import closed_form, pooled_optimum

ROUNDS = 45
ATOL = 2e-5


def run(sim: Any, rounds: int = ROUNDS) -> Any:
    for _ in range(rounds):
        sim.step()
    return sim


@pytest.mark.parametrize(("name", "weights"), in_turn(("uniform",), ("samples",), names=with_limit()))
def test_every_method_stands_at_its_closed_form(name: str, weights: str) -> None:
    sim, limit = limit_simulation(name, weights=weights)
    run(sim, 80 if name == "apfl" else ROUNDS)  # its mixture nears the end half as fast
    # Pooled data weight clients by their samples, whatever the option says.
    used = "samples" if sim.method.pooled else sim.weights
    w, v = optimum(limit.kind, shares(used))
    if sim.method.has_global:
        np.testing.assert_allclose(global_weight(sim), w, atol=ATOL)
    if sim.method.has_personal:
        np.testing.assert_allclose(personal_weights(sim), v, atol=ATOL)
    else:
        np.testing.assert_allclose(
            personal_weights(sim), np.tile(global_weight(sim), (CLIENTS, 1)), atol=1e-6
        )


def test_the_weightings_have_different_optima() -> None:
    """Otherwise the tests of this file could not tell them apart."""
    kinds: tuple[Kind, ...] = ("pooled", "coupled")
    for kind in kinds:
        (a, _), (b, _) = optimum(kind, shares("samples")), optimum(kind, shares("uniform"))
        assert a is not None
        assert b is not None
        assert np.abs(a - b).max() > 0.1


@pytest.mark.parametrize("kind", ["coupled", "ditto"])
def test_the_optima_are_stationary(kind: Kind) -> None:
    """∇F_i(v_i) = λ(w − v_i), and for the coupled problem w = Σ p_i v_i; Ditto's w ignores the personal models."""
    p, local = shares("samples"), Reference()
    w, v = optimum(kind, p)
    assert w is not None
    assert v is not None
    for i in range(CLIENTS):
        np.testing.assert_allclose(local.grad(i, v[i]), LAM * (w - v[i]), atol=1e-12)
    gap = float(np.abs(w - p.numpy() @ v).max())
    assert gap > 0.05 if kind == "ditto" else gap < 1e-12


class TestFedCLUP:
    @pytest.mark.parametrize(("gamma", "lam"), [("mean", 0.3), ("theory", 2.0), ("edge", 0.3)])
    def test_every_server_step_has_the_same_fixed_point(self, gamma: str, lam: float) -> None:
        method = make(
            "fedclup", weights="uniform", lam=lam, gamma=gamma, smoothness=L, lr_rule="deterministic"
        )
        sim = run(quadratic_simulation(method, 8))
        H, c = curvature()
        w, v = closed_form(H, c, shares("uniform"), lam)
        np.testing.assert_allclose(global_weight(sim), w.numpy(), atol=ATOL)
        np.testing.assert_allclose(personal_weights(sim), v.numpy(), atol=ATOL)

    def test_one_local_step_a_round_has_it_too(self) -> None:
        """v_i persists, so the fixed point does not depend on K: only the speed does."""
        sim = run(quadratic_simulation(make("fedclup", weights="uniform", lam=LAM), 1))
        w, v = optimum("coupled", shares("uniform"))
        np.testing.assert_allclose(global_weight(sim), w, atol=ATOL)
        np.testing.assert_allclose(personal_weights(sim), v, atol=ATOL)

    def test_small_lambda_goes_to_the_local_optima_and_their_mean(self) -> None:
        lam = 1e-4
        sim = run(quadratic_simulation(make("fedclup", weights="uniform", lam=lam), 30, lr=0.5), 10)
        _, c = curvature()
        np.testing.assert_allclose(personal_weights(sim), c.numpy(), atol=1e-3)
        np.testing.assert_allclose(global_weight(sim), c.mean(0).numpy(), atol=1e-3)

    def test_large_lambda_goes_to_the_pooled_optimum(self) -> None:
        """Needs γ = 1/λ + 1/L: with γ = 1/λ the server crawls, at rate L/λ a round."""
        lam = 3000.0
        H, c = curvature()
        pooled = pooled_optimum(H, c, shares("uniform")).numpy()
        gap = {}
        for gamma in ("edge", "mean"):
            sim = run(
                quadratic_simulation(
                    make(
                        "fedclup",
                        weights="uniform",
                        lam=lam,
                        gamma=gamma,
                        smoothness=L,
                        lr_rule="deterministic",
                    ),
                    12,
                )
            )
            gap[gamma] = float(np.abs(global_weight(sim) - pooled).max())
            if gamma == "edge":
                np.testing.assert_allclose(personal_weights(sim), np.tile(pooled, (CLIENTS, 1)), atol=5e-3)
        assert gap["edge"] < 2e-3
        assert gap["mean"] > 20 * gap["edge"]

    @pytest.mark.parametrize("lam", [0.3, 4.0])
    def test_contracts_at_least_at_the_rate_of_theorem_2(self, lam: float) -> None:
        """With γ = 1/(2 L_g) and K of Corollary 2, ‖w − w*‖² shrinks every round by r = 1 −
        (λ+L)/(4κ(λ+μ)) or more, also by the sharper 1 − γμ_g/2 − (γμ_g)²/2.
        """
        kappa = L / MU
        steps = int(np.ceil(2 + (lam + L) / (lam + MU) * np.log(1056 * kappa**2)))
        sim = quadratic_simulation(
            make(
                "fedclup", weights="uniform", lam=lam, gamma="theory", smoothness=L, lr_rule="deterministic"
            ),
            steps,
        )
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


@pytest.mark.slow
def test_pfedme_local_step_does_not_move_the_fixed_point_at_one_local_round() -> None:
    limit = row("pfedme").limit
    assert limit is not None
    for lr, rounds in ((0.2, 60), (0.5, 30)):
        options = {**dict(limit.options), "lr": lr, "weights": "uniform"}
        sim = run(quadratic_simulation(make_method("pfedme", options)), rounds)
        w, v = optimum("coupled", shares("uniform"))
        np.testing.assert_allclose(global_weight(sim), w, atol=ATOL)
        np.testing.assert_allclose(personal_weights(sim), v, atol=ATOL)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "apfl"])
def test_fedavg_with_several_local_steps_is_biased(name: str) -> None:
    """It stops at (Σ p_i (I − (I−ηH_i)^K))⁻¹ Σ p_i (I − (I−ηH_i)^K) c_i, which is not the pooled optimum."""
    K = 5
    sim = run(quadratic_simulation(make_method(name), K), 12)
    H, c = curvature()
    p = shares(sim.weights)
    moved = torch.eye(DIM, dtype=torch.float64) - torch.linalg.matrix_power(
        torch.eye(DIM, dtype=torch.float64) - LR * H, K
    )
    biased = pooled_optimum(moved, c, p).numpy()
    pooled = pooled_optimum(H, c, p).numpy()
    np.testing.assert_allclose(global_weight(sim), biased, atol=ATOL)
    assert np.abs(biased - pooled).max() > 0.05
