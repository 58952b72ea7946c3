"""Clusters of clients: IFCA, CFL, HypCluster, and FedEM."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from methods.quadratics import one_weight
from methods.reductions import FULL_STEP, PLAIN, REFERENCE, nothing_personal, unnormed
from methods.settings import Card, Row, make
from methods.small import (
    SIZES,
    TRAIN,
    assert_close,
    assert_same,
    federation,
    personal,
    simulation,
)
from tailorfl.core.messages import PerClient
from tailorfl.core.method import make_method
from tailorfl.methods.cfl import CFL
from tailorfl.methods.fedem import SHARES, Mixture
from tailorfl.models.functional import Model
from tailorfl.testing.contract import twice, whole

CONTRACTS = {
    "ifca": Row(
        Card(lambda s: 2 * s.d, whole, whole, True, False),
        {"clusters": 2},
        chooses=True,
        same=(
            nothing_personal("T01", clusters=1),
            nothing_personal("T01", clusters=1, warm_rounds=2),
            unnormed(
                nothing_personal("gradients", clusters=1, send="gradients"),
                exact=False,
                other_train={**FULL_STEP, **PLAIN},
            ),
        ),
    ),
    "cfl": Row(
        Card(whole, whole, whole, True, False),
        {"eps1": 1e3, "eps2": 0.0, "first_split": 0},
        chooses=True,
        same=(
            nothing_personal("before a split", first_split=20),
            replace(nothing_personal("two clients", first_split=0), data={"sizes": (7, 9)}),
        ),
    ),
    # Two networks travel, and are one model that trains; π is no parameter.
    "fedem": Row(
        Card(twice, twice, whole, True, False),
        {"components": 2},
        chooses=True,
        over_all=True,
        remarks=(
            ({"components": 1, "normalise": "cohort"}, "logarithms of probabilities", "test_clusters.py"),
        ),
        proved=REFERENCE,
    ),
}


EAGER = {"eps1": 1e3, "eps2": 0.0, "first_split": 0}


@pytest.mark.parametrize(
    ("name", "options"), [("hypcluster", {}), ("ifca", {"send": "models"}), ("ifca", {"send": "gradients"})]
)
def test_a_cluster_nobody_chose_stays_as_it_is(name: str, options: dict[str, str]) -> None:
    sim = one_weight([1.0, 2.0], name, clusters=2, **options)
    for cluster, start in (("0", 3.0), ("1", -3.0)):
        sim.server[cluster]["head.weight"] = torch.tensor([[start]])
    sim.step()
    assert sim.server["1"]["head.weight"].item() == -3.0
    assert sim.server["0"]["head.weight"].item() != 3.0


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


def test_a_cluster_that_was_not_sampled_whole_does_not_split() -> None:
    sim = simulation(make_method("cfl", EAGER), fraction=0.6, rounds=4)
    assert set(sim.server["member"].tolist()) == {0}


def test_a_cluster_goes_on_while_no_clients_update_is_long() -> None:
    """Lengths are of each client's update, not of a coordinate over clients."""
    updates = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    weights = torch.ones(4, dtype=torch.float64)
    for eps2, stands in ((1.2, False), (0.9, True)):
        method = make_method("cfl", {"eps1": 0.1, "eps2": eps2})
        assert isinstance(method, CFL)
        assert method.stands(updates, weights) is stands


@pytest.mark.parametrize(("gamma", "apart"), [(0.7, True), (0.72, False)])
def test_updates_at_right_angles_are_the_root_of_one_half_apart(gamma: float, apart: bool) -> None:
    method = make_method("cfl", {"gamma": gamma})
    assert isinstance(method, CFL)
    assert method.parts(torch.eye(2, dtype=torch.float64)).tolist() == [False, apart]


def networks(state: dict[str, Tensor], m: int) -> dict[str, Tensor]:
    """The m-th network of a mixture, by its own names."""
    start = f"networks.{m}."
    return {n.removeprefix(start): t for n, t in state.items() if n.startswith(start)}


@pytest.mark.parametrize(
    ("kind", "engine", "fraction", "normalise"),
    [("dropout", "sequential", 1.0, "all"), ("batch_norm", "vectorized", 0.6, "cohort")],
)
def test_one_network_is_fedavg(kind: str, engine: str, fraction: float, normalise: str) -> None:
    """Also where few take part, if the cohort's weights sum to 1; its answers are logarithms of probabilities."""
    ours, theirs = (
        simulation(method, kind, engine=engine, fraction=fraction, rounds=3)
        for method in (make("fedem", components=1, normalise=normalise), "fedavg")
    )
    assert_close(networks(dict(ours.server.items()), 0), dict(theirs.server["w"].items()))
    x = federation().source.x[:6]
    outputs = ours.model({n: t[0] for n, t in personal(ours).items()}, x)
    logits = theirs.model(dict(theirs.server["w"].items()), x)
    torch.testing.assert_close(outputs, logits.log_softmax(1), atol=1e-5, rtol=1e-4)


def test_networks_are_drawn_one_after_another_and_frozen_ones_stay_frozen() -> None:
    base = Model(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), trainable=["1.*"])
    joined = base.several(3, Mixture)
    state = joined.init(7)
    names = tuple(f"networks.{m}.1.{n}" for m in range(3) for n in ("weight", "bias"))
    assert set(state.keys()) == {SHARES, *names}
    assert_same(networks(dict(state.items()), 0), dict(base.init(7).items()))
    assert not torch.equal(state["networks.0.1.weight"], state["networks.1.1.weight"])
    assert (joined.parameters, joined.buffers) == (names, (SHARES,))
