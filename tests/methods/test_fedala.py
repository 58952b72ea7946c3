"""FedALA: what its mixture learns, in closed form, and how long it learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from methods.reductions import fedavg, in_run, local, nothing_personal
from methods.settings import Card, Row
from methods.small import SIZES, assert_same, simulation
from tailorfl.core.client import Client
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.make import make_engine
from tailorfl.methods.fedala import FedALA
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training.cohort import TrainConfig

CONTRACTS = {
    "fedala": Row(
        Card(whole, whole, whole, True, True),
        {"first_passes": 2},
        still={"eta": 0.0},
        same=(
            fedavg("η_W = 0", eta=0.0, said=True),
            nothing_personal("η_W = 0", eta=0.0),
            in_run(fedavg("one round"), rounds=1),
            replace(
                local(line="W = 0", said=False, mixed_part="all", start=0.0, eta=0.0),
                models=("mlp", "dropout"),
            ),
        ),
    ),
}


ENGINES = ["sequential", "vectorized"]


def fedala(**options: Any) -> FedALA:
    method = make_method("fedala", options)
    assert isinstance(method, FedALA)
    return method


def quarter() -> Federation:
    """One client, F(θ) = ½(θ − ¼)² of one weight."""
    x = torch.ones(3, 1)
    rows = tuple(np.array([k]) for k in range(3))
    source = Source("quarter", x, x / 4, "regression", 1)
    return Federation(source, rows[:1], rows[1:2], rows[2:], ("only",), 1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("passes", "rate", "wanted"),
    [(1, 1.0, 0.25), (4, 1.0, 0.25), (1, 0.5, 0.625), (1, 2.0, 0.0), (2, 2.0, 0.5)],
)
def test_the_mixture_of_one_weight_in_closed_form(
    engine: str, passes: int, rate: float, wanted: float
) -> None:
    """θ_i = 0, w = 1, W = 1: ∇F(θ̂)·(w − θ_i) = W − ¼, so W = 1 − ¾η clipped to [0, 1]; ¼ stands still."""
    method = fedala(eta=rate, first_passes=passes)
    model = Model(lambda: build("linear", (1,), 1))
    sim = Simulation(method, quarter(), model, TrainConfig(batch_size=0), engine=make_engine(engine, None))
    (name,) = model.parameters
    w, theta = torch.ones(1, 1), torch.zeros(1, 1, 1)
    parts = {"theta": TensorDict({name: theta}), "mix": TensorDict({name: theta + 1}), "met": torch.zeros(1)}
    received = TensorDict({name: w})
    (mix,) = sim.run(
        (0,), TensorDict(parts, batch_size=[1]), received, lambda c, s, r: (method.learn(c, s, r),)
    )
    assert float(mix[name]) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_client_learns_as_long_as_it_is_new(engine: str) -> None:
    """Batches of 4 of 15, 1, 7, 9 and 3 samples: ⌈0.5 K⌉ steps, six times that for the new, none where w = θ_i."""
    sim = simulation("local", engine=engine)
    method = fedala(share=0.5, first_passes=6)
    other = sim.init.apply(lambda t: t + 0.1)
    state = sim.method.client_state(sim.context).expand(5).clone()
    tail = {n: state[n] for n in sim.model.split("head").personal}
    met = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    theta = {n: torch.cat([t[:4], other[n][None]]) for n, t in tail.items()}
    parts = {
        "theta": TensorDict(theta),
        "mix": TensorDict({n: t * 0 + 1 for n, t in tail.items()}),
        "met": met,
    }

    def learn(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict]:
        mix = method.learn(client, state, received)
        return (TensorDict({"mix": mix, "gradients": client.gradients}),)

    (found,) = sim.run(range(5), TensorDict(parts, batch_size=[5]), other, learn)
    # Steps 6·2, 1, 6·1, 2 and 0; the first batches of passes of 4, 1, 2, 3 and 1 batches.
    steps = [12, 1, 6, 2, 0]
    for k, size in enumerate(SIZES):
        per_pass = [min(4, size - start) for start in range(0, size, 4)]
        wanted = sum((per_pass * 12)[: steps[k]])
        assert float(found["gradients"][k]) == wanted
    assert_same(
        {n: t[4] for n, t in found["mix"].items()}, {n: torch.ones_like(t[4]) for n, t in tail.items()}
    )
