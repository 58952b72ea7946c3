"""FedNova: how much steps weigh, its server's step in numbers, and the bias it takes away."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from methods.reductions import SGD, fedavg, in_run
from methods.settings import Card, Limit, Row, and_one
from methods.small import TRAIN, simulation
from tailorfl.core.method import make_method
from tailorfl.errors import ConfigError
from tailorfl.methods.fednova import accumulated
from tailorfl.testing.contract import whole

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


def test_momentum_and_a_proximal_term_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.momentum = 0.5 and mu = 0.1; set one of them to 0"):
        simulation(make_method("fednova", {"mu": 0.1}), train=TRAIN)
