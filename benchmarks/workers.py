"""Wall time of a round with several worker processes, beside a plain PyTorch loop and one process.

FedAvg with CNN2 (or another model of benchmarks/local_training.py), 100 clients x 60 samples, batch 10, one epoch; the
loop and every process have one thread. In alternation; weights must agree to the bit. "Rounds at once" are whole rounds
of one process each, as many as workers, side by side: what the cores give to programs that share nothing. Needs as many
idle cores as workers:

    python benchmarks/workers.py --workers 2 --repeat 3 --json benchmarks/results/workers.json

`--cluster` takes the address of a Ray cluster (`local`, or that of `ray start`) and has workers there as well.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import local_training as work
import numpy as np
import torch

from tailorfl.benchmark.clock import processor
from tailorfl.core.method import make_method
from tailorfl.engines.choice import make_engine
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.cohort import TrainConfig


def side_by_side(run: Callable[[], object], count: int) -> float:
    """Return the wall seconds until as many processes have each done it."""
    begin = time.perf_counter()
    children = []
    for _ in range(count - 1):
        child = os.fork()
        if child == 0:
            run()
            os._exit(0)
        children.append(child)
    run()
    for child in children:
        os.waitpid(child, 0)
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print one line a way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cnn2", choices=list(work.WORK))
    parser.add_argument("--engine", default="vectorized")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--cluster", help="address of a Ray cluster, for another row with as many workers there"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data, options = work.federation(), work.WORK[arguments.model]
    model = Model(lambda: build(arguments.model, data.source.input_shape, 10, **options))
    config = TrainConfig(epochs=1, batch_size=work.BATCH, lr=work.LR)
    engines = {
        "one process": make_engine(arguments.engine),
        f"{arguments.workers} workers": make_engine(arguments.engine, workers=arguments.workers),
    }
    if arguments.cluster:
        engines[f"{arguments.workers} workers, Ray"] = make_engine(
            arguments.engine, workers=arguments.workers, cluster=arguments.cluster
        )
    sims = {
        name: Simulation(make_method("fedavg"), data, model, config, engine=engine)
        for name, engine in engines.items()
    }
    runs = {"plain loop": work.plain_loop(arguments.model, options, data)[0]}
    runs |= {name: sim.step for name, sim in sims.items()}
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.repeat):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    first, *others = (dict(tree.leaves(sim.server)) for sim in sims.values())
    if not all(torch.equal(t, other[path]) for other in others for path, t in first.items()):
        raise SystemExit("one process and several workers have different weights")
    at_once = f"{arguments.workers} rounds at once"
    seconds[at_once] = [
        side_by_side(sims["one process"].step, arguments.workers) / arguments.workers
        for _ in range(arguments.repeat)
    ]
    faster = {
        name: float(np.median(np.array(seconds["plain loop"]) / np.array(values)))
        for name, values in seconds.items()
    }
    print(
        f"{arguments.model}, {arguments.engine}, {os.cpu_count()} cores; wall time, weights equal to the bit"
    )
    for name, values in seconds.items():
        print(f"{name:18s} {min(values):8.3f} s   {faster[name]:.2f} x")
    if arguments.json:
        out = {
            "machine": processor(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "model": arguments.model,
            "engine": arguments.engine,
            "wall_seconds": {name: min(values) for name, values in seconds.items()},
            "times_faster_than_plain": faster,
        }
        arguments.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
