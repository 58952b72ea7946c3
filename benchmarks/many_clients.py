"""What registered and what sampled clients cost: memory, start-up and seconds a round.

Ditto (a private model on every client) with logistic regression on digits-shaped synthetic data, 20 training
samples a client. First ever more registered clients of which 100 are sampled, then ever more sampled of 10,000
registered. Every line is a process of its own, so that its peak of resident memory is its own too; rounds are
timed as process time of one thread.

    python benchmarks/many_clients.py --json benchmarks/results/many_clients.json
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

REGISTERED, COHORT = (1_000, 3_000, 10_000, 30_000), 100
COHORTS, MANY = (10, 30, 100, 300, 1_000, 3_000), 10_000
SAMPLES, BATCH = 20, 10


def measure(registered: int, cohort: int, repeat: int) -> dict[str, float]:
    """One line: everything from loading the library on, in this process."""
    begin = time.process_time()
    import torch

    import tailorfl.methods  # noqa: F401  registers the methods
    from tailorfl.core.cohort import TrainConfig
    from tailorfl.core.method import make_method
    from tailorfl.data.build import build as build_federation
    from tailorfl.engines.simulation import Simulation, make_engine
    from tailorfl.evaluation.protocols import Protocol, evaluate
    from tailorfl.models.functional import Model
    from tailorfl.models.registry import build

    torch.set_num_threads(1)
    imported = time.process_time()
    data = build_federation("synthetic_digits", options={"clients": registered, "samples": SAMPLES})
    model = Model(lambda: build("logistic", data.source.input_shape, data.source.outputs))
    sim = Simulation(
        make_method("ditto"),
        data,
        model,
        TrainConfig(epochs=1, batch_size=BATCH, lr=0.05),
        engine=make_engine("vectorized"),
        fraction=cohort / registered,
    )
    ready = time.process_time()
    sim.step()
    seconds = []
    for _ in range(repeat):
        start = time.process_time()
        sim.step()
        seconds.append(time.process_time() - start)
    trained = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    evaluate(sim, Protocol(("local",)))
    return {
        "registered": registered,
        "cohort": cohort,
        "import_seconds": imported - begin,
        "start_up_seconds": ready - imported,
        "round_seconds": min(seconds),
        "round_seconds_median": statistics.median(seconds),
        "evaluation_of_all_seconds": time.process_time() - start,
        "peak_bytes": trained * 1024,
        "peak_bytes_with_evaluation": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Measures and prints one line a setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, nargs=2, metavar=("REGISTERED", "COHORT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        registered, cohort = arguments.one
        print(json.dumps(measure(registered, cohort, arguments.repeat)))
        return
    print("registered   sampled   start-up   one round   peak memory   evaluation of all")
    lines = []
    for registered, cohort in [*((n, COHORT) for n in REGISTERED), *((MANY, k) for k in COHORTS)]:
        program = [sys.executable, __file__, "--repeat", str(arguments.repeat), "--one"]
        done = subprocess.run(
            [*program, str(registered), str(cohort)], stdout=subprocess.PIPE, text=True, check=True
        )
        line = json.loads(done.stdout)
        lines.append(line)
        print(
            f"{registered:10d} {cohort:9d} {line['start_up_seconds']:8.2f} s {1000 * line['round_seconds']:8.1f} ms "
            f"{line['peak_bytes'] / 1e6:10.0f} MB {line['evaluation_of_all_seconds']:15.2f} s",
            flush=True,
        )
    if arguments.json:
        machine = platform.processor() or platform.machine()
        found = {
            "machine": machine,
            "method": "ditto",
            "model": "logistic",
            "samples": SAMPLES,
            "batch": BATCH,
            "lines": lines,
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
