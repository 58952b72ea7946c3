"""What a dry run says of a simulated system is what then happens."""

from __future__ import annotations

from typing import Any

import pytest

from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.cost_estimate import estimate, simulated_system
from tailorfl.runs.job import Job
from tailorfl.settings.experiment import ExperimentConfig

SPEED = {"kind": "lognormal", "median": 300, "spread": 1.0, "redraw": "round"}
SYSTEMS: dict[str, dict[str, Any]] = {
    "deadline": {"speed": SPEED, "bandwidth": 50_000, "deadline": 1.0, "dropout": 0.1},
    "too few": {"speed": SPEED, "deadline": 0.4, "min_replies": 4},
    "more are asked": {"speed": SPEED, "over_selection": 0.5},
    "nights": {"speed": SPEED, "availability": {"kind": "wave", "share": 0.4, "period": 20.0}},
    "no time": {"availability": {"kind": "share", "share": 0.4}},
    "buffered": {"mode": "buffered", "buffer": 3, "speed": SPEED, "bandwidth": 50_000, "dropout": 0.2},
}


def experiment(system: dict[str, Any], **changes: Any) -> ExperimentConfig:
    """Ten clients, twelve rounds."""
    given = {
        "data": {"name": "digits", "clients": 10, "samples": 600},
        "model": "logistic",
        "methods": ["ditto"],
        "seeds": [3],
        "rounds": 12,
        "fraction": 1.0 if system.get("mode") == "buffered" else 0.5,
        "train": {"epochs": 1, "batch_size": 20, "lr": 0.1},
        "system": system,
        **changes,
    }
    return ExperimentConfig.model_validate(given)


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_is_foreseen_happens(name: str) -> None:
    config = experiment(SYSTEMS[name])
    job = Job(config, config.methods[0], 3)
    sim = make_simulation(job, make_federation(config, 3))
    said = simulated_system(sim, config.rounds)
    assert sim.round == 0
    assert sim.clock == 0.0
    effects: list[bool] = []
    replies = 0
    for _ in range(config.rounds):
        before = sim.server.clone()
        one = sim.step().trace
        assert one is not None
        replies += len(one.answered)
        effects.append(bool((before != sim.server).any()))
    assert said["replies_per_round"] == pytest.approx(replies / 12)
    assert said["rounds_without_effect"] == effects.count(False)
    assert said["simulated_seconds"] == pytest.approx(sim.clock)
    assert 0 < said["replies_per_round"] < 8
    if name == "too few":
        assert said["rounds_without_effect"] > 0


def test_a_dry_run_has_it() -> None:
    found = estimate(experiment(SYSTEMS["deadline"], methods=["fedavg", "centralized"])).methods
    assert found["fedavg"]["simulated_seconds"] > 0
    assert found["fedavg"]["replies_per_round"] < 5
    assert "simulated_seconds" not in found["centralized"]


def test_without_a_system_there_is_nothing_to_foresee() -> None:
    assert "replies_per_round" not in estimate(experiment({})).methods["ditto"]
