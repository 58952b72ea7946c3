"""q-FedAvg and AFL: their steps in numbers, and where they go at the ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from methods.quadratics import one_weight
from methods.reductions import PLAIN, fedavg
from methods.settings import Card, Limit, Row, and_one
from methods.small import TRAIN, assert_close, shared, simulation
from tailorfl.core.method import make_method
from tailorfl.methods.mixtures import on_simplex
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole

CONTRACTS = {
    # Beside a change of the model a number: its curvature, a loss, the steps taken.
    "qfedavg": Row(
        Card(whole, and_one, whole, False, True),
        {"q": 0.5},
        Limit("pooled", 1, {"q": 0.0}),
        same=(replace(fedavg("q = 0", exact=False, q=0.0, said=True), other_train=PLAIN),),
    ),
    "afl": Row(
        Card(whole, and_one, whole, False, True),
        unweighted=True,
        proved="its mixture does not move, or to the worst client; a saddle: test_fairness.py",
        never="one plain step a round, and the model that is used is the mean over rounds",
    ),
}


FULL = replace(TRAIN, batch_size=0, momentum=0.0, weight_decay=0.0)


def weight(sim: Simulation) -> float:
    (value,) = shared(sim).values()
    return float(value)


def test_of_a_large_q_only_the_largest_loss_matters() -> None:
    """Losses of ½·4 and ½·16 weigh 1 to 4⁴⁰: the step goes to the second client alone."""
    both, alone = (
        one_weight([2.0, -4.0], "qfedavg", lr=0.1, q=40.0),
        one_weight([-4.0], "qfedavg", lr=0.1, q=40.0),
    )
    for sim in (both, alone):
        (name,) = sim.server.keys()
        sim.server = TensorDict({name: torch.zeros(1, 1)})
        sim.step()
    assert weight(both) == pytest.approx(weight(alone), rel=1e-5)
    assert weight(alone) < 0


def test_without_a_step_of_the_mixture_the_iterates_are_fedsgds_and_w_is_their_mean() -> None:
    sim = simulation(make_method("afl", {"gamma": 0.0}), train=FULL)
    plain = simulation(make_method("fedavg", {"weights": "uniform"}), train=FULL)
    iterates = []
    for _ in range(4):
        sim.step()
        plain.step()
        iterates.append({n: t.clone() for n, t in sim.server["w"].items()})
        assert_close(iterates[-1], shared(plain), atol=1e-6)
        mean = {n: torch.stack([w[n] for w in iterates]).mean(0) for n in iterates[0]}
        assert_close(shared(sim), mean, atol=1e-6)


def test_after_a_large_step_the_mixture_is_the_worst_client() -> None:
    sim = simulation(make_method("afl", {"gamma": 1e6}), rounds=1, train=FULL)
    before = simulation("local", train=FULL)
    (losses,) = before.run(
        range(5), before.states.get(range(5)), before.init, lambda c, s, r: (TensorDict({"l": c.loss(r)}),)
    )
    assert int(sim.server["mixture"].argmax()) == int(losses["l"].argmax())
    assert float(sim.server["mixture"].max()) == 1.0


def test_two_clients_with_opposite_optima_are_met_in_the_middle() -> None:
    """A saddle: λ → (½, ½) and w̄ → 0, from a start that is near the first client's optimum."""
    sim = one_weight([1.0, -1.0], "afl", lr=0.2, gamma=0.2)
    sim.server["w"] = TensorDict({n: torch.full_like(t, 0.8) for n, t in sim.server["w"].items()})
    for _ in range(300):
        sim.step()
    assert weight(sim) == pytest.approx(0.0, abs=0.02)
    np.testing.assert_allclose(sim.server["mixture"], [0.5, 0.5], atol=0.05)


def test_the_projection_is_the_nearest_point_of_the_simplex() -> None:
    rng = torch.Generator().manual_seed(1)
    for _ in range(20):
        point = torch.randn(5, generator=rng, dtype=torch.float64)
        found = on_simplex(point)
        assert float(found.sum()) == pytest.approx(1.0)
        assert bool((found >= 0).all())
        # Nearest: no way from it to a corner comes nearer to the point.
        for corner in torch.eye(5, dtype=torch.float64):
            assert float((point - found) @ (corner - found)) <= 1e-12
