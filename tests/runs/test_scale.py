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

from runs.killing import ENVIRONMENT
from tailorfl.core.method import make_method
from tailorfl.data.build import build as build_federation
from tailorfl.engines.make import make_engine
from tailorfl.evaluation.protocols import Protocol
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.eval_schedule import long_final
from tailorfl.training.cohort import TrainConfig

WEIGHED = """
from runs.test_scale import peak
from tailorfl.cli.main import run
try:
    run()
finally:
    print(peak())
"""
PATH = {"PYTHONPATH": str(Path(__file__).parents[1])}


def peak() -> int:
    """Return the most bytes of memory that this process has had at once.

    Not `ru_maxrss`: a program starts with that of whoever starts it, which here is a worker of pytest.
    """
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_ten_thousand_clients_run_in_two_gigabytes(tmp_path: Path) -> None:
    """From the command line, with a private model on every client and all of them evaluated."""
    arguments = [
        *("run", "data=synthetic_digits", "data.options={clients: 10000, samples: 20}", "model=logistic"),
        *("method=ditto", "fraction=0.1", "rounds=3", "seeds=1", "eval.final=[local]", "--out", "out"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", WEIGHED, *arguments],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, **PATH},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 2 * 10**9
    job = tmp_path / "out" / "ditto" / "seed-0"
    rounds = [json.loads(line) for line in (job / "rounds.jsonl").read_text().splitlines()]
    assert [len(record["clients"]) for record in rounds] == [1000] * 3
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
def test_a_hundred_thousand_clients_start_in_a_small_multiple_of_their_samples() -> None:
    """Rows, names, checks and states of clients that were never sampled weigh next to nothing."""
    program = """
from runs.test_scale import peak, simulation
before = peak()
sim = simulation(100_000, 100)
sim.step()
after = peak()
assert len(sim.states) == 100
print((after - before) / (sim.federation.source.x.numel() * 4))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, **PATH},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2


def test_states_hold_the_clients_that_trained_and_no_others() -> None:
    """With private models, ten thousand registered clients and thirty sampled in two rounds."""
    sim = simulation(10_000, 30)
    cohorts = [sim.step().clients for _ in range(2)]
    assert sim.states.clients == tuple(sorted(set(cohorts[0]) | set(cohorts[1])))
    tensors, _ = sim.dump()
    scalars = sum(t.numel() for name, t in tensors.items() if name.startswith("clients/state/"))
    assert scalars == len(sim.states) * sim.model.scalars


def test_a_round_costs_what_its_sampled_clients_cost() -> None:
    """As many sampled out of ten times as many registered clients take about as long (measured in turn)."""
    torch.set_num_threads(1)
    few, many = simulation(1_000, 300), simulation(10_000, 300)
    seconds: dict[int, list[float]] = {1_000: [], 10_000: []}
    for _ in range(8):
        for sim in (few, many):
            begin = time.process_time()
            sim.step()
            seconds[sim.federation.num_clients].append(time.process_time() - begin)
    assert statistics.median(seconds[10_000][2:]) < 2 * statistics.median(seconds[1_000][2:])
    assert len(many.states) <= 8 * 300


def test_a_last_evaluation_that_outweighs_training_is_announced() -> None:
    """Every personal model on the test samples of all: the warning names the settings that bound it."""
    sim = simulation(2000, 100)
    everything = Protocol(("local", "global"))
    said = long_final(sim, everything, rounds=5)
    assert said is not None
    assert "each of 2,000 personal models on 10,000 samples of the sets global: " in said
    # 2 10^7 outputs; 5 rounds of 100 clients with 18 samples, 3 each
    assert "741 times the work of all training" in said
    assert "eval.max_samples=1000" in said
    assert long_final(sim, Protocol(("local", "global"), max_samples=1000), rounds=5) is None
    assert long_final(sim, Protocol(("local",)), rounds=5) is None
    assert long_final(sim, everything, rounds=5000) is None
