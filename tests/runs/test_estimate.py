"""The dry run: what it says a round sends is what a round sends."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tailorfl.core.server_distill import ServerDistillation
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.cost_estimate import estimate
from tailorfl.runs.job import Job
from tailorfl.settings.loading import load
from tailorfl.training.gradients import LocalObjective

METHODS: list[dict[str, Any]] = [
    {"name": "local"},
    {"name": "centralized"},
    {"name": "fedavg"},
    {"name": "fedrep"},
    {"name": "scaffold"},
    {"name": "hypcluster", "clusters": 3},
    {"name": "pfedhn", "hidden": 8, "depth": 1},
    {"name": "feddf", "distil": {"steps": 2}},
    {"name": "fedfomo", "downloads": 1},
    {"name": "perfed_ckt", "clusters": 2, "public_batch": 8},
]


@pytest.mark.usefixtures("a_quick_estimate")
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m["name"])
def test_traffic_of_a_round_is_that_of_the_second_round(method: dict[str, Any]) -> None:
    """The first one sends less in FedFomo and PerFed-CKT; clusters of two probed clients may be fewer than asked."""
    config = load(
        {
            "data": {
                "name": "digits",
                "samples": 300,
                "clients": 6,
                "public": "digits",
                "public_samples": 30,
            },
            "model": "logistic",
            "methods": [method],
            "train": {"steps": 2, "batch_size": 4},
            "fraction": 0.5,
            "seeds": 1,
        }
    )
    (row,) = estimate(config).methods.values()
    sim = make_simulation(Job(config, config.methods[0], 0), make_federation(config, 0))
    sim.step()
    traffic = sim.step().traffic
    assert row["scalars_up_per_round"] == traffic.up
    assert row["scalars_down_per_round"] == traffic.down_unicast
    assert row["bytes_per_round"] == traffic.bytes_up + traffic.bytes_down
    assert row["seconds"] > 0


@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_the_servers_time_is_that_of_all_its_steps(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of the distillation works 5 ms, beside which the rest is small; few are tried."""
    student = ServerDistillation.distil
    tried: list[int] = []

    def slow(self: Any, *arguments: Any, **options: Any) -> Any:
        tried.append(self.steps)
        end = time.process_time() + 0.005 * self.steps
        while time.process_time() < end:
            pass
        return student(self, *arguments, **options)

    monkeypatch.setattr(ServerDistillation, "distil", slow)
    monkeypatch.setattr("tailorfl.runs.cost_estimate.PROBE_SECONDS", seconds)
    settings: dict[str, Any] = {
        "data": {"name": "digits", "clients": 8, "public": "digits"},
        "model": "logistic",
        "methods": [{"name": "feddf", "distil": {"steps": 400}}],
        "train": {"steps": 1},
        "seeds": 1,
    }
    (row,) = estimate(load(None, settings)).methods.values()
    assert 0.8 <= row["seconds_per_round"] / (0.005 * 400) <= 1.6
    assert max(tried) == (10 if seconds else 2)


SLOW: list[tuple[dict[str, Any], int]] = [
    ({"name": "fedavg"}, 4),
    ({"name": "ditto"}, 8),
    ({"name": "fedrep"}, 8),
    ({"name": "per_fedavg"}, 12),
    ({"name": "pfedme", "inner_steps": 5, "local_rounds": 20}, 20),
    ({"name": "feddf", "distil": {"steps": 400}}, 4),
]


@pytest.mark.parametrize(("method", "most"), SLOW, ids=[m["name"] for m, _ in SLOW])
def test_a_slow_model_is_tried_for_a_few_steps_of_one_client(
    method: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step, one and two of every training, whatever the epochs; of the server's distillation at most two."""
    taken, distilled, gradient, student = [], [], LocalObjective.value, ServerDistillation.distil

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        taken.append(1)
        return gradient(self, *arguments, **options)

    def shown(self: Any, *arguments: Any, **options: Any) -> Any:
        distilled.append(self.steps)
        return student(self, *arguments, **options)

    monkeypatch.setattr("tailorfl.runs.cost_estimate.PROBE_SECONDS", 0.0)
    monkeypatch.setattr(LocalObjective, "value", counted)
    monkeypatch.setattr(ServerDistillation, "distil", shown)
    settings: dict[str, Any] = {
        "data": {"name": "digits", "clients": 4, "samples": 400, "public": "digits"},
        "model": {"name": "mlp", "hidden": [4]},
        "train": {"epochs": 50, "batch_size": 4},
        "seeds": 1,
    }
    (row,) = estimate(load({**settings, "methods": [method]})).methods.values()
    assert 0 < len(taken) <= most
    assert max(distilled, default=0) <= 2
    assert row["seconds"] > 0


def test_seconds_of_a_slow_model_are_those_of_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gradient works 10 ms, beside which the rest is small."""
    gradient = LocalObjective.value

    def slow(self: Any, *arguments: Any, **options: Any) -> Any:
        end = time.process_time() + 0.01
        while time.process_time() < end:
            pass
        return gradient(self, *arguments, **options)

    monkeypatch.setattr("tailorfl.runs.cost_estimate.PROBE_SECONDS", 0.1)
    monkeypatch.setattr(LocalObjective, "value", slow)
    data = {"name": "digits", "clients": 2, "samples": 100, "partition": "iid"}
    config = load(
        {
            "data": data,
            "model": "logistic",
            "train": {"epochs": 4, "batch_size": 5},
            "methods": ["fedavg"],
            "seeds": 1,
            "engine": "sequential",
        }
    )
    federation = make_federation(config, 0)
    gradients = 4 * sum(-(-int(n) // 5) for n in federation.sizes("train"))
    (row,) = estimate(config).methods.values()
    assert 0.7 <= row["seconds_per_round"] / (0.01 * gradients) <= 2.5
