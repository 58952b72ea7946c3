"""Every method of adapters trains the layers that peft puts into a transformer: whole runs, engines alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from methods.settings import one_of
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.settings.loading import load
from tailorfl.training import tree

pytest.importorskip("transformers", reason="pip install 'tailorfl[text]'")
pytest.importorskip("peft", reason="pip install 'tailorfl[text]'")

RANK, HIDDEN, LAYERS, CLASSES = 2, 16, 2, 10
FACTORS = 2 * LAYERS * 2 * RANK * HIDDEN
"""Scalars of A and B at query and value of both blocks."""
HEAD = CLASSES * (HIDDEN + 1)
CLIENTS = 3
METHODS: dict[str, dict[str, Any]] = {
    "fedit": {},
    "ffa_lora": {},
    "fedsa_lora": {},
    "fedlora": {},
    "feddpa": {},
    "flexlora": {"ranks": [2, 1]},
    "hetlora": {"ranks": [2, 1]},
    "flora": {"ranks": [2, 1]},
    "perada": {"distil": {"steps": 2, "batch_size": 8}},
    "fedoa": {"own_init": True, "lam": 0.5},
}
TRAINED = {"ffa_lora": {"lora_B"}, "flora": {"lora_A", "base_layer"}}
"""What differs after a round in the models of clients, where it is not both factors: FLoRA's B is 0 again."""
HALF = CLIENTS * (FACTORS // 2 + HEAD)
RANKED = 2 * (FACTORS + HEAD) + FACTORS // 2 + HEAD
UP = {"ffa_lora": HALF, "fedsa_lora": HALF, "flexlora": RANKED, "hetlora": RANKED, "flora": RANKED}
"""Scalars of all clients in a round, where they are not A, B and the head of each; ranks 2, 1 and 2."""


def simulation(name: str, engine: str) -> Simulation:
    config = load(
        {
            "data": {"name": "digits", "clients": CLIENTS, "samples": 120, "public": "digits"},
            "model": {"name": "vit", "hidden": HIDDEN, "layers": LAYERS, "lora": RANK, "lora_dropout": 0.0},
            "methods": [{"name": name, **METHODS[name]}],
            "train": {"steps": 2, "batch_size": 8, "lr": 0.1},
            "rounds": 2,
            "engine": engine,
        }
    )
    return make_simulation(Job(config, config.methods[0], 0), make_federation(config, 0))


def deployed(sim: Simulation) -> dict[str, Tensor]:
    ((_, models),) = sim.personal_models(tuple(range(CLIENTS)))
    return dict(tree.tensors(models).items())


@pytest.mark.parametrize("name", one_of(2, tuple(METHODS)))
def test_engines_agree_train_what_they_should_and_send_no_more(name: str) -> None:
    one, other = (simulation(name, engine) for engine in ("sequential", "vectorized"))
    begun = deployed(one)
    sent = [[sim.step().traffic.up for _ in range(2)] for sim in (one, other)]
    found = deployed(one)
    for key, tensor in deployed(other).items():
        torch.testing.assert_close(tensor, found[key], atol=1e-4, rtol=1e-4)
    moved = {key for key, tensor in found.items() if not torch.equal(tensor, begun[key])}
    kinds = {kind for kind in ("lora_A", "lora_B", "base_layer", "head") if any(kind in key for key in moved)}
    assert kinds == {"head"} | TRAINED.get(name, {"lora_A", "lora_B"})
    assert sent[0] == sent[1] == [UP.get(name, CLIENTS * (FACTORS + HEAD))] * 2
