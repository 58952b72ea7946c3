"""Personal models of many clients on one common test set: a plain PyTorch loop against this library's engines.

Every client has a CNN2 of its own (421,642 scalars); all are evaluated on the same images of 28 x 28, as the union of
all clients' test parts. The plain loop is what one writes for speed: one module after another on resident tensors in
`torch.inference_mode`, in torch's layout or channels last, with ReLU or pooling first (the outputs are the same), in
batches of several sizes: it takes what is fastest of all of that. Process time of one thread, in alternation:

    python benchmarks/evaluation.py --clients 100 --images 10000 --json benchmarks/results/evaluation.json

"Limits" are parts of the work in the shapes of one batch, each by itself with its operands in the cache, and the rate
of a product of 1024³; `--processor` is what the file of results calls the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.choice import make_engine
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

BATCHES = (20, 50, 100, 200, 500)
"""Batch sizes that the plain loop tries."""
TRIES = 3
"""How often it tries each."""


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


@dataclass(frozen=True)
class Way:
    """How the plain loop runs a module."""

    channels_last: bool
    pool_first: bool
    batch: int

    def __str__(self) -> str:
        """For people."""
        layout = "channels last" if self.channels_last else "torch's layout"
        return f"{layout}, {'pooling' if self.pool_first else 'ReLU'} first, {self.batch} images at a time"


def plain_loop(sim: Simulation, way: Way) -> Callable[[], Tensor]:
    """Return the accuracy of every client's model on all test images."""
    module = build("cnn2", (1, 28, 28), 10).eval()
    layout = torch.channels_last if way.channels_last else torch.contiguous_format
    module = module.to(memory_format=layout)
    names = [name for name, _ in module.named_parameters()]
    parameters = list(module.parameters())
    if way.pool_first:
        module = torch.nn.Sequential(*pooling_first(module))
    source, rows = sim.federation.source, torch.from_numpy(sim.federation.global_test())
    batches = [
        (torch.empty_like(x, memory_format=layout).copy_(x), y)
        for x, y in zip(source.x[rows].split(way.batch), source.y[rows].split(way.batch), strict=True)
    ]
    models = [
        m[k] for ids, m in sim.personal_models(range(sim.federation.num_clients)) for k in range(len(ids))
    ]

    def run() -> Tensor:
        found = []
        with torch.inference_mode():
            for state in models:
                for name, parameter in zip(names, parameters, strict=True):
                    parameter.copy_(state[name])
                right = [(module(x).argmax(1) == y).sum() for x, y in batches]
                found.append(torch.stack(right).sum() / len(rows))
        return torch.stack(found)

    return run


def pooling_first(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a chain, each pooling before the ReLU that stands before it."""
    layers = [part for part in module.modules() if not list(part.children())]
    for k, part in enumerate(layers):
        if isinstance(part, torch.nn.MaxPool2d) and isinstance(layers[k - 1], torch.nn.ReLU):
            layers[k - 1 : k + 1] = [part, layers[k - 1]]
    return layers


def best_way(images: int) -> tuple[Way, dict[str, float]]:
    """The fastest way of the plain loop, and seconds of a model of all ways on so many images."""
    small = simulation(1, min(1000, images), "sequential")
    trials: dict[Way, float] = {}
    for last, first, batch in itertools.product((False, True), (False, True), BATCHES):
        way = Way(last, first, batch)
        run = plain_loop(small, way)
        run()
        trials[way] = min(timed(run) for _ in range(TRIES))
    return min(trials, key=trials.__getitem__), {str(way): seconds for way, seconds in trials.items()}


def timed(run: Callable[[], object]) -> float:
    """Process seconds."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def limits(clients: int, images: int, batch: int) -> dict[str, dict[str, float]]:
    """Seconds of the parts of the work, each by itself, and GFLOP/s."""
    layers = pooling_first(build("cnn2", (1, 28, 28), 10).eval().to(memory_format=torch.channels_last))
    found: dict[str, dict[str, float]] = {}
    repeats = max(1, 1000 // batch)
    with torch.inference_mode():
        square = torch.randn(1024, 1024)
        rate = 2 * 1024**3 / min(timed(lambda: square @ square) for _ in range(10)) / 1e9
        found["a product of 1024³"] = {"gflop_per_s": rate}
        x = torch.empty(batch, 1, 28, 28, memory_format=torch.channels_last).normal_()
        for k, layer in enumerate(layers):

            def run(layer: torch.nn.Module = layer, x: Tensor = x) -> None:
                for _ in range(repeats):
                    layer(x)

            run()
            seconds = min(timed(run) for _ in range(10)) / (repeats * batch) * clients * images
            y = layer(x)
            weight = getattr(layer, "weight", None)
            line = {"seconds": seconds}
            if weight is not None:
                flop = 2 * weight.numel() * (y[0, 0].numel() if y.dim() == 4 else 1)
                line["gflop_per_s"] = flop * clients * images / seconds / 1e9
            found[f"{k} {type(layer).__name__}"] = line
            x = y
    return found


def main() -> None:
    """Measure and print one line a way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--engines", nargs="*", default=["sequential", "vectorized"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processor", default=platform.processor() or platform.machine())
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    best, trials = best_way(arguments.images)
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
            print(f"{name} {seconds[name][-1]:.2f} s", flush=True)
    expected = results["plain"]
    for engine in sims:
        found = torch.tensor([r["accuracy"] for r in results[engine] if r["model"] == "personal"])
        apart = float((found - expected).abs().max())
        if apart > 2.5 / arguments.images:  # ties of float rounding
            raise SystemExit(f"{engine} and the plain loop disagree: accuracies differ by {apart}")
    print(f"{arguments.clients} models x {arguments.images} images; the plain loop: {best}")
    for name, values in seconds.items():
        ratio = np.median(np.array(seconds["plain"]) / np.array(values))
        print(f"{name:11s} {min(values):8.2f} s   {ratio:.2f} x")
    parts = limits(arguments.clients, arguments.images, best.batch)
    for name, line in parts.items():
        print(f"{name:20s} " + "  ".join(f"{value:8.1f} {what}" for what, value in line.items()))
    if arguments.json:
        out = {
            "machine": arguments.processor,
            "torch": torch.__version__,
            "clients": arguments.clients,
            "images": arguments.images,
            "plain_loop": str(best),
            "plain_loop_seconds_of_1000_images": trials,
            "limits": parts,
            "seconds": {name: min(values) for name, values in seconds.items()},
            "times_faster_than_plain": {
                name: float(np.median(np.array(seconds["plain"]) / np.array(v)))
                for name, v in seconds.items()
            },
        }
        arguments.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
