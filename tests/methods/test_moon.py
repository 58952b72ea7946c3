"""MOON: where its contrast has no gradient, and what it falls to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from methods.reductions import fedavg, in_run
from methods.settings import Card, Row, make
from methods.small import CLASSES, TRAIN, after, assert_same, federation, shared, simulation
from tailorfl.engines.make import make_engine
from tailorfl.errors import ModelError
from tailorfl.methods.moon import project
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole

CONTRACTS = {
    "moon": Row(
        Card(whole, whole, whole, False, True),
        {"mu": 0.5, "tau": 1.0},
        same=(
            fedavg("μ = 0", mu=0.0, said=True),
            fedavg("Q = 0", history=0, said=True),
            in_run(fedavg("one round"), rounds=1),
        ),
    ),
}


def written_down() -> nn.Sequential:
    """The MLP of these tests with MOON's projection: fc1, tanh; then 8 → 8, ReLU, → 5, → classes."""
    fc1, inner, outer, head = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 5), nn.Linear(5, CLASSES)
    return nn.Sequential(nn.Flatten(), fc1, nn.Tanh(), inner, nn.ReLU(), outer, head)


def test_the_projection_stands_before_the_head_and_leaves_the_body_as_it_was() -> None:
    sim = simulation(make("moon", projection=5))
    init, before = dict(sim.init.items()), dict(simulation("moon").init.items())
    assert_same(
        {n: t for n, t in init.items() if n.startswith("fc1")},
        {n: before[n] for n in ("fc1.weight", "fc1.bias")},
    )
    assert sim.split.trainable == sim.model.parameters
    assert sim.model.split("head").personal == ("head.head.weight", "head.head.bias")
    by_hand = written_down()
    by_hand.load_state_dict(dict(zip(by_hand.state_dict(), init.values(), strict=True)))
    x = sim.federation.source.x[:7]
    outputs, z = sim.model.outputs_and_features(sim.init, x)
    with torch.no_grad():
        torch.testing.assert_close(outputs, by_hand(x))
        torch.testing.assert_close(z, by_hand[:6](x))


@pytest.mark.parametrize("options", [{"mu": 0.0}, {"history": 0}])
def test_without_contrast_it_is_fedavg_on_the_projected_network(options: dict[str, float]) -> None:
    def factory() -> nn.Module:
        network = build("mlp", (1, 8, 8), CLASSES, hidden=(8,), activation="tanh")
        project(network, 5)
        return network

    other = Simulation(make("fedavg"), federation(), Model(factory), TRAIN, engine=make_engine("sequential"))
    sim = simulation(make("moon", projection=5, **options), rounds=2)
    assert_same(shared(sim), shared(after(other, 2)))


def test_frozen_layers_stay_frozen_under_a_projection() -> None:
    base = Model(lambda: build("mlp", (1, 8, 8), CLASSES, hidden=(8, 6)), trainable=["fc2.*"])
    sim = Simulation(make("moon", projection=5), federation(), base, TRAIN)
    assert set(sim.model.frozen) == {"fc1.weight", "fc1.bias"}
    torch.testing.assert_close(
        sim.model.module.get_parameter("fc1.weight"), base.module.get_parameter("fc1.weight"), rtol=0, atol=0
    )
    sim.step()


def test_a_projection_needs_a_linear_head_inside_a_network() -> None:
    for module in (nn.Linear(3, 2), nn.Sequential(nn.Conv2d(1, 2, 3))):
        with pytest.raises(ModelError, match="linear head"):
            project(module, 4)
