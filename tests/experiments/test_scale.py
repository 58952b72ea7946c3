"""Thousands of clients: memory stays small, and a round costs what its sampled clients cost."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tailorfl.methods  # noqa: F401  registers the methods
from experiments.killing import ENVIRONMENT
from tailorfl.core.cohort import TrainConfig
from tailorfl.core.method import make_method
from tailorfl.data.build import build as build_federation
from tailorfl.engines.simulation import Simulation, make_engine
from tailorfl.models.functional import Model
from tailorfl.models.registry import build

WEIGHED = """
import resource, sys
from tailorfl.cli.main import run
try:
    run()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_ten_thousand_clients_run_in_two_gigabytes(tmp_path: Path) -> None:
    """From the command line, with a private model on every client and all of them evaluated."""
    arguments = [
        *("run", "data=synthetic_digits", "data.options={clients: 10000, samples: 20}", "model=logistic"),
        *("method=ditto", "fraction=0.1", "rounds=5", "seeds=1", "eval.final=[local]", "--out", "out"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", WEIGHED, *arguments],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 2 * 10**9
    job = tmp_path / "out" / "ditto" / "seed-0"
    rounds = [json.loads(line) for line in (job / "rounds.jsonl").read_text().splitlines()]
    assert [len(record["clients"]) for record in rounds] == [1000] * 5
    summary = json.loads((job / "summary.json").read_text())
    assert summary["metrics"]["personal"]["local"]["accuracy"]["clients"] == 10_000


def simulation(registered: int, sampled: int) -> Simulation:
    data = build_federation("synthetic_digits", options={"clients": registered, "samples": 20})
    return Simulation(
        make_method("ditto"),
        data,
        Model(lambda: build("logistic", data.source.input_shape, data.source.outputs)),
        TrainConfig(lr=0.05),
        engine=make_engine("vectorized"),
        fraction=sampled / registered,
    )


@pytest.mark.slow
def test_a_round_costs_what_its_sampled_clients_cost() -> None:
    """As many sampled out of ten times as many registered clients take about as long (measured in turn)."""
    torch.set_num_threads(1)
    few, many = simulation(1_000, 300), simulation(10_000, 300)
    seconds: dict[int, list[float]] = {1_000: [], 10_000: []}
    for _ in range(12):
        for sim in (few, many):
            begin = time.process_time()
            sim.step()
            seconds[sim.federation.num_clients].append(time.process_time() - begin)
    assert statistics.median(seconds[10_000][2:]) < 2 * statistics.median(seconds[1_000][2:])
    assert len(many.states) <= 12 * 300
