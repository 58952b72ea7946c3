"""pFedGraph: its graph in numbers and at the ends, and which way its term pulls."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from methods.reductions import in_run, local
from methods.settings import Card, Row
from methods.small import NEWCOMER, assert_close, personal, shared, simulation
from tailorfl.core.method import make_method
from tailorfl.methods.mixtures import on_simplex
from tailorfl.methods.pfedgraph import turn
from tailorfl.testing.contract import twice, whole

CONTRACTS = {
    "pfedgraph": Row(
        Card(twice, whole, whole, True, False),
        {"lam": 0.1},
        same=(
            in_run(local(line="one round"), rounds=1),
            in_run(local(line="one client a round", lam=0.0), fraction=0.2),
        ),
    ),
}


P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.05, 0.8, 30.0])
def test_a_row_is_the_best_point_of_a_fine_grid_of_the_simplex(alpha: float) -> None:
    """min −Σ a C + α‖a − p‖², by trying all a in steps of 1/200."""
    cosine = torch.tensor([0.7, -0.2, 0.4], dtype=torch.float64)
    a = on_simplex(P + cosine / (2 * alpha)).numpy()
    steps = 200
    grid = np.array([(i, j, steps - i - j) for i, j in product(range(steps + 1), repeat=2) if i + j <= steps])

    def cost(
        rows: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        found: np.ndarray[tuple[int], np.dtype[np.float64]]
        found = -rows @ cosine.numpy() + alpha * ((rows - P.numpy()) ** 2).sum(1)
        return found

    best = grid[cost(grid / steps).argmin()] / steps
    assert np.abs(best - a).max() < 1.5 / steps
    assert cost(a[None])[0] <= cost(grid / steps).min() + 1e-12


def test_the_pull_is_the_gradient_of_the_cosine_and_orthogonal_to_the_model() -> None:
    rng = torch.Generator().manual_seed(0)
    w, g = (torch.randn(7, generator=rng, dtype=torch.float64) for _ in range(2))
    free = w.clone().requires_grad_()
    (slope,) = torch.autograd.grad(g @ free / free.norm(), free)
    found = turn(TensorDict({"a": w}), TensorDict({"a": g}))["a"]
    torch.testing.assert_close(found, slope)
    assert float(found @ w) == pytest.approx(0.0, abs=1e-12)


def test_a_graph_held_at_the_weights_sends_everyone_fedavgs_model() -> None:
    sim = simulation(make_method("pfedgraph", {"lam": 0.0, "alpha": 1e9, "weights": "samples"}), rounds=3)
    plain = simulation(make_method("fedavg", {"weights": "samples"}), rounds=3)
    for name, tensor in shared(plain).items():
        sent = sim.server["models"][name]
        torch.testing.assert_close(sent, tensor.expand_as(sent), atol=1e-5, rtol=1e-5)


def test_a_graph_of_cosines_alone_leaves_every_client_to_itself() -> None:
    """Where no cosine is above 0.9, the largest of a row is that with itself."""
    sim = simulation(make_method("pfedgraph", {"lam": 0.0, "alpha": 1e-9}), rounds=2)
    assert_close(personal(sim), personal(simulation("local", rounds=2)), atol=1e-6)


def test_a_newcomer_is_sent_the_mean_of_the_last_cohort() -> None:
    sim = simulation("pfedgraph", fraction=0.4, rounds=2)
    trained = personal(sim, sim.sample(1))
    ((_, found),) = sim.newcomer_models((NEWCOMER,), 0)
    assert_close({n: t[0] for n, t in found.items()}, {n: t.mean(0) for n, t in trained.items()}, atol=1e-6)


def test_the_approximate_variant_sends_a_model_alone() -> None:
    both, one = (
        simulation(make_method("pfedgraph", {"variant": v}), rounds=2) for v in ("exact", "approximate")
    )
    assert both.traffic.down_unicast == 2 * one.traffic.down_unicast
    assert one.traffic.down_unicast == one.traffic.up
