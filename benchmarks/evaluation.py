"""Personal models of many clients on one common test set: a plain PyTorch loop against this library's engines.

Every client has a CNN2 of its own (421,642 scalars); all are evaluated on the same images of 28 x 28, as the union of
all clients' test parts. The plain loop runs one module after another on resident tensors in evaluation mode without
gradients, in batches of the size that is best for it. Process time of one thread, in alternation:

    python benchmarks/evaluation.py --clients 100 --images 10000 --json benchmarks/results/evaluation.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

import tailorfl.methods  # noqa: F401  registers the methods
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.make import make_engine
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

BATCHES = (50, 100, 250, 1000)
"""Batch sizes that the plain loop tries."""


def simulation(clients: int, images: int, engine: str) -> Simulation:
    """Local training of CNN2 before its first round; the test parts of all clients together are `images`."""
    generator = torch.Generator().manual_seed(0)
    total = clients + images
    source = Source(
        "random",
        torch.randn(total, 1, 28, 28, generator=generator),
        torch.randint(0, 10, (total,), generator=generator),
        "classification",
        10,
    )
    train = tuple(np.array([i]) for i in range(clients))
    none = tuple(np.empty(0, dtype=np.int64) for _ in train)
    test = tuple(clients + part for part in np.array_split(np.arange(images), clients))
    data = Federation(source, train, none, test, tuple(map(str, range(clients))), clients)
    model = Model(lambda: build("cnn2", (1, 28, 28), 10))
    sim = Simulation(make_method("local"), data, model, TrainConfig(), engine=make_engine(engine))
    states = [model.init(i) for i in range(clients)]
    names = list(states[0].keys())
    stack = TensorDict({f"{n}": torch.stack([s[n] for s in states]) for n in names}, batch_size=[clients])
    sim.states.put(
        range(clients), TensorDict({"v": stack}, batch_size=[clients]) if "v" in sim.start else stack
    )
    return sim


def plain_loop(sim: Simulation, batch: int) -> Callable[[], Tensor]:
    """Returns the accuracy of every client's model on all test images."""
    module = build("cnn2", (1, 28, 28), 10).eval()
    source, rows = sim.federation.source, torch.from_numpy(sim.federation.global_test())
    x, y = source.x[rows], source.y[rows]
    models = [
        m[k] for ids, m in sim.personal_models(range(sim.federation.num_clients)) for k in range(len(ids))
    ]

    def run() -> Tensor:
        found = []
        with torch.no_grad():
            for state in models:
                for name, parameter in module.named_parameters():
                    parameter.data = state[name]
                right = [
                    (module(part).argmax(1) == labels).sum()
                    for part, labels in zip(x.split(batch), y.split(batch), strict=True)
                ]
                found.append(torch.stack(right).sum() / len(x))
        return torch.stack(found)

    return run


def main() -> None:
    """Measures and prints one line a way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--engines", nargs="*", default=["sequential", "vectorized"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    small = simulation(2, min(1000, arguments.images), "sequential")
    trials = {}
    for batch in BATCHES:
        run = plain_loop(small, batch)
        run()
        begin = time.process_time()
        run()
        trials[batch] = time.process_time() - begin
    best = min(trials, key=trials.__getitem__)
    sims = {e: simulation(arguments.clients, arguments.images, e) for e in arguments.engines}
    protocol = Protocol(("global",))
    runs: dict[str, Callable[[], object]] = {"plain": plain_loop(next(iter(sims.values())), best)}
    runs |= {e: (lambda sim=sim: evaluate(sim, protocol)) for e, sim in sims.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    results = {}
    for _ in range(arguments.repeat):
        for name, run in runs.items():
            begin = time.process_time()
            results[name] = run()
            seconds[name].append(time.process_time() - begin)
    expected = results["plain"]
    for engine in sims:
        found = torch.tensor([r["accuracy"] for r in results[engine] if r["model"] == "personal"])
        apart = float((found - expected).abs().max())
        if apart > 2.5 / arguments.images:  # ties of float rounding
            raise SystemExit(f"{engine} and the plain loop disagree: accuracies differ by {apart}")
    print(f"{arguments.clients} models x {arguments.images} images; the plain loop takes {best} at a time")
    for name, values in seconds.items():
        ratio = np.median(np.array(seconds["plain"]) / np.array(values))
        print(f"{name:11s} {min(values):8.2f} s   {ratio:.2f} x")
    if arguments.json:
        out = {
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "clients": arguments.clients,
            "images": arguments.images,
            "batch_of_the_plain_loop": best,
            "seconds": {name: min(values) for name, values in seconds.items()},
            "times_faster_than_plain": {
                name: float(np.median(np.array(seconds["plain"]) / np.array(v)))
                for name, v in seconds.items()
            },
        }
        arguments.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
