"""A tiny federation and tiny models, on which a method trains for a round in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tailorfl.core.method import Method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.base import Engine
from tailorfl.engines.choice import make_engine
from tailorfl.methods.fedem import Mixture
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.models.selectors import select
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.cohort import TrainConfig

CLASSES = 4
"""Classes of the tiny federation."""
SIZES = (15, 1, 7, 9, 3)
"""Training samples of the training clients; client 1 has one sample, client 2 one class.

In batches of 4 none leaves a remainder of two: batch norm of two samples turns rounding errors into visible
differences.
"""
PUBLIC = 6
"""Samples of the public set."""
NEWCOMER = len(SIZES)
"""Id of the client that never trains."""
TRAIN = TrainConfig(epochs=1, batch_size=4, lr=0.05, momentum=0.5, weight_decay=0.01)


@cache
def federation(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> Federation:
    """Return clients with `sizes` training samples, which are 1x8x8 images in four classes.

    Each also has two samples for validation and three for testing; one more client is held out.
    """
    rng = np.random.default_rng(seed)
    train, val, test, y = [], [], [], []
    start = 0
    for client, size in enumerate((*sizes, 5)):
        ids = np.arange(start, start + size + 5, dtype=np.int64)
        train.append(ids[:size])
        val.append(ids[size : size + 2])
        test.append(ids[size + 2 :])
        y.append(np.full(len(ids), 2) if client == 2 else rng.integers(0, CLASSES, len(ids)))
        start += len(ids)
    labels = np.concatenate(y).astype(np.int64)
    x = rng.normal(size=(CLASSES, 1, 8, 8))[labels] + rng.normal(size=(start, 1, 8, 8))
    source = Source(
        "tiny", torch.from_numpy(x.astype(np.float32)), torch.from_numpy(labels), "classification", CLASSES
    )
    names = tuple(f"client {i}" for i in range(len(train)))
    unlabelled = torch.from_numpy(rng.normal(size=(PUBLIC, 1, 8, 8)).astype(np.float32))
    public = Source(
        "tiny public", unlabelled, torch.zeros(PUBLIC, dtype=torch.int64), "classification", CLASSES
    )
    return Federation(source, tuple(train), tuple(val), tuple(test), names, len(sizes), public=public)


def replaced(base: Federation, client: int, change: Callable[[Tensor], Tensor]) -> Federation:
    """Return the federation with the training inputs of one client changed."""
    x = base.source.x.clone()
    rows = torch.from_numpy(base.train[client])
    x[rows] = change(x[rows])
    return replace(base, source=replace(base.source, x=x))


def _group_norm() -> nn.Module:
    conv = nn.Conv2d(1, 8, 3, padding=1)
    return nn.Sequential(
        conv, nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(32, CLASSES)
    )


def _batch_norm() -> nn.Module:
    conv = nn.Conv2d(1, 4, 3, padding=1)
    return nn.Sequential(
        conv,
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Linear(8, CLASSES),
    )


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "logistic": lambda: build("logistic", (1, 8, 8), CLASSES),
    "mlp": lambda: build("mlp", (1, 8, 8), CLASSES, hidden=(8,), activation="tanh"),
    "cnn2": lambda: build("cnn2", (1, 8, 8), CLASSES),
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "dropout": lambda: build("mlp", (1, 8, 8), CLASSES, hidden=(8,), activation="tanh", dropout=0.5),
}

BOTH = "batch norm and dropout"
"""A model with random masks and running statistics: for tests of saved states for which one model is enough."""


def _both() -> nn.Module:
    return build("mlp", (1, 8, 8), CLASSES, hidden=(8,), activation="tanh", norm="batch", dropout=0.5)


@cache
def model(name: str) -> Model:
    """Return a model of `FACTORIES`, or `BOTH`, built once; if `EXACT` follows the name, it computes in float64."""
    factory = {**FACTORIES, BOTH: _both}[name.removesuffix(EXACT)]
    return Model(_in_float64(factory) if name.endswith(EXACT) else factory)


EXACT = " in float64"


def _in_float64(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = factory().double()
        module.register_forward_pre_hook(lambda _, arguments: (arguments[0].double(),))
        return module

    return make


@dataclass(frozen=True)
class Parts:
    """Parameter scalars of a model and of its parts; buffers are not counted."""

    d: int
    head: int
    norm: int


def parts(of: Model) -> Parts:
    """Return the parameter scalars of a model's parts."""

    def count(word: str) -> int:
        if isinstance(of.module, Mixture):  # a mixture has the heads of its networks and so no single one
            return 0
        return sum(of.sizes[n] for n in select(of.module, word, allow_empty=True) if n in of.parameters)

    return Parts(of.scalars, count("head"), count("norm"))


def simulation(
    method: Method,
    model_name: str = "mlp",
    engine: str | Engine = "sequential",
    *,
    chunk: int | None = None,
    rounds: int = 0,
    data: Federation | None = None,
    train: TrainConfig = TRAIN,
    **settings: Any,
) -> Simulation:
    """Return a run of a method on the tiny federation after `rounds` rounds."""
    sim = Simulation(
        method,
        federation() if data is None else data,
        model(model_name),
        train,
        engine=make_engine(engine, chunk) if isinstance(engine, str) else engine,
        **settings,
    )
    for _ in range(rounds):
        sim.step()
    return sim


def everything(sim: Simulation, clients: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Return the server state and the private states of `clients` (default: all training clients), by path."""
    ids = tuple(range(sim.participants) if clients is None else clients)
    out = {f"server/{p}": t for p, t in tree.leaves(sim.server)}
    return {**out, **{f"client/{p}": t for p, t in tree.leaves(sim.states.get(ids))}}


def personal(sim: Simulation, clients: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Return the deployable models of `clients` (default: all training clients), [clients, ...] by name."""
    ids = tuple(range(sim.federation.num_clients) if clients is None else clients)
    groups = [models for _, models in sim.personal_models(ids)]
    names = tree.tensors(groups[0])
    return {name: torch.cat([models.get(name) for models in groups]) for name in names}


def shared(sim: Simulation) -> dict[str, Tensor]:
    """Return the global model by name."""
    state = sim.global_model()
    assert state is not None
    return tree.tensors(state)


def assert_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """Assert equal names and bit-identical tensors."""
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), f"{name} differs by {(tensor - b[name]).abs().max():.3g}"


def assert_close(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], atol: float = 2e-5, rtol: float = 2e-4
) -> None:
    """Assert equal names, and tensors equal up to float32 rounding that a few training steps amplify."""
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        message = partial("{}: {}".format, name)
        torch.testing.assert_close(tensor, b[name], atol=atol, rtol=rtol, msg=message)
