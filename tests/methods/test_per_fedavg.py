"""Per-FedAvg: its directions and optima on quadratics, and what is left of it without adaptation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from methods import plain
from methods.quadratics import (
    CLIENTS,
    DIM,
    WEIGHT,
    curvature,
    quadratic_simulation,
)
from methods.reductions import Same
from methods.settings import Card, Row
from methods.small import SIZES, TRAIN, assert_close, replies_of, shared, simulation
from tailorfl.core.method import Method
from tailorfl.methods.per_fedavg import PerFedAvg
from tailorfl.testing.contract import whole
from tailorfl.training import tree

CONTRACTS = {
    "per_fedavg": Row(
        Card(whole, whole, whole, True, True),
        {"alpha": 0.05},
        still={"adapt_steps": 0},
        same=(
            Same(
                "A = 0", {"adapt_steps": 0}, "per_fedavg", {"adapt_steps": 0}, "personal", "global", said=True
            ),
        ),
        remarks=(({"alpha": 0.0}, "second of every two", "test_per_fedavg.py"),),
        proved="directions on quadratics: test_per_fedavg.py",
    ),
}


BETA, ALPHA = 0.1, 0.2
EYE = torch.eye(DIM, dtype=torch.float64)


def per_fedavg(variant: str = "FO", **options: Any) -> Method:
    """With the paper's equal weights."""
    return PerFedAvg(**{"alpha": ALPHA, "variant": variant, "weights": "uniform", **options})


def matrices(variant: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(M_i [clients, dim, dim], c_i) of the direction M_i (w − c_i): FO H(I − αH), HF (I − αH)H(I − αH)."""
    H, c = curvature()
    inner = EYE - ALPHA * H
    return (H @ inner if variant == "FO" else inner @ H @ inner), c


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("variant", "delta"), [("FO", 1e-3), ("HF", 1e-2), ("HF", 0.3), ("HF", 1.0), ("HF", 50.0)]
)
def test_the_direction_on_quadratics(variant: str, delta: float, steps: int) -> None:
    """Exact for every δ: differences of a linear gradient are its derivative."""
    sim = quadratic_simulation(per_fedavg(variant, delta=delta), steps, lr=BETA)
    M, c = matrices(variant)
    w = tree.tensors(sim.server)[WEIGHT][0].double().expand(CLIENTS, DIM)
    for _ in range(steps):
        w = w - BETA * torch.einsum("kij,kj->ki", M, w - c)
    replies = tree.tensors(replies_of(sim, range(CLIENTS)))[WEIGHT][:, 0].double()
    torch.testing.assert_close(replies, w, atol=2e-4, rtol=1e-4)


def test_without_adaptation_fo_is_sgd_on_every_second_batch() -> None:
    sim = simulation(per_fedavg("FO", alpha=0.0), "mlp", train=replace(TRAIN, epochs=None, steps=3))
    w: plain.State = dict(sim.init.items())
    for _ in range(2):
        local = [
            plain.train(sim, w, plain.batches(sim, i, epochs=None, steps=6)[1::2]) for i in range(len(SIZES))
        ]
        w = plain.average(local, [1] * len(SIZES))
        sim.step()
        assert_close(shared(sim), dict(w))
