"""Runs of few rounds, and what is left of them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from methods.settings import make
from methods.small import TRAIN, federation, model
from tailorfl.engines.choice import make_engine
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree

MODELS = {"small": model("mlp"), "large": model("batch_norm")}
ASSIGNMENT = ("large", "small", "small", "large", "small", "large")
"""The architecture of each client, the held-out one included."""


def two_architectures(name: str = "perfed_ckt", engine: str = "sequential", **settings: Any) -> Simulation:
    return Simulation(
        make(name), federation(), MODELS, TRAIN, assignment=ASSIGNMENT, engine=make_engine(engine), **settings
    )


def dumped(sim: Simulation) -> dict[str, Tensor]:
    """Copies of all tensors of a run."""
    return {name: tensor.clone() for name, tensor in sim.dump()[0].items()}


def server_vector(sim: Simulation) -> Tensor:
    """The numbers of the server's state, float64."""
    return torch.cat([t.flatten().double() for _, t in tree.leaves(sim.server) if t.is_floating_point()])


def digest(sim: Simulation) -> str:
    """Of the server's state and of every client's."""
    found = hashlib.sha256()
    for name, tensor in sorted(sim.dump()[0].items()):
        if not name.endswith("/clients"):
            found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    for group in sim.groups:
        for client in group.states.clients:
            found.update(str(client).encode())
            for path, tensor in tree.leaves(group.states.get((client,))):
                found.update(path.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()
