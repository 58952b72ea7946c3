"""One round of local training: an optimised plain PyTorch loop against this library's engines, side by side.

100 clients x 60 samples of 28x28, batch 10, one epoch of SGD, in alternation in one process. Process time of
one thread (steadier than wall time): its minimum over repetitions, and the median of the plain loop's time
over each engine's, repetition by repetition. Run on an otherwise idle machine:

    python benchmarks/local_training.py --repeat 7 --json benchmarks/results/local_training.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tailorfl.benchmark.clock import processor
from tailorfl.benchmark.plain_loop import LoopClient, fastest, shuffled
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.choice import make_engine
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.objective import LOSSES
from tailorfl.training.plan import Rows

CLIENTS, SAMPLES, BATCH, LR = 100, 60, 10, 0.01
WORK = {"logistic": {}, "mlp": {"hidden": (200,)}, "cnn2": {}}


def federation() -> Federation:
    """100 clients with 60 random samples each."""
    generator = torch.Generator().manual_seed(0)
    total = CLIENTS * SAMPLES
    source = Source(
        "random",
        torch.randn(total, 1, 28, 28, generator=generator),
        torch.randint(0, 10, (total,), generator=generator),
        "classification",
        10,
    )
    rows = tuple(np.arange(i * SAMPLES, (i + 1) * SAMPLES) for i in range(CLIENTS))
    none = tuple(np.empty(0, dtype=np.int64) for _ in rows)
    return Federation(source, rows, none, none, tuple(str(i) for i in range(CLIENTS)), CLIENTS)


def plain_loop(name: str, options: dict[str, object], data: Federation) -> tuple[Callable[[], object], str]:
    """FedAvg's round as one writes it for speed, and in which variant; draws new batches in every round."""
    model = Model(lambda: build(name, data.source.input_shape, 10, **options))
    start = tree.tensors(model.init(0))

    def client(rows: Rows) -> LoopClient:
        return LoopClient(1 / CLIENTS, shuffled(torch.from_numpy(rows), BATCH, SAMPLES // BATCH * BATCH))

    one = [client(data.train[0])]
    loop = fastest(model, data.source, LOSSES["classification"], TrainConfig(lr=LR), start, one)
    return lambda: loop.round(start, map(client, data.train)), str(loop.variant)


def simulation(
    name: str, options: dict[str, object], data: Federation, engine: str, chunk: int | None
) -> Simulation:
    """FedAvg in an engine; a step is a round."""
    model = Model(lambda: build(name, data.source.input_shape, 10, **options))
    config = TrainConfig(epochs=1, batch_size=BATCH, lr=LR)
    return Simulation(make_method("fedavg"), data, model, config, engine=make_engine(engine, chunk))


def main() -> None:
    """Measure and print one line a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(WORK))
    parser.add_argument("--chunk", type=int, default=None)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = federation()
    out: dict[str, object] = {
        "machine": processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "clients": CLIENTS,
        "samples": SAMPLES,
        "batch": BATCH,
        "repeat": arguments.repeat,
    }
    for name in arguments.models:
        plain, variant = plain_loop(name, WORK[name], data)
        runs = {"plain": plain}
        for engine in ("sequential", "vectorized"):
            runs[engine] = simulation(name, WORK[name], data, engine, arguments.chunk).step
        automatic = simulation(name, WORK[name], data, "auto", arguments.chunk)
        runs["auto"] = automatic.step
        for run in runs.values():
            run()
        seconds: dict[str, list[float]] = {key: [] for key in runs}
        for _ in range(arguments.repeat):
            for key, run in runs.items():
                begin = time.process_time()
                run()
                seconds[key].append(time.process_time() - begin)
        best = {key: min(values) for key, values in seconds.items()}
        paired = {
            key: float(np.median(np.array(seconds["plain"]) / np.array(v))) for key, v in seconds.items()
        }
        out[name] = {
            "seconds": best,
            "times_faster_than_plain": paired,
            "auto_chose": automatic.engine.name,
            "plain_variant": variant,
        }
        line = "".join(f"  {k} {best[k]:.4f} s ({paired[k]:.2f}x)" for k in runs)
        print(f"{name:10s}{line}  auto chose {automatic.engine.name}; plain loop: {variant}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
