"""MOON: where its contrast has no gradient, and what it falls to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from methods.settings import make
from methods.small import TRAIN, assert_close, simulation
from tailorfl.core.client import Client
from tailorfl.methods.moon import MOON
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

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
