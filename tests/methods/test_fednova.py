"""FedNova: how much steps weigh, its server's step in numbers, and the bias it takes away."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from methods.reductions import SGD, fedavg, in_run
from methods.settings import Card, Limit, Row, and_one
from methods.small import TRAIN, assert_close, federation, shared, simulation
from tailorfl.core.messages import Replies
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.make import make_engine
from tailorfl.errors import ConfigError
from tailorfl.methods.fednova import accumulated
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training.cohort import TrainConfig

CONTRACTS = {
    "fednova": Row(
        Card(whole, and_one, whole, False, True),
        limit=Limit("pooled"),
        same=(
            # With batch norm a client of one sample takes no step.
            replace(
                fedavg("equal steps", exact=False, said=True),
                train={"steps": 3, "epochs": None},
                models=("mlp", "dropout"),
                other_train=SGD,
            ),
            in_run(replace(fedavg("one client a round", exact=False), other_train=SGD), fraction=0.2),
        ),
    ),
}


def test_effective_steps_in_numbers() -> None:
    three = torch.tensor(3.0, dtype=torch.float64)
    assert float(accumulated(three, 0.9, 0.0)) == pytest.approx(5.61)
    assert float(accumulated(three, 0.0, 0.0)) == 3.0
    assert float(accumulated(three, 0.0, 0.5)) == pytest.approx(1 + 0.5 + 0.25)
    assert float(accumulated(three, 0.0, 1e-6)) == pytest.approx(3.0, abs=1e-5)
    assert float(accumulated(torch.tensor(0.0), 0.9, 0.0)) == 0.0


def test_the_servers_step_in_numbers() -> None:
    """τ = (1, 3), p = (½, ½), w = 0, θ = (−1, −6): τ_eff = 2 and w = −3, where FedAvg goes to −3.5."""
    sim = two(1, 1, "fednova")
    (name,) = sim.init.keys()
    stack = TensorDict(
        {
            "each": TensorDict({name: torch.tensor([[[1.0]], [[2.0]]])}, batch_size=[2]),
            "steps": torch.tensor([1.0, 3.0]),
        },
        batch_size=[2],
    )
    replies = Replies(stack, (0, 1), np.ones(2, dtype=np.int64), "uniform", sim.context)
    server = TensorDict({"w": sim.init * 0.0, "optimizer": sim.server["optimizer"]})
    assert float(sim.method.aggregate(server, replies)["w"][name]) == pytest.approx(-3.0)


def two(first: int, second: int, method: str, lr: float = 0.01) -> Simulation:
    """Clients of ½(w − 1)² and ½(w + 1)² with so many equal samples, one a batch; equal weights."""
    y = torch.cat([torch.ones(first, 1), -torch.ones(second, 1)])
    rows = (np.arange(first), np.arange(first, first + second))
    source = Source("two", torch.ones(len(y), 1), y, "regression", 1)
    data = Federation(source, rows, rows, rows, ("a", "b"), 2)
    options = {"weights": "uniform"}
    return Simulation(
        make_method(method, options),
        data,
        Model(lambda: build("linear", (1,), 1)),
        TrainConfig(batch_size=1, epochs=1, lr=lr),
        engine=make_engine("vectorized", None),
    )


def test_more_steps_do_not_count_more() -> None:
    """One step against nine: of small steps FedAvg ends at (1 − 9)/10, FedNova at the optimum 0."""
    ends = {}
    for method in ("fedavg", "fednova"):
        sim = two(1, 9, method)
        for _ in range(300):
            sim.step()
        (value,) = shared(sim).values()
        ends[method] = float(value)
    assert ends["fednova"] == pytest.approx(0.0, abs=0.05)
    assert ends["fedavg"] == pytest.approx(-0.8, abs=0.05)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_of_a_single_client_it_is_its_own_training(momentum: float) -> None:
    train = TrainConfig(epochs=2, batch_size=4, lr=0.05, momentum=momentum)
    mine, alone = (
        simulation(make_method(name, {}), train=train, data=federation((11,)), rounds=3)
        for name in ("fednova", "centralized")
    )
    assert_close(shared(mine), shared(alone), atol=1e-6)


def test_momentum_and_a_proximal_term_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.momentum = 0.5 and mu = 0.1; set one of them to 0"):
        simulation(make_method("fednova", {"mu": 0.1}), train=TRAIN)
