"""What registered and what sampled clients cost: memory, start-up and seconds a round.

Logistic regression on digits-shaped synthetic data, 20 training samples a client; Ditto (a private model on every
client), and FedAvg for 100,000. First ever more registered clients of which 100 are sampled: every line is a process
of its own, so that its peak of resident memory is its own too. Samples lie in a file that each start maps
(`on_disk`); a process before draws it, in the cache folder below $TMPDIR, and it is deleted after the line. The largest
numbers are started five times. Then ever more sampled of 10,000 registered,
in turn in one process, and the straight line through their seconds (least squares of relative errors). Last, private
models of 7,850 scalars of 20,000 clients that all trained, in memory and on disk (engine.states). All times are process
times of one thread, the smallest of several; start-up is the federation and the simulation, without imports.

    python benchmarks/many_clients.py --json benchmarks/results/many_clients.json

About eight minutes, 3 GB of memory and 7 GB of disk. `--repeat` says how many rounds are timed, `--processor` what the
file of results calls the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REGISTERED, COHORT = (1_000, 3_000, 10_000, 30_000, 100_000, 1_000_000), 100
STARTS = {100_000: 5, 1_000_000: 3}
"""How often a line of so many clients is started; once where it is not here."""
EVALUATED = 100_000
"""Up to so many registered clients the benchmark evaluates all of them as well."""
COHORTS, MANY = (10, 30, 100, 300, 1_000, 3_000), 10_000
IN_A_ROW = 3
FITTED = 1_000
"""The line goes through the seconds of cohorts up to this size; larger ones are more than one chunk."""
PROPORTIONAL = 100
"""Cohorts from this size on should cost in proportion to their size."""
SAMPLES, BATCH = 20, 10
STATES, SCALARS = 20_000, 7_850


def simulation(method: str, data: Any, cohort: int) -> Any:
    """A simulation of which `cohort` clients are sampled a round."""
    from tailorfl.core.method import make_method
    from tailorfl.engines.choice import make_engine
    from tailorfl.models.functional import Model
    from tailorfl.models.registry import build
    from tailorfl.rounds.simulation import Simulation
    from tailorfl.training.cohort import TrainConfig

    return Simulation(
        make_method(method),
        data,
        Model(lambda: build("logistic", data.source.input_shape, data.source.outputs)),
        TrainConfig(epochs=1, batch_size=BATCH, lr=0.05),
        engine=make_engine("vectorized"),
        fraction=cohort / data.num_clients,
    )


def federation(registered: int) -> Any:
    """The federation of so many clients."""
    from tailorfl.data.build import build

    return build("synthetic_digits", options={"clients": registered, "samples": SAMPLES, "on_disk": True})


def draw(registered: int) -> dict[str, Any]:
    """Process seconds of drawing the samples of so many clients into the cache folder."""
    imported()
    from tailorfl.data.synthetic import synthetic_digits

    begin = time.process_time()
    synthetic_digits(clients=registered, samples=SAMPLES, on_disk=True)
    return {"drawing_seconds": time.process_time() - begin}


def imported() -> float:
    """Process seconds of loading the library, on one thread from then on."""
    begin = time.process_time()
    import torch

    import tailorfl.evaluation.protocols
    import tailorfl.rounds.simulation  # noqa: F401  loads the rest; the methods register themselves

    torch.set_num_threads(1)
    return time.process_time() - begin


def timed_round(sim: Any) -> float:
    """Process seconds of one round."""
    begin = time.process_time()
    sim.step()
    return time.process_time() - begin


def measure(method: str, registered: int, cohort: int, repeat: int) -> dict[str, Any]:
    """One line: everything from loading the library on, in this process."""
    loading = imported()
    from tailorfl.evaluation.protocols import Protocol, evaluate

    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    data = federation(registered)
    built = time.process_time()
    sim = simulation(method, data, cohort)
    ready = time.process_time()
    sim.step()
    seconds = [timed_round(sim) for _ in range(repeat)]
    trained = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    if registered <= EVALUATED:
        evaluate(sim, Protocol(("local",)))
    evaluated = time.process_time() - begin if registered <= EVALUATED else None
    return {
        "method": method,
        "registered": registered,
        "cohort": cohort,
        "import_seconds": loading,
        "start_up_seconds": ready - start,
        "simulation_seconds": ready - built,
        "round_seconds": min(seconds),
        "round_seconds_median": statistics.median(seconds),
        "evaluation_of_all_seconds": evaluated,
        "sample_bytes": data.source.x.numel() * data.source.x.element_size(),
        "import_bytes": base * 1024,
        "peak_bytes": trained * 1024,
        "peak_bytes_with_evaluation": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def cohorts(method: str, registered: int, sizes: list[int], repeat: int) -> dict[str, Any]:
    """Seconds of rounds of several cohort sizes, measured in turn, and the line `a + b * clients` through them."""
    import numpy as np

    imported()
    data = federation(registered)
    simulations = {size: simulation(method, data, size) for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(repeat + 1):
        for size, sim in simulations.items():
            # Several in a row: the first one finds the caches full of another size's things.
            seconds[size] += [timed_round(sim) for _ in range(IN_A_ROW)]
    best = np.array([min(seconds[size][IN_A_ROW:]) for size in sizes])
    clients = np.array(sizes, dtype=np.float64)
    table = np.stack([np.ones_like(clients), clients], axis=1) / best[:, None]
    fitted, proportional = clients <= FITTED, clients >= PROPORTIONAL
    (fixed, each), *_ = np.linalg.lstsq(table[fitted], np.ones(fitted.sum()), rcond=None)
    off = np.abs((fixed + each * clients) / best - 1)
    per_client = best[proportional] / clients[proportional]
    return {
        "method": method,
        "registered": registered,
        "cohorts": sizes,
        "round_seconds": best.tolist(),
        "fixed_seconds": float(fixed),
        "seconds_a_client": float(each),
        "deviation_from_line": float(off[fitted].max()),
        "deviation_beyond": float(off[~fitted].max()),
        "deviation_from_proportional": float(np.abs(per_client / per_client.mean() - 1).max()),
    }


def states(where: str) -> dict[str, Any]:
    """Memory after all of many clients have stored a private model; anonymous memory and mapped files apart."""
    imported()
    import torch
    from tensordict import TensorDict

    from tailorfl.engines.state import StateStore

    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", ".")) as folder:
        store = StateStore(
            TensorDict({"model": torch.zeros(SCALARS)}), Path(folder) if where == "disk" else None
        )
        before = resident()
        for first in range(0, STATES, COHORT):
            ids = range(first, first + COHORT)
            store.put(ids, store.get(ids) + 1.0)
        after = resident()
    return {
        "states": where,
        "clients": STATES,
        "bytes": STATES * SCALARS * 4,
        **{name: after[name] - before[name] for name in after},
    }


def resident() -> dict[str, int]:
    """Bytes of resident memory: anonymous, and of mapped files (page cache, which the system may take back)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kinds = {"anonymous_bytes": "RssAnon", "mapped_bytes": "RssFile"}
    return {name: int(lines[kind].split()[0]) * 1024 for name, kind in kinds.items()}


@contextmanager
def drawn(registered: int) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """(the environment in which the samples of so many clients are kept, what drawing them took)."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", ".")) as folder:
        environment = {**os.environ, "TAILORFL_CACHE": folder}
        yield environment, apart("--draw", registered, environment=environment)


def apart(*arguments: object, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """What this script finds with `arguments` in a process of its own."""
    program = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure and print one line a setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--cohorts", help=argparse.SUPPRESS)
    parser.add_argument("--states", help=argparse.SUPPRESS)
    parser.add_argument("--draw", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--processor", default=platform.processor() or platform.machine())
    arguments = parser.parse_args()
    if arguments.one:
        method, registered, cohort = arguments.one
        print(json.dumps(measure(method, int(registered), int(cohort), arguments.repeat)))
    elif arguments.cohorts:
        print(json.dumps(cohorts(arguments.cohorts, MANY, list(COHORTS), arguments.repeat)))
    elif arguments.draw:
        print(json.dumps(draw(arguments.draw)))
    elif arguments.states:
        print(json.dumps(states(arguments.states)))
    else:
        report(arguments.repeat, arguments.json, arguments.processor)


def registered_line(method: str, registered: int, repeat: int) -> dict[str, Any]:
    """The line of so many registered clients, in processes of its own; printed, too."""
    with drawn(registered) as (environment, drawing):
        given = ("--repeat", repeat, "--one", method, registered, COHORT)
        starts = [apart(*given, environment=environment) for _ in range(STARTS.get(registered, 1))]
    line = {
        **starts[0],
        **drawing,
        "start_ups_seconds": [one["start_up_seconds"] for one in starts],
        "round_seconds": min(one["round_seconds"] for one in starts),
        "peak_bytes": max(one["peak_bytes"] for one in starts),
    }
    slowest, everyone = max(line["start_ups_seconds"]), line["evaluation_of_all_seconds"]
    print(
        f"{method:7s} {registered:10d} {COHORT:8d} {line['start_up_seconds']:7.2f} s {slowest:7.2f} s "
        f"{1000 * line['round_seconds']:7.1f} ms {line['peak_bytes'] / 1e6:9.0f} MB "
        f"{line['drawing_seconds']:7.2f} s {'-' if everyone is None else f'{everyone:.2f} s':>9s}",
        flush=True,
    )
    return line


def report(repeat: int, file: Path | None, processor: str) -> None:
    """Run everything, print the tables, and write the file of results."""
    import torch

    print(
        "method  registered  sampled  start-up   slowest   a round  peak memory   drawing  evaluation of all"
    )
    lines = [
        registered_line(method, registered, repeat)
        for method, registered in [*(("ditto", n) for n in REGISTERED), ("fedavg", EVALUATED)]
    ]
    with drawn(MANY) as (environment, _):
        fits = [
            apart("--repeat", repeat, "--cohorts", method, environment=environment)
            for method in ("ditto", "fedavg")
        ]
    for fit in fits:
        times = "  ".join(
            f"{n}: {1000 * t:.1f} ms" for n, t in zip(fit["cohorts"], fit["round_seconds"], strict=True)
        )
        print(f"{fit['method']}, sampled of {MANY}: {times}")
        print(
            f"  seconds = {fit['fixed_seconds']:.4f} + {fit['seconds_a_client']:.3g} * clients, off by "
            f"{fit['deviation_from_line']:.0%} at most up to {FITTED} clients, {fit['deviation_beyond']:.0%} beyond; "
            f"from {PROPORTIONAL} clients on {fit['deviation_from_proportional']:.0%} off proportional",
            flush=True,
        )
    kept = [apart("--states", where) for where in ("memory", "disk")]
    for found in kept:
        print(
            f"{found['bytes'] / 1e6:.0f} MB of private states, {found['states']}: "
            f"{found['anonymous_bytes'] / 1e6:.0f} MB of memory, {found['mapped_bytes'] / 1e6:.0f} MB of mapped files"
        )
    if file:
        settings = {"model": "logistic", "samples": SAMPLES, "batch": BATCH, "repeat": repeat}
        machine = {"machine": processor, "torch": torch.__version__}
        for fit in (fit for fit in fits if fit["method"] == "ditto"):
            pairs = zip(fit["cohorts"], fit["round_seconds"], strict=True)
            many = next(line for line in lines if line["registered"] == MANY)
            of_its_own = {key: value for key, value in many.items() if key != "round_seconds_median"}
            lines += [{**of_its_own, "cohort": n, "round_seconds": t} for n, t in pairs]
        other = [line for line in lines if line["method"] != "ditto"]
        lines = [line for line in lines if line["method"] == "ditto"]
        found = {
            **machine,
            **settings,
            "lines": lines,
            "other_methods": other,
            "cohorts": fits,
            "states": kept,
        }
        file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
