"""MOON: where its contrast has no gradient, and what it falls to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from methods.reductions import fedavg, in_run
from methods.settings import Card, Row, make
from methods.small import (
    CLASSES,
    TRAIN,
    assert_close,
    assert_same,
    federation,
    model,
    shared,
    simulation,
)
from tailorfl.core.client import Client
from tailorfl.engines.make import make_engine
from tailorfl.errors import ModelError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.methods.moon import MOON, project
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training.cohort import TrainConfig

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


ENGINES = ["sequential", "vectorized"]
ONE_STEP = replace(TRAIN, batch_size=0)


def replies(sim: Simulation, method: MOON, trained: float, **shift: float) -> dict[str, torch.Tensor]:
    """What all clients send from the run's w, with θ^(1) = w + the shift of parameters by name."""
    w = sim.server["w"]
    before = TensorDict({n: t + shift.get(n.replace(".", "_"), 0.0) for n, t in w.items()})
    state = TensorDict({"1": before, "trained": torch.tensor(trained)}).expand(5).clone()

    def local(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict]:
        return (method.local(client, state, received)[1],)

    (found,) = sim.run(range(5), state, w, local)
    return dict(found.items())


def started(train: TrainConfig, engine: str) -> tuple[Simulation, dict[str, torch.Tensor]]:
    """A run after one round of FedAvg, and what FedAvg's clients send next."""
    sim = simulation("fedavg", engine=engine, rounds=1, train=train)
    (plain,) = sim.run(range(5), sim.states.get(range(5)), sim.server["w"], lambda c, s, r: (c.fit(r),))
    return sim, dict(plain.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_of_a_previous_model_equal_to_the_received_one_the_step_is_fedavgs(engine: str) -> None:
    """Both cosines are the same function of θ: −log ½ whatever θ, so nothing pulls in any step."""
    sim, plain = started(TRAIN, engine)
    assert_close(replies(sim, make("moon", mu=5.0), 1.0), plain, atol=1e-6)
    assert_close(replies(sim, make("moon", mu=5.0), 0.0, fc1_bias=0.5), plain, atol=1e-6)
    moved = replies(sim, make("moon", mu=5.0), 1.0, fc1_bias=0.5)
    assert any(not torch.allclose(t, plain[n], atol=1e-4) for n, t in moved.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_pull_falls_with_the_temperature(engine: str) -> None:
    sim, plain = started(ONE_STEP, engine)
    gaps = []
    for tau in (1.0, 100.0, 10000.0):
        found = replies(sim, make("moon", mu=5.0, tau=tau), 1.0, fc1_bias=0.5)
        gaps.append(max(float((t - plain[n]).abs().max()) for n, t in found.items()))
    assert gaps[0] > 50 * gaps[1] > 2500 * gaps[2] * 0.5


def test_models_move_up_by_one() -> None:
    """After a round the first is what was sent, and the second what was the first."""
    sim = simulation(make("moon", history=2), rounds=2)
    before = sim.states.get(range(5))
    received = sim.method.broadcast(sim.server, tuple(range(5)))
    state, reply = sim.run(range(5), before, received, sim.method.local)
    for name in sim.model.parameters:
        assert torch.equal(state["1", name], reply[name])
        assert torch.equal(state["2", name], before["1", name])
    assert torch.equal(state["trained"], before["trained"] + 1)


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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{"mu": 0.0}, {"history": 0}])
def test_without_contrast_it_is_fedavg_on_the_projected_network(
    engine: str, options: dict[str, float]
) -> None:
    module = model("mlp").module

    def factory() -> nn.Module:
        fresh = build("mlp", (1, 8, 8), CLASSES, hidden=(8,), activation="tanh")
        project(fresh, 5)
        return fresh

    other = Simulation(make("fedavg"), federation(), Model(factory), TRAIN, engine=make_engine(engine))
    sim = simulation(make("moon", projection=5, **options), engine=engine)
    for _ in range(2):
        sim.step()
        other.step()
    assert_same(shared(sim), shared(other))
    assert [p for p, _ in module.named_parameters()] == ["fc1.weight", "fc1.bias", "head.weight", "head.bias"]


def test_engines_agree_on_a_projected_network_and_evaluate_it() -> None:
    found = []
    for engine in ENGINES:
        sim = simulation(make("moon", projection=5, mu=2.0), "batch_norm", engine, rounds=3)
        found.append((shared(sim), [r["loss"] for r in evaluate(sim, Protocol(sets=("local", "global")))]))
    assert_close(found[0][0], found[1][0])
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)


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
        with pytest.raises(ModelError, match="stands before a linear head inside a network"):
            project(module, 4)
