"""A round of FedAvg in tailorfl, pfl-research and Flower's simulation, beside the fastest loop that we can write.

100 clients x 60 samples of 28x28, batch 10, one epoch of SGD, all clients in every round; every program starts from
the same weights and data. One process a measurement, programs in alternation, one thread a process. CPU seconds are
those of all processes that a program starts (Flower's simulation runs one of Ray's a core, and a few more). Before
anything is timed, one round of full-batch steps must give the weights that tailorfl gives.

The peers live in environments of their own (PyTorch's CPU build is enough):

    python -m venv .peers/pfl && .peers/pfl/bin/pip install -r benchmarks/peers/requirements-pfl.txt
    python -m venv .peers/flwr && .peers/flwr/bin/pip install -r benchmarks/peers/requirements-flwr.txt
    .peers/flwr/bin/pip install --no-deps flwr==1.42.0

Rerun on an otherwise idle Linux machine, with the environment of tailorfl:

    python benchmarks/peers/compare.py --python-pfl .peers/pfl/bin/python --python-flwr .peers/flwr/bin/python \
        --json benchmarks/results/peers.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peer_work import BATCH, CHECK_LR, CHECK_STEPS, CLIENTS, LR, SAMPLES, Work, make_work

from tailorfl.benchmark.clock import processor

HERE = Path(__file__).parent
WARMUP = {"logistic": 3, "cnn2": 1}
ROUNDS = {"logistic": 10, "cnn2": 2}
TOLERANCE = 5e-3
"""Largest distance of two programs' weights after the checked round, as a share of the way that they went.

Rounding alone comes to 1e-3 with AVX-512, where one ReLU of `cnn2` lets a sample through that it stops elsewhere; a
rate that is off by a hundredth comes to 1e-2, one client of the hundred left out to more.
"""

QUIET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def measure(python: str, program: str, work: Path, model: str, check: Path | None) -> dict[str, Any]:
    """Run one program in a process of its own; return its record, and write `check` if given.

    Raises:
        SystemExit: it failed; with what it last said.
    """
    folder = work.parent
    out = folder / "record.json"
    command = [python, str(HERE / f"run_{program}.py"), "--work", str(work), "--out", str(out)]
    command += ["--warmup", str(WARMUP[model]), "--rounds", str(ROUNDS[model])]
    if check is not None:
        command += ["--check", str(check)]
    places = {"FLWR_HOME": str(folder / "flwr"), "RAY_TMPDIR": str(folder)}
    done = subprocess.run(command, env=os.environ | QUIET | places, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    record: dict[str, Any] = json.loads(out.read_text())
    return record


def difference(weights: Path, reference: Path, work: Work) -> float:
    """Return ‖w − r‖₂ / ‖r − start‖₂ of the weights w and the reference's r, over all weights together."""
    own, other = torch.load(weights), torch.load(reference)
    if set(own) != set(other):
        raise SystemExit(
            f"{weights.stem} and {reference.stem} have different weights: {set(own) ^ set(other)}"
        )
    went = sum(float((other[name] - work.init[name]).double().square().sum()) for name in other)
    apart = sum(float((own[name] - other[name]).double().square().sum()) for name in other)
    return math.sqrt(apart / went)


def summary(records: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the seconds of a round (a process's median, the best process) and how many times tailorfl's they are."""
    out: dict[str, Any] = {"version": records[0]["version"], "torch": records[0]["torch"]}
    for clock in ("cpu", "wall"):
        typical = [statistics.median(record[clock]) for record in records]
        base = [statistics.median(record[clock]) for record in ours]
        out[f"{clock}_seconds"] = min(typical)
        out[f"{clock}_times_tailorfl"] = statistics.median(a / b for a, b in zip(typical, base, strict=True))
    return out


def compare(model: str, pythons: dict[str, str], repeat: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Measure all programs on one model; return a summary for each.

    Raises:
        SystemExit: a program failed, or computes something else than tailorfl.
    """
    work = make_work(model)
    path = folder / f"{model}.work"
    work.save(path)
    records: dict[str, list[dict[str, Any]]] = {program: [] for program in pythons}
    checks = {program: folder / f"{program}_{model}.pt" for program in pythons}
    for number in range(repeat):
        for program, python in pythons.items():
            check = checks[program] if number == 0 else None
            records[program].append(measure(python, program, path, model, check))
    out = {program: summary(records[program], records["tailorfl"]) for program in pythons}
    for program in pythons:
        off = difference(checks[program], checks["tailorfl"], work)
        if off > TOLERANCE:
            raise SystemExit(f"{program} does not compute what tailorfl computes on {model}: {off:.1e} away")
        out[program]["difference_of_weights"] = off
    return out


def main() -> None:
    """Measure and print one line a program and model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python-pfl", help="the interpreter of pfl's environment; without it pfl is left out"
    )
    parser.add_argument("--python-flwr", help="the interpreter of Flower's environment, likewise")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=list(ROUNDS), choices=list(ROUNDS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    given = {
        "tailorfl": sys.executable,
        "plain": sys.executable,
        "pfl": arguments.python_pfl,
        "flower": arguments.python_flwr,
    }
    pythons = {program: python for program, python in given.items() if python}
    out: dict[str, Any] = {
        "machine": processor(),
        "cores": os.cpu_count(),
        "clients": CLIENTS,
        "samples": SAMPLES,
        "batch": BATCH,
        "lr": LR,
        "repeat": arguments.repeat,
        "warmup_rounds": WARMUP,
        "timed_rounds": ROUNDS,
        "checked_full_batch_steps": CHECK_STEPS,
        "checked_lr": CHECK_LR,
    }
    for model in arguments.models:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Ray may still write logs
            out[model] = compare(model, pythons, arguments.repeat, Path(folder))
        for program, row in out[model].items():
            print(
                f"{model:9s} {program:9s} CPU {row['cpu_seconds']:8.4f} s ({row['cpu_times_tailorfl']:5.2f} x)"
                f"  wall {row['wall_seconds']:8.4f} s ({row['wall_times_tailorfl']:5.2f} x)"
                f"  weights differ by {row['difference_of_weights']:.1e}  {program} {row['version']}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
