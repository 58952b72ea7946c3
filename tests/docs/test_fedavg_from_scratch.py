"""The tutorial's plain loop and the library are the same FedAvg: same cohorts, same batches, same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from blocks import ROOT, blocks

from tailorfl.core.method import make_method
from tailorfl.data.build import build as build_federation
from tailorfl.engines.choice import make_engine
from tailorfl.models.functional import Model
from tailorfl.models.registry import build as build_module
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.keys import derive
from tailorfl.training.plan import make_plan

ROUNDS, BATCH, LR, SEED = 4, 8, 0.1, 3


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_plain_loop_equals_the_library(script: Callable[[str], ModuleType], name: str, engine: str) -> None:
    tutorial = script("fedavg_from_scratch")
    federation = build_federation("digits", clients=6, samples=400, seed=SEED)
    source = federation.source
    model = Model(lambda: build_module(name, source.input_shape, source.outputs))
    train = TrainConfig(epochs=2, batch_size=BATCH, lr=LR)
    options = {"engine": make_engine(engine), "seed": SEED, "fraction": 0.5}
    sim = Simulation(make_method("fedavg"), federation, model, train, **options)
    start = copy.deepcopy(model.module)
    start.load_state_dict(dict(sim.init.items()))

    def batches(client: int, round: int) -> list[torch.Tensor]:
        """Positions of each batch's samples in the client's own data, in the library's order."""
        key = derive(SEED, "client", round, "train", client).reshape(1)
        own = torch.arange(len(federation.train[client])).numpy()
        plan = make_plan([own], key, BATCH, epochs=2)
        return [torch.from_numpy(plan.rows[0, s, :n]) for s, n in enumerate(plan.count[0])]

    clients = [
        (source.take(rows), source.targets(rows)) for rows in map(torch.from_numpy, federation.train[:6])
    ]
    found = tutorial.fedavg(start, clients, sim.sample, batches, ROUNDS, LR)
    for _ in range(ROUNDS):
        sim.step()
    ours = sim.global_model()
    assert ours is not None
    assert any((t - sim.init[n]).abs().max() > 0.01 for n, t in ours.items())
    for n, tensor in found.state_dict().items():
        torch.testing.assert_close(ours[n], tensor, atol=2e-6, rtol=1e-5)


def test_an_average_of_unequal_clients_is_weighted(script: Callable[[str], ModuleType]) -> None:
    tutorial = script("fedavg_from_scratch")
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    mean = tutorial.average(models, [0.25, 0.75])
    expected = 0.25 * models[0].weight + 0.75 * models[1].weight
    torch.testing.assert_close(mean.weight, expected)


def test_the_page_shows_the_script() -> None:
    code = (ROOT / "docs" / "fedavg_from_scratch.py").read_text(encoding="utf-8")
    shown = [b.text for b in blocks(ROOT / "docs" / "fedavg-from-scratch.md") if b.language == "python"]
    assert len(shown) == 5
    assert all(text in code for text in shown[:4])
