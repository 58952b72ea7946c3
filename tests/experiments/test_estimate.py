"""The dry run: what it says a round sends is what a round sends."""

from __future__ import annotations

from typing import Any

import pytest

from tailorfl.experiments.config import parse
from tailorfl.experiments.estimate import estimate
from tailorfl.experiments.jobs import Job
from tailorfl.experiments.runner import make_federation, make_simulation

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


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m["name"])
def test_traffic_of_a_round_is_that_of_the_second_round(method: dict[str, Any]) -> None:
    """The first one sends less in FedFomo and PerFed-CKT; clusters of two probed clients may be fewer than asked."""
    config = parse(
        {
            "data": {"name": "digits", "clients": 6, "public": "digits", "public_samples": 30},
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


def test_the_servers_time_counts_once_a_round_and_the_clients_with_their_number() -> None:
    """Distillation takes as long for two probed clients as for all; doubling its steps doubles nothing else."""
    settings: dict[str, Any] = {
        "data": {"name": "digits", "clients": 20, "public": "digits"},
        "model": "logistic",
        "train": {"steps": 1},
        "seeds": 1,
    }
    methods = [{"name": "fedavg"}, {"name": "feddf", "distil": {"steps": 400}}]
    rows = estimate(parse({**settings, "methods": methods})).methods
    assert rows["feddf"]["seconds_per_round"] > rows["fedavg"]["seconds_per_round"]
