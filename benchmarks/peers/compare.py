"""A round of FedAvg, Ditto and APFL in tailorfl, a plain loop, and five other frameworks.

60 samples of 28x28 a client, batch 10, one epoch of SGD, all clients in every round; every program starts from the same
weights and data. One process a measurement, programs in alternation, one thread a process. CPU seconds are those of all
processes that a program starts (Flower's simulation runs one of Ray's a core, and a few more). Before anything is
timed, one round of full-batch steps must give the weights that tailorfl gives (Ditto: also a personal model's).

The APFL line has the shape of FedJAX's own example (`experiments/apfl`: dense network, 340 clients a round, batch 20)
on random data of EMNIST's shape. FedJAX learns an α for each layer at every step, tailorfl one a client and round;
their weights are not compared.

The peers live in environments of their own (PyTorch's CPU build is enough), made as the requirements files here say.
Rerun on an otherwise idle Linux machine, with the environment of tailorfl:

    python benchmarks/peers/compare.py --peers .peers --json benchmarks/results/frameworks.json

`python docs/benchmark_tables.py --write` makes the tables of the documents.

`--peers` holds an environment for each of pfl, flower, fluke, blazefl and fedjax; what is missing is left out.
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
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from peer_work import CHECK_LR, CHECK_STEPS, EMNIST, PERSONAL, Case, Work, make_work

from tailorfl.benchmark.clock import processor

HERE = Path(__file__).parent
METHODS = {
    "tailorfl": ("fedavg", "ditto", "apfl"),
    "plain": ("fedavg",),
    "pfl": ("fedavg",),
    "flower": ("fedavg",),
    "fluke": ("fedavg", "ditto"),
    "blazefl": ("fedavg",),
    "fedjax": ("fedavg", "apfl"),
}
"""The methods here that each program's package has."""
SIZES = (10, 100, 1000)
ROUNDS = {10: (3, 10), 100: (2, 3), 340: (2, 2), 1000: (1, 1)}
"""Rounds that warm up, and that are timed, by the number of clients."""
CHECK_CLIENTS = 10
LIMIT = 180.0
"""Seconds that one process may take."""
TOLERANCE = 1e-4
"""Largest distance of two programs' weights after the checked round, as a share of the way that they went.

With ten clients, rounding comes to 3e-5 on `cnn2`; a rate that is off by a hundredth comes to 1e-2. Were a ReLU to let
a sample through in one program that it stops in another, by rounding alone, that would come to up to 1e-3.
"""

QUIET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_PLATFORMS": "cpu",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class FailedError(Exception):
    """A program ended with an error."""


def measure(
    python: str, program: str, work: Path, rounds: tuple[int, int], check: Path | None
) -> dict[str, Any]:
    """Run one program in a process of its own; return its record, or write `check` and return nothing.

    Raises:
        FailedError: it failed; with what it last said.
        subprocess.TimeoutExpired: it took longer than `LIMIT`.
    """
    folder = work.parent
    out = folder / "record.json"
    command = [python, str(HERE / f"run_{program}.py"), "--work", str(work), "--out", str(out)]
    command += ["--warmup", str(rounds[0]), "--rounds", str(rounds[1])]
    if check is not None:
        command += ["--check", str(check)]
    places = {"FLWR_HOME": str(folder / "flwr"), "RAY_TMPDIR": str(folder)}
    done = subprocess.run(
        command, env=os.environ | QUIET | places, capture_output=True, text=True, timeout=LIMIT, cwd=folder
    )
    if done.returncode != 0:
        raise FailedError(f"{' '.join(command)} failed:\n{done.stderr[-4000:].rstrip()}")
    record: dict[str, Any] = {} if check else json.loads(out.read_text())
    return record


def difference(weights: Path, reference: Path, work: Work) -> float:
    """Return ‖w − r‖₂ / ‖r − start‖₂ of the weights w and the reference's r, over all weights together."""
    own, other = torch.load(weights), torch.load(reference)
    if set(own) != set(other):
        raise SystemExit(
            f"{weights.stem} and {reference.stem} have different weights: {set(own) ^ set(other)}"
        )
    starts = {name: work.init[name.removeprefix(PERSONAL)] for name in other}
    went = sum(float((other[name] - starts[name]).double().square().sum()) for name in other)
    apart = sum(float((own[name] - other[name]).double().square().sum()) for name in other)
    return math.sqrt(apart / went)


def differences(method: str, model: str, pythons: dict[str, str], folder: Path) -> dict[str, float]:
    """Return how far every program's weights are from tailorfl's after the checked round of a few clients.

    Raises:
        SystemExit: a program failed, or computes something else than tailorfl.
    """
    work = make_work(Case(method, model, CHECK_CLIENTS))
    path = folder / "check.work"
    work.save(path)
    off = {}
    for program, python in pythons.items():
        measure(python, program, path, (0, 1), folder / f"{program}.pt")
        off[program] = difference(folder / f"{program}.pt", folder / "tailorfl.pt", work)
        print(f"{method} {model}: weights of {program} differ by {off[program]:.1e}", flush=True)
        if off[program] > TOLERANCE:
            raise SystemExit(f"{program} does not compute what tailorfl computes on {model}")
    return off


def compare(case: Case, pythons: dict[str, str], repeat: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Measure all programs on one case; return versions and seconds of a round (the best process's median) of each."""
    path = folder / "timed.work"
    make_work(case).save(path)
    records: dict[str, list[dict[str, Any]]] = {program: [] for program in pythons}
    failed: dict[str, dict[str, Any]] = {}
    for program in [*pythons] * repeat:
        if program in failed:
            continue
        try:
            records[program].append(measure(pythons[program], program, path, ROUNDS[case.clients], None))
        except subprocess.TimeoutExpired:
            failed[program] = {"over_seconds": LIMIT}
        except FailedError as error:
            failed[program] = {"failed": str(error).splitlines()[-1]}
    out: dict[str, dict[str, Any]] = {}
    for program, done in records.items():
        out[program] = failed.get(program) or summary(done)
        print(f"{case.method} {case.model} {case.clients}: {program} {out[program]}", flush=True)
    return out


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return versions and the seconds of a round: a process's median, the best process."""
    best = {
        f"{clock}_seconds": min(statistics.median(r[clock]) for r in records) for clock in ("cpu", "wall")
    }
    return {"version": records[0]["version"], "torch": records[0]["torch"], **best}


def main() -> None:
    """Check, measure, print a line a program and case, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="the folder of environments")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--models", nargs="*", default=["logistic", "mlp", "cnn2"])
    parser.add_argument("--clients", nargs="*", type=int, default=list(SIZES), choices=SIZES)
    parser.add_argument("--programs", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--check-only", action="store_true", help="compare weights, measure nothing")
    parser.add_argument("--json", type=Path, help="file for the measurements")
    arguments = parser.parse_args()
    paths = {program: arguments.peers.absolute() / program / "bin" / "python" for program in METHODS}
    pythons = {program: str(path) for program, path in paths.items() if path.exists()}
    pythons |= {"tailorfl": sys.executable, "plain": sys.executable}
    pythons = {program: pythons[program] for program in arguments.programs if program in pythons}
    out: dict[str, Any] = {
        "machine": processor(),
        "cores": os.cpu_count(),
        "repeat": arguments.repeat,
        "rounds": {str(clients): rounds for clients, rounds in ROUNDS.items()},
        "checked_full_batch_steps": CHECK_STEPS,
        "checked_lr": CHECK_LR,
        "lines": [],
    }
    checks: dict[tuple[str, str], dict[str, float]] = {}
    sizes = product(arguments.clients, ("fedavg", "ditto"), arguments.models)
    cases = [Case(method, model, clients) for clients, method, model in sizes]
    for case in [EMNIST, *cases]:  # the longest last
        taking = {program: python for program, python in pythons.items() if case.method in METHODS[program]}
        key = case.method, case.model
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Ray may still write logs
            if key not in checks and case is not EMNIST:
                checks[key] = differences(*key, taking, Path(folder))
            if arguments.check_only:
                continue
            line = {"case": asdict(case), "programs": compare(case, taking, arguments.repeat, Path(folder))}
        out["lines"].append({**line, "difference_of_weights": checks.get(key)})
        if arguments.json:  # after each case, so that what was measured stays
            arguments.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
