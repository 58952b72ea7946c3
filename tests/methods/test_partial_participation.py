"""Partial participation.

Where the updates are linear and sampling uniform, the mean of the iterates is the closed form.

The expectation of a linear round is the round of full participation, so the iterates wander around the
same optimum. Their average is compared with it in units of its own standard error (batch means), and
must be far from what other weights give.
"""

from __future__ import annotations

import numpy as np
import pytest

from methods.quadratics import (
    CLIENTS,
    LR,
    Floats,
    curvature,
    global_weight,
    limit_simulation,
    optimum,
    personal_weights,
    quadratic_simulation,
    shares,
)
from methods.settings import make, one_of, with_limit
from tailorfl.core.method import make_method
from tailorfl.data.synthetic import pooled_optimum
from tailorfl.rounds.simulation import Simulation

BLOCKS, BURN = 20, 16
TOLERANCE = 5.0
"""Standard errors; about 20 numbers are compared a method, with 19 degrees of freedom each."""


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
        parts = [w] * sim.method.has_global + (list(v) if personal and v is not None else [])
        return np.array(parts)

    right, wrong = ("samples", "uniform") if sim.method.pooled else ("uniform", "samples")
    assert distance(found, error, targets(right)) < TOLERANCE
    if limit.kind != "local":
        assert distance(found, error, targets(wrong)) > 2 * TOLERANCE


@pytest.mark.slow
def test_more_local_steps_bias_fedavg_under_partial_participation_too() -> None:
    """The average goes to the optimum of (I − (I−ηH_i)^K), far from the pooled one in standard errors."""
    K = 5
    sim = quadratic_simulation(make_method("fedavg", {"weights": "uniform"}), K, fraction=0.84)
    found, error = tail(sim, 160, personal=False)
    H, c = (t.numpy() for t in curvature())
    moved = np.eye(3) - np.linalg.matrix_power(np.eye(3) - LR * H, K)
    biased = np.linalg.solve(moved.mean(0), np.einsum("kij,kj->i", moved, c) / CLIENTS)
    pooled = pooled_optimum(*curvature(), shares("uniform")).numpy()
    assert distance(found[0], error[0], biased) < TOLERANCE
    assert distance(found[0], error[0], pooled) > 2 * TOLERANCE


def test_weighting_sampled_clients_by_size_is_not_the_weighted_optimum() -> None:
    """n_i / Σ_S n is not linear in the sample.

    With few sampled clients, large clients count less than p_i. What FedAvg then averages to lies
    between the two optima; full participation (closed forms) has no such bias.
    """
    sim = quadratic_simulation(make("fedavg"), 1, fraction=0.34)
    found, error = tail(sim, 160, personal=False)
    for weights in ("samples", "uniform"):
        target = pooled_optimum(*curvature(), shares(weights)).numpy()
        assert distance(found[0], error[0], target) > TOLERANCE, weights
