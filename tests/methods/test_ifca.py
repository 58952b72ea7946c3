"""IFCA: which model moves how far, and who begins with which."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from methods.quadratics import one_weight
from methods.reductions import FULL_STEP, PLAIN, Same
from methods.settings import Card, Row, make
from methods.small import SIZES, TRAIN, simulation
from tailorfl.core.messages import PerClient
from tailorfl.testing.contract import whole

CONTRACTS = {
    "ifca": Row(
        Card(lambda s: 2 * s.d, whole, whole, True, False),
        {"clusters": 2},
        chooses=True,
        same=(
            Same("T01", {"clusters": 1}, "fedavg", {}, "personal", "global", said=True),
            Same("T01", {"clusters": 1, "warm_rounds": 2}, "fedavg", {}, "personal", "global", said=True),
            Same(
                "gradients",
                {"clusters": 1, "send": "gradients"},
                "fedavg",
                {},
                "personal",
                "global",
                exact=False,
                said=True,
                other_train={**FULL_STEP, **PLAIN},
                models=("mlp", "dropout"),
            ),
        ),
    ),
}


STARTS = ([3.0], [-3.0])


def test_k_of_m_members_move_a_model_by_k_of_m_as_far_with_gradients() -> None:
    """Clients at 1, 2 and −1, models at 3 and −3: means of members' gradients are 1.5 and −2, of 2/3 and 1/3."""
    moved = {}
    for send in ("models", "gradients"):
        sim = one_weight([1.0, 2.0, -1.0], "ifca", clusters=2, send=send, weights="uniform")
        for j, start in enumerate(STARTS):
            sim.server[str(j)]["head.weight"] = torch.tensor([start])
        sim.step()
        moved[send] = [float(sim.server[str(j)]["head.weight"]) - start[0] for j, start in enumerate(STARTS)]
    lr = 0.2
    np.testing.assert_allclose(moved["models"], [-1.5 * lr, 2 * lr], atol=1e-6)
    np.testing.assert_allclose(moved["gradients"], [-1.5 * lr * 2 / 3, 2 * lr / 3], atol=1e-6)


def test_a_cluster_nobody_chose_stays_as_it_is() -> None:
    for send in ("models", "gradients"):
        sim = one_weight([1.0, 2.0], "ifca", clusters=2, send=send)
        for j, start in enumerate(STARTS):
            sim.server[str(j)]["head.weight"] = torch.tensor([start])
        sim.step()
        assert torch.equal(sim.server["1"]["head.weight"], torch.tensor([STARTS[1]]))


def test_warm_rounds_have_equal_shares_one_start_and_one_model_down() -> None:
    sim = simulation(make("ifca", clusters=2, warm_rounds=2), train=replace(TRAIN, lr=0.1))
    counts = sim.server["member"].bincount().tolist()
    assert sorted(counts) == [len(SIZES) // 2, (len(SIZES) + 1) // 2]
    assert all(torch.equal(t, sim.server["1"][n]) for n, t in sim.server["0"].items())
    scalars = sim.model.scalars
    down = [sim.step().traffic.down_unicast for _ in range(3)]
    assert down == [len(SIZES) * scalars, len(SIZES) * scalars, 2 * len(SIZES) * scalars]


def test_who_comes_late_chooses_among_all_models_in_warm_rounds_too() -> None:
    sim = simulation(make("ifca", clusters=3, warm_rounds=5), rounds=1)
    assert isinstance(sim.method.broadcast(sim.server, (0,)), PerClient)
    late = sim.method.welcome(sim.server, (len(SIZES),))
    assert isinstance(late, type(sim.server))
    assert sorted(late.keys()) == ["0", "1", "2"]
