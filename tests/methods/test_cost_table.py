"""The costs printed in PerFed-CKT's table of CIFAR-10, homogeneous models: all cells, from the counters.

Scalars, times 10⁷, of 200 rounds with m = 10 | 15 sampled clients: what clients send, and every distinct payload that
the server sends, once a round. The models there have 9 756 426 scalars (VGG-11); the counters count models of any size.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from methods.settings import make
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

ROUNDS, VGG, CLIENTS, CLASSES, PUBLIC = 200, 9_756_426, 60, 10, 2000

MODELS: list[tuple[str, dict[str, Any], float, float]] = [
    # method, options, cost with m = 10, cost with m = 15, as printed
    ("fedavg", {}, 2150, 3120),
    ("fedprox", {}, 2150, 3120),
    ("feddf", {"distil": {"steps": 1}}, 2150, 3120),
    ("per_fedavg", {}, 2150, 3120),
    ("ditto", {}, 2150, 3120),
    ("fedfomo", {"downloads": 14}, 3900, 5850),
    ("hypcluster", {"clusters": 2}, 2340, 3320),
    ("hypcluster", {"clusters": 3}, 2540, 3510),
    ("hypcluster", {"clusters": 5}, 2930, 3900),
    ("hypcluster", {"clusters": 6}, 3120, 4100),
]
PREDICTIONS = [
    (1, 4.4, 6.4),
    *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((2, 4.8, 6.8), (3, 5.2, 7.2))),
    (4, 5.6, 7.6),
]


@cache
def federation() -> Federation:
    """60 clients of two samples each, and 2 000 public ones."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(3 * CLIENTS, 4)).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, CLASSES, 3 * CLIENTS))
    source = Source("tiny", x, y, "classification", CLASSES)
    open_x = torch.from_numpy(rng.normal(size=(PUBLIC, 4)).astype(np.float32))
    public = Source("public", open_x, torch.zeros(PUBLIC, dtype=torch.int64), "classification", CLASSES)
    rows = [np.arange(3 * i, 3 * i + 3) for i in range(CLIENTS)]
    train, test = tuple(r[:2] for r in rows), tuple(r[2:] for r in rows)
    names = tuple(f"client {i}" for i in range(CLIENTS))
    return Federation(source, train, test, test, names, CLIENTS, public=public)


def cost_of_a_round(name: str, m: int, **options: Any) -> tuple[int, int]:
    """(scalars up and multicast down in the second round, scalars of a model); many methods send less in the first."""
    model = Model(lambda: build("logistic", (4,), CLASSES))
    train = TrainConfig(epochs=None, steps=1, batch_size=2)
    sim = Simulation(make(name, **options), federation(), model, train, fraction=m / CLIENTS)
    sim.step()
    traffic = sim.step().traffic
    return traffic.up + traffic.down_multicast, model.scalars


def printed(scalars: float) -> float:
    """A number of scalars as the table prints it: three digits, in units of 10⁷."""
    return float(f"{scalars / 1e7:.3g}")


@pytest.mark.parametrize(("name", "options", "ten", "fifteen"), MODELS)
def test_methods_that_send_models(name: str, options: dict[str, Any], ten: float, fifteen: float) -> None:
    for m, cell in ((10, ten), (15, fifteen)):
        cost, d = cost_of_a_round(name, m, **options)
        beside = (
            m * (m - 1) if name == "fedfomo" else 0
        )  # FedFomo's clients also report a number for every model
        assert (cost - beside) % d == 0
        assert printed(ROUNDS * (cost - beside) // d * VGG) == pytest.approx(cell, rel=0.005)


@pytest.mark.parametrize(("clusters", "ten", "fifteen"), PREDICTIONS)
def test_perfed_ckt_sends_predictions_only(clusters: int, ten: float, fifteen: float) -> None:
    for m, cell in ((10, ten), (15, fifteen)):
        cost, _ = cost_of_a_round("perfed_ckt", m, clusters=clusters)
        assert cost == (m + clusters) * PUBLIC * CLASSES
        assert printed(ROUNDS * cost) == pytest.approx(cell)


def test_scaffold_sends_twice_what_the_table_counts() -> None:
    """Its control variates travel beside the models; the table leaves them out."""
    for m, cell in ((10, 2150), (15, 3120)):
        cost, d = cost_of_a_round("scaffold", m)
        assert printed(ROUNDS * cost // (2 * d) * VGG) == pytest.approx(cell, rel=0.005)


def test_local_training_sends_nothing() -> None:
    assert cost_of_a_round("local", 10)[0] == 0


def test_the_models_of_the_table_have_so_many_scalars() -> None:
    assert Model(lambda: build("vgg11", (3, 32, 32), 10)).scalars == VGG
