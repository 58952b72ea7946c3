"""Thousands of clients: memory stays small, and a round costs what its sampled clients cost."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from runs.killing import ENVIRONMENT
from runs.small import facts, first_job, records, simulation_of
from tailorfl.evaluation.protocols import Protocol
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.schedule import long_final

WEIGHED = """
from runs.test_scale import peak
from tailorfl.cli.main import run
try:
    run()
finally:
    print(peak())
"""
STARTED = """
from runs.test_scale import peak, simulation
before = peak()
sim = simulation(100_000, 100)
sim.step()
after = peak()
assert len(sim.states) == 100
print((after - before) / (sim.federation.source.x.numel() * 4))
"""
PATH = {"PYTHONPATH": str(Path(__file__).parents[1])}


def peak() -> int:
    """Return the most bytes of memory that this process has had at once.

    Not `ru_maxrss`: a program starts with that of whoever starts it, which here is a worker of pytest.
    """
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def weighed(program: str, folder: Path, *arguments: str) -> float:
    """The last number that a process of its own prints."""
    command = [sys.executable, "-c", program, *arguments]
    environment = {**ENVIRONMENT, **PATH}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


def simulation(registered: int, sampled: int) -> Simulation:
    data = {"name": "synthetic_digits", "options": {"clients": registered, "samples": 20}}
    settings = {"data": data, "model": "logistic", "methods": ["ditto"], "engine": "vectorized"}
    return simulation_of(first_job(settings, fraction=sampled / registered, seeds=[0]))


@pytest.mark.slow
def test_ten_thousand_clients_run_in_two_gigabytes(tmp_path: Path) -> None:
    """From the command line, with a private model on every client and all of them evaluated."""
    arguments = [
        *("run", "data=synthetic_digits", "data.options={clients: 10000, samples: 20}", "model=logistic"),
        *("method=ditto", "fraction=0.1", "rounds=3", "seeds=1", "eval.final=[local]", "--out", "out"),
    ]
    assert weighed(WEIGHED, tmp_path, *arguments) < 2 * 10**9
    job = tmp_path / "out" / "ditto" / "seed-0"
    assert [len(record["clients"]) for record in records(job / "rounds.jsonl")] == [1000] * 3
    summary = facts(job / "summary.json")
    assert summary["metrics"]["personal"]["local"]["accuracy"]["clients"] == 10_000


@pytest.mark.slow
def test_a_hundred_thousand_clients_start_in_a_small_multiple_of_their_samples(tmp_path: Path) -> None:
    """Rows, names, checks and states of clients that were never sampled weigh next to nothing."""
    assert weighed(STARTED, tmp_path) < 2


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
    assert "each of 2,000 personal models to 10,000 samples of the sets global: " in said
    # 2 10^7 outputs; 5 rounds of 100 clients with 18 samples, 3 each
    assert "741 times the work of all training" in said
    assert "eval.max_samples=1000" in said
    assert long_final(sim, Protocol(("local", "global"), max_samples=1000), rounds=5) is None
    assert long_final(sim, Protocol(("local",)), rounds=5) is None
    assert long_final(sim, everything, rounds=5000) is None
