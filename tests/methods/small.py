"""The tiny federation of `tailorfl.testing`, and runs on it of methods by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict

from methods.settings import CLASSES, Parts, make, row
from tailorfl.core.method import Method
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing import small
from tailorfl.testing.small import (
    BOTH,
    EXACT,
    FACTORIES,
    NEWCOMER,
    PUBLIC,
    SIZES,
    TRAIN,
    assert_close,
    assert_same,
    everything,
    federation,
    model,
    parts,
    personal,
    replaced,
    shared,
)

__all__ = [
    "BOTH",
    "CLASSES",
    "EXACT",
    "FACTORIES",
    "NEWCOMER",
    "PUBLIC",
    "SIZES",
    "TRAIN",
    "Parts",
    "after",
    "assert_close",
    "assert_same",
    "everything",
    "federation",
    "fits",
    "model",
    "parts",
    "personal",
    "replaced",
    "replies_of",
    "shared",
    "simulation",
]


def fits(method: str, model_name: str) -> bool:
    """Whether a method's split exists on a model."""
    return model_name not in row(method).promises.get("not_on", ())


def simulation(
    method: str | Method, model_name: str = "mlp", engine: Any = "sequential", **settings: Any
) -> Simulation:
    """A run of a method (by name: with its quick options) after `rounds` rounds."""
    return small.simulation(
        make(method) if isinstance(method, str) else method, model_name, engine, **settings
    )


def after(sim: Simulation, rounds: int) -> Simulation:
    """The same run, so many rounds later."""
    for _ in range(rounds):
        sim.step()
    return sim


def replies_of(sim: Simulation, ids: Sequence[int]) -> TensorDict:
    """What clients would reply in this round, [clients, ...]."""
    ids = tuple(ids)
    message = sim.method.broadcast(sim.server, ids)
    replies: TensorDict
    _, replies = sim.run(ids, sim.states.get(ids), message, sim.method.local)
    return replies
