"""SCAFFOLD, FedDyn and MR-MTL: their invariants, and exact convergence where FedAvg is biased."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from methods.quadratics import (
    CLIENTS,
    COPIES,
    DIM,
    WEIGHT,
    Reference,
    global_weight,
    optimum,
    quadratic_simulation,
    shares,
    states,
)
from methods.reductions import FULL_STEP, PLAIN, fedavg, in_run, local
from methods.settings import LAM, PROX_STEPS, Card, Limit, Row
from tailorfl.core.method import make_method
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.experiment import Weights
from tailorfl.testing.contract import twice, whole

CONTRACTS = {
    "fedsam": Row(
        Card(whole, whole, whole, False, True),
        {"rho": 0.02},
        same=(
            fedavg("T01", rho=0.0, said=True),
            fedavg("T01", rho=0.0, said=True),
        ),
    ),
    "scaffold": Row(
        Card(twice, twice, whole, False, True, whole),
        limit=Limit("pooled"),
        over_all=True,
        same=(
            in_run(replace(fedavg("one round", exact=False), other_train=PLAIN), rounds=1),
            # With batch norm a client of one sample takes no step, and no correction.
            in_run(
                replace(
                    fedavg("one step", exact=False),
                    train=FULL_STEP,
                    other_train=PLAIN,
                    models=("mlp", "dropout"),
                ),
                fraction=1.0,
            ),
        ),
    ),
    "feddyn": Row(
        Card(whole, whole, whole, False, True, whole),
        {"alpha": 0.1},
        Limit("pooled", PROX_STEPS, {"alpha": LAM}),
        over_all=True,
        never="α > 0, and its server step differs from an average from the first round on",
    ),
    "mr_mtl": Row(
        Card(whole, whole, whole, True, False, whole),
        {"lam": 0.5},
        Limit("coupled", PROX_STEPS, {"lam": LAM}),
        over_all=True,
        same=(local(lam=0.0),),
    ),
}


def run(sim: Simulation, rounds: int) -> Simulation:
    for _ in range(rounds):
        sim.step()
    return sim


def average(vectors: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Σ p_i x_i of [clients, 1, dim] over all clients, float64."""
    return torch.einsum("k,k...->...", shares(weights), vectors.double())


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [("scaffold", {}, 4), ("feddyn", {"alpha": 2.0}, 6)],
    ids=["scaffold", "feddyn"],
)
@pytest.mark.parametrize(("engine", "weights"), [("sequential", "uniform"), ("vectorized", "samples")])
def test_partial_participation_reaches_the_pooled_optimum_exactly(
    name: str, options: dict[str, float], steps: int, engine: str, weights: Weights
) -> None:
    method, settings = make_method(name, options), {"fraction": 0.5, "lr": 0.1, "weights": weights}
    sim = run(quadratic_simulation(method, steps, engine=engine, **settings), 60)
    pooled, _ = optimum("pooled", shares(weights))
    assert pooled is not None
    np.testing.assert_allclose(global_weight(sim), pooled, atol=2e-5)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_feddyn_with_scaled_alpha_reaches_the_optimum_weighted_by_samples(engine: str) -> None:
    """Where it stands still mean_i q_i = 0, q_i = −n_i ∇F_i(w)/(α n̄); the optimum of equal clients is elsewhere."""
    method = make_method("feddyn", {"alpha": 2.0, "scale_alpha": True})
    sim = run(quadratic_simulation(method, 12, engine=engine, fraction=0.5, lr=0.1), 60)
    weighted, _ = optimum("pooled", shares("samples"))
    equal, _ = optimum("pooled", shares("uniform"))
    assert weighted is not None
    assert equal is not None
    np.testing.assert_allclose(global_weight(sim), weighted, atol=2e-4)
    assert np.abs(global_weight(sim) - equal).max() > 0.1


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_feddyn_with_scaled_alpha_is_the_official_codes_storage(engine: str) -> None:
    """q_i += θ_i − w and w = mean_S θ + mean_i q_i; θ_i descends ∇F_i(θ) + α_i (q_i + θ − w), α_i = α n̄/n_i."""
    alpha, steps, lr = 0.5, 3, 0.1
    method = make_method("feddyn", {"alpha": alpha, "scale_alpha": True})
    sim = quadratic_simulation(method, steps, engine=engine, fraction=0.34, lr=lr)
    problem, w = Reference(), global_weight(sim)
    own = alpha * np.mean(COPIES) / np.array(COPIES)
    q = np.zeros((CLIENTS, len(w)))
    for _ in range(8):
        chosen = sim.sample(sim.round)
        found = []
        for i in chosen:
            theta = w
            for _ in range(steps):
                theta = theta - lr * (problem.grad(i, theta) + own[i] * (q[i] + theta - w))
            found.append(theta)
        for i, theta in zip(chosen, found, strict=True):
            q[i] += theta - w
        w = np.mean(found, axis=0) + q.mean(0)
        sim.step()
        np.testing.assert_allclose(global_weight(sim), w, atol=2e-5)
        np.testing.assert_allclose(states(sim), -own[:, None] * q, atol=2e-5)
        h = sim.server["correction"][WEIGHT][0].double().numpy()
        np.testing.assert_allclose(h, (shares("samples").numpy()[:, None] * states(sim)).sum(0), atol=2e-5)


def test_where_sizes_are_equal_scaling_alpha_changes_nothing() -> None:
    one, other = (
        run(
            quadratic_simulation(
                make_method("feddyn", {"alpha": 0.5, "scale_alpha": scaled}), 3, equal=True, fraction=0.5
            ),
            4,
        )
        for scaled in (False, True)
    )
    np.testing.assert_allclose(global_weight(one), global_weight(other), atol=1e-6)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("mean", ["all", "sampled"])
def test_mr_mtls_two_means_are_those_of_the_formulas(mean: str, engine: str) -> None:
    """all: v̄ = mean of everybody's latest; sampled: v̄ + (m/N)(mean_S v_i⁺ − v̄). They differ from round 2 on."""
    lam, steps, lr = 2.0, 3, 0.1
    method = make_method("mr_mtl", {"lam": lam, "mean": mean})
    sim = quadratic_simulation(method, steps, engine=engine, fraction=0.34, lr=lr, weights="uniform")
    problem, centre = Reference(), sim.server[WEIGHT][0].double().numpy()
    v = np.tile(centre, (CLIENTS, 1))
    for _ in range(6):
        chosen = list(sim.sample(sim.round))
        for i in chosen:
            v[i] = problem.descend(i, v[i], steps, lr, lam, centre)
        moved = centre + len(chosen) / CLIENTS * (v[chosen].mean(0) - centre)
        centre = v.mean(0) if mean == "all" else moved
        sim.step()
        np.testing.assert_allclose(sim.server[WEIGHT][0].double().numpy(), centre, atol=2e-5)
    assert np.abs(v.mean(0) - moved).max() > 1e-2


def test_fedavg_with_several_steps_does_not() -> None:
    sim = run(quadratic_simulation(make_method("fedavg"), 4, lr=0.1), 60)
    pooled, _ = optimum("pooled", shares("samples"))
    assert pooled is not None
    assert np.abs(global_weight(sim) - pooled).max() > 0.02


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_the_servers_correction_is_the_mean_of_all_clients(name: str, weights: Weights) -> None:
    """Σ p_i c_i over all of them, whoever is sampled."""
    sim = quadratic_simulation(make_method(name), 3, fraction=0.34, lr=0.1, weights=weights)
    for _ in range(12):
        sim.step()
        mean = average(sim.states.get(range(CLIENTS))[WEIGHT], weights)
        torch.testing.assert_close(sim.server["correction"][WEIGHT].double(), mean, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_scaffolds_variate_is_the_mean_of_the_clipped_gradients_it_followed(engine: str) -> None:
    """Clipped is ∇F_i(y), of norms far above the bound here, and not ∇F_i(y) − c_i + c."""
    steps, lr, limit = 3, 0.1, 0.2
    method = make_method("scaffold", {"weights": "uniform"})
    sim = quadratic_simulation(method, steps, engine=engine, lr=lr, clip=limit, fraction=0.5)
    local, w, c, own = Reference(), global_weight(sim), 0.0, [np.zeros(DIM) for _ in range(CLIENTS)]
    assert all(np.linalg.norm(local.grad(i, w)) > limit for i in range(CLIENTS))
    for _ in range(4):
        ends, changes = [], []
        for i in sim.sample(sim.round):
            y, followed = w.copy(), []
            for _ in range(steps):
                g = local.grad(i, y)
                followed.append(g * min(1.0, limit / (np.linalg.norm(g) + 1e-6)))
                y = y - lr * (followed[-1] - own[i] + c)
            ends.append(y)
            changes.append(np.mean(followed, axis=0) - own[i])
            own[i] = np.mean(followed, axis=0)
        w, c = np.mean(ends, axis=0), c + np.sum(changes, axis=0) / CLIENTS
        sim.step()
        np.testing.assert_allclose(states(sim), own, atol=1e-5)
        np.testing.assert_allclose(global_weight(sim), w, atol=1e-5)


def test_scaffolds_first_round_is_fedavg() -> None:
    one = run(quadratic_simulation(make_method("scaffold"), 4, lr=0.1), 1)
    other = run(quadratic_simulation(make_method("fedavg"), 4, lr=0.1), 1)
    np.testing.assert_allclose(global_weight(one), global_weight(other), atol=1e-6)


def test_feddyns_client_gradient_is_that_of_its_solution() -> None:
    """With exact local solves g_i = ∇F_i(θ_i), the stationarity that aligns local and global optima."""
    from methods.quadratics import curvature

    H, c = curvature()
    sim = run(quadratic_simulation(make_method("feddyn", {"alpha": 1.0}), 60, lr=0.2), 5)
    before, g = global_weight(sim), sim.states.get(range(CLIENTS))[WEIGHT][:, 0].double()
    run(sim, 1)
    after = sim.states.get(range(CLIENTS))[WEIGHT][:, 0].double()
    w = torch.from_numpy(before)
    # Stationary point of F_i(θ) − ⟨g_i, θ⟩ + (α/2)‖θ − w‖² with α = 1.
    theta = torch.linalg.solve(H + torch.eye(len(w)), torch.einsum("kij,kj->ki", H, c) + g + w)
    torch.testing.assert_close(after, torch.einsum("kij,kj->ki", H, theta - c), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_mr_mtls_mean_is_the_mean_of_all_latest_models(weights: Weights) -> None:
    sim = quadratic_simulation(make_method("mr_mtl", {"lam": 2.0}), 3, fraction=0.34, weights=weights)
    for _ in range(8):
        sim.step()
        mean = average(sim.states.get(range(CLIENTS))[WEIGHT], weights)
        torch.testing.assert_close(sim.server[WEIGHT].double(), mean, atol=1e-5, rtol=1e-4)


def test_mr_mtl_without_pull_is_local_training() -> None:
    one = run(quadratic_simulation(make_method("mr_mtl", {"lam": 0.0}), 3, fraction=0.5), 6)
    other = run(quadratic_simulation("local", 3, fraction=0.5), 6)
    assert torch.equal(one.states.get(range(CLIENTS))[WEIGHT], other.states.get(range(CLIENTS))[WEIGHT])


def test_mr_mtl_and_fedclup_meet_at_full_participation() -> None:
    one = run(quadratic_simulation(make_method("mr_mtl", {"lam": 2.0}), 10), 60)
    other = run(quadratic_simulation(make_method("fedclup", {"lam": 2.0}), 10), 60)
    a, b = one.states.get(range(CLIENTS))[WEIGHT], other.states.get(range(CLIENTS))[WEIGHT]
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_sam_with_no_radius_is_fedavg() -> None:
    one = run(quadratic_simulation(make_method("fedsam", {"rho": 0.0}), 3), 4)
    other = run(quadratic_simulation(make_method("fedavg"), 3), 4)
    np.testing.assert_array_equal(global_weight(one), global_weight(other))
