"""Gradients are counted as they are computed, and methods can be compared where all get as many."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from methods.small import PUBLIC, SIZES, TRAIN, simulation
from runs.small import first_job, simulation_of
from tailorfl.core.method import make_method
from tailorfl.errors import ConfigError
from tailorfl.report.document import write_report
from tailorfl.report.experiment import run_experiment
from tailorfl.runs.build import check
from tailorfl.runs.cost_estimate import estimate
from tailorfl.runs.schedule import Kind, limit_of, of_fedavg, used_up
from tailorfl.settings.loading import load

N = sum(SIZES)


@pytest.mark.parametrize(
    ("name", "options", "passes"),
    [
        ("fedavg", {}, TRAIN.epochs),
        ("centralized", {}, TRAIN.epochs),
        ("fedsam", {}, 2 * TRAIN.epochs),  # one where it is, one above
        ("ditto", {"personal_epochs": 2}, TRAIN.epochs + 2),
        ("fedrep", {"head_epochs": 4, "body_epochs": 1}, 5),
        ("apfl", {}, 2 * TRAIN.epochs),
    ],
)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_gradients_are_those_of_single_samples(
    name: str, options: dict[str, Any], passes: int, engine: str
) -> None:
    """An epoch is one of every sample, whatever the batches; so many as methods take of a batch."""
    sim = simulation(make_method(name, options), engine=engine, rounds=2)
    assert sim.gradients == 2 * N * passes


@pytest.mark.parametrize(("batch", "each"), [(4, 4), (128, PUBLIC)])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_gradients_of_public_samples_count_too(engine: str, batch: int, each: int) -> None:
    """PerFed-CKT takes a public batch with every step, from the second round on."""
    method = make_method("perfed_ckt", {"clusters": 2, "public_batch": batch, "weights": "uniform"})
    sim = simulation(method, engine=engine, rounds=2)
    steps = sum(math.ceil(size / TRAIN.batch_size) for size in SIZES)
    assert sim.gradients == 2 * N + steps * each


FEDREP = {"name": "fedrep", "head_epochs": 3}
SETTINGS: dict[str, Any] = {
    "methods": ["local", "fedavg", FEDREP, "scaffold", {"name": "ditto", "rounds": 5}],
    "data": {"name": "digits", "samples": 120, "clients": 4},
    "seeds": [0],
    "rounds": 8,
    "fraction": 0.5,
}


@pytest.mark.usefixtures("a_quick_estimate")
@pytest.mark.parametrize(
    ("budget", "rounds"),
    [
        (
            "gradients",
            {"local": 8, "fedavg": 8, "fedrep": 2, "scaffold": 8, "ditto": 5},
        ),  # four epochs for one
        ("bytes", {"local": 8, "fedavg": 8, "fedrep": 9, "scaffold": 4, "ditto": 5}),  # twice as much a round
        pytest.param(
            "rounds",
            {"local": 8, "fedavg": 8, "fedrep": 8, "scaffold": 8, "ditto": 5},  # its line says so
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_method_gets_as_much_as_fedavg(budget: str, rounds: dict[str, int], tmp_path: Path) -> None:
    """As the dry run says."""
    config = load({**SETTINGS, "budget": budget})
    result = run_experiment(config, tmp_path / "out")
    found = {summary["label"]: summary for summary, _ in result.jobs}
    assert {label: summary["rounds"] for label, summary in found.items()} == rounds
    assert {label: row["rounds"] for label, row in estimate(config).methods.items()} == rounds
    assert found["local"]["bytes_up"] == 0
    if budget == "gradients":
        over = abs(found["fedrep"]["gradients"] - found["fedavg"]["gradients"])
        assert over <= found["fedrep"]["gradients"] / 2 / 2 + 1
    text = write_report(result)[0].read_text()
    assert ("Budget: " in text) == (budget != "rounds")
    assert "gradients / client / round" in text


@pytest.mark.parametrize("budget", ["gradients", "bytes"])
def test_a_client_that_was_left_out_costs_fedavg_nothing(budget: Kind) -> None:
    """Cohorts are drawn from all places, but an empty one neither computes nor sends."""
    data = {**SETTINGS["data"], "excluded_clients": ["client-1"]}
    job = first_job(SETTINGS, methods=["fedavg"], data=data, budget=budget)
    sim = simulation_of(job)
    while not limit_of(job, sim).reached(sim):
        sim.step()
    assert sim.round == job.rounds
    assert used_up(sim, budget) == of_fedavg(job.config, sim, budget)


@pytest.mark.parametrize(
    "other",
    [
        "train.dp={clip: 1.0, epsilon: 8}",
        "train.round_schedule=cosine",
        "train.round_schedule={kind: step, milestones: [0.5]}",
        "system.dropout=0.3",
    ],
)
def test_a_budget_excludes_what_needs_rounds_known_before_or_clients_that_all_answer(other: str) -> None:
    config = load(None, [other, "budget=gradients", "methods=[fedavg]"])
    with pytest.raises(ConfigError, match="budget=gradients"):
        check(config)


@pytest.mark.parametrize("schedule", ["inverse", "{kind: step, milestones: [10]}"])
def test_a_schedule_of_absolute_rounds_goes_with_a_budget(schedule: str) -> None:
    check(load(None, [f"train.round_schedule={schedule}", "budget=gradients"]))
    check(
        load(None, ["train.round_schedule=cosine", "budget=gradients", "methods=[{name: fedavg, rounds: 3}]"])
    )
