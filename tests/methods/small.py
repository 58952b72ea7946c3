"""The tiny federation of `tailorfl.testing`, and runs on it of methods by name."""

from __future__ import annotations

from typing import Any

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
    "assert_close",
    "assert_same",
    "everything",
    "federation",
    "fits",
    "model",
    "parts",
    "personal",
    "replaced",
    "shared",
    "simulation",
]


def fits(method: str, model_name: str) -> bool:
    """Whether a method's split exists on a model."""
    return model_name not in row(method).not_on


def simulation(
    method: str | Method, model_name: str = "mlp", engine: Any = "sequential", **settings: Any
) -> Simulation:
    """A run of a method (by name: with its quick options) after `rounds` rounds."""
    return small.simulation(
        make(method) if isinstance(method, str) else method, model_name, engine, **settings
    )
