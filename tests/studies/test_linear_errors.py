"""Distances to the truth: closed forms, what adds up, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from studies.linear_errors import Truth, linear_models
from tailorfl.core.method import make_method
from tailorfl.data.build import build as build_federation
from tailorfl.data.federation import Federation
from tailorfl.data.synthetic import closed_form
from tailorfl.engines.choice import make_engine
from tailorfl.errors import ConfigError
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

CLIENTS, DIM, LAM = 4, 3, 0.7


def federation(**settings: object) -> Federation:
    options = {"clients": CLIENTS, "samples": 40, "test_samples": 5, "dim": DIM, "noise": 0.5}
    split = {"train": 0.8, "val": 0.2, "test": "official"}
    return build_federation("synthetic_linear", options=options, split=split, **settings)  # type: ignore[arg-type]


def simulation(data: Federation, model: str = "linear", lam: float = LAM) -> Simulation:
    return Simulation(
        make_method("fedclup", {"lam": lam}),
        data,
        Model(lambda: build(model, data.source.input_shape, 1)),
        TrainConfig(epochs=None, steps=20, batch_size=0, lr=0.3),
        engine=make_engine("vectorized"),
    )


def means(sim: Simulation) -> dict[str, float]:
    """Of the errors of all clients."""
    found = Truth.of(sim.federation, sim.weights).errors(linear_models(sim, DIM), LAM)
    return {name: float(errors.mean()) for name, errors in found.items()}


def test_optimisation_error_falls_to_zero_and_the_statistical_one_is_what_is_left() -> None:
    sim = simulation(federation())
    first = means(sim)
    for _ in range(40):
        sim.step()
    last = means(sim)
    assert first["optimisation"] > 0.1
    assert last["optimisation"] < 1e-9
    assert last["total"] == pytest.approx(last["statistical"], rel=1e-3)
    assert last["statistical"] == first["statistical"] > 1e-3


def test_errors_are_those_of_the_training_rows_by_hand() -> None:
    """The training part is 0.8 of the rows: other H and c than the whole source's."""
    data = federation()
    truth, source = Truth.of(data), data.source
    models = torch.arange(CLIENTS * DIM).reshape(CLIENTS, DIM) / 5.0
    H, c = [], []
    for i in range(CLIENTS):
        x, y = source.x[data.train[i]].double(), source.y[data.train[i]].double()
        assert len(x) == 32
        H.append(x.T @ x / 32)
        c.append(torch.linalg.solve(x.T @ x, x.T @ y)[:, 0])
    _, v = closed_form(torch.stack(H), torch.stack(c), torch.full((CLIENTS,), 0.25).double(), LAM)
    found, true = truth.errors(models, LAM), source.info["weights"]
    for name, (a, b) in {
        "total": (models, true), "optimisation": (models, v), "statistical": (v, true)
    }.items():  # fmt: skip
        torch.testing.assert_close(found[name], ((a - b) ** 2).sum(1))
    assert not torch.allclose(truth.H, source.info["H"])


def test_clients_keep_their_truth_wherever_they_stand() -> None:
    """A federation of some of the groups, in another order and of unequal sizes, weighted by samples."""
    data = federation()
    order = (2, 0, 3)
    some = Federation(
        data.source,
        tuple(data.train[i][: 20 + i] for i in order),
        tuple(data.val[i] for i in order),
        tuple(data.test[i] for i in order),
        tuple(map(str, order)),
        2,
    )
    truth = Truth.of(some, "samples")
    torch.testing.assert_close(truth.weights, data.source.info["weights"][list(order[:2])])
    torch.testing.assert_close(truth.p, torch.tensor([22 / 42, 20 / 42], dtype=torch.float64))


def test_what_has_no_known_truth_is_refused() -> None:
    data = federation()
    with pytest.raises(ConfigError, match="knows it"):
        Truth.of(replace(data, source=replace(data.source, info={})))
    mixed = (np.concatenate(data.train[:2]), *data.train[1:])
    with pytest.raises(ConfigError, match="one true model"):
        Truth.of(replace(data, train=mixed))
    with pytest.raises(ConfigError, match="linear model of 3 weights"):
        linear_models(simulation(data, "logistic"), DIM)
