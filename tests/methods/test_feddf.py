"""FedDF: what the server distils, from whom, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from methods.reductions import fedavg
from methods.settings import Card, Row, make
from methods.small import (
    TRAIN,
    federation,
    model,
    simulation,
)
from tailorfl.core.server_distill import ServerDistillation
from tailorfl.errors import ConfigError
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole

CONTRACTS = {
    "feddf": Row(
        Card(whole, whole, whole, False, True),
        {"distil": {"steps": 3, "batch_size": 4, "lr": 1e-3}},
        still={"distil": {"steps": 0}},
        same=(
            fedavg("T01", distil={"steps": 0}, said=True),
            fedavg("T01", distil={"rounds": 0}, said=True),
        ),
    ),
}


MODELS = {"small": model("logistic"), "middle": model("mlp"), "large": model("batch_norm")}
"""Any names will do, as long as no folder is called so."""


def test_an_architecture_of_which_nobody_took_part_still_learns_from_the_others() -> None:
    method = make("feddf", distil={"steps": 3, "batch_size": 4, "lr": 1e-2})
    kinds = ("small", "large", "middle", "small", "large", "middle")
    sim = Simulation(method, federation(), MODELS, TRAIN, assignment=kinds, fraction=0.2)
    before = {n: sim.global_model(n) for n in MODELS}
    sim.step()
    for name, old in before.items():
        new, first = sim.global_model(name), MODELS[name].parameters[0]
        assert old is not None
        assert new is not None
        assert not torch.equal(old.get(first), new.get(first))


def test_teachers_predict_in_slices_that_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows at once as an evaluation of so many models takes; the slices change nothing."""
    sim = simulation("feddf")
    public, models = sim.context.public, torch.stack([sim.init] * 3)
    assert public is not None
    whole = ServerDistillation().targets([(sim.model, models)], public)
    monkeypatch.setattr("tailorfl.training.cohort.INPUT_BYTES", 4 * 3 * 64 * 2)  # two rows of three clients
    sizes, take = [], type(public).take
    monkeypatch.setattr(
        type(public), "take", lambda source, rows: (sizes.append(len(rows)), take(source, rows))[1]
    )
    torch.testing.assert_close(ServerDistillation().targets([(sim.model, models)], public), whole)
    assert sizes == [2, 2, 2]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="public"):
        simulation("feddf", data=replace(federation(), public=None))
    with pytest.raises(ConfigError, match="validation"):
        simulation(make("feddf", distil={"select": "best"}))
    with pytest.raises(ConfigError, match="patience"):
        make("feddf", distil={"patience": 5})
