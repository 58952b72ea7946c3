"""Rounds of FedAvg on a GPU: a plain PyTorch loop against this library's engines, on CNN2 and on LoRA.

`cnn2`: 100 clients x 60 images of 28x28, batch 10. `lora`: 100 clients x 8 sentences of 32 tokens, batch 4, LoRA of
rank 8 on a frozen BERT of MiniLM's size, drawn at random. One epoch of SGD each. The plain loop has data, module and
server state on the GPU and nothing else in its way. Wall time of a round, the ways in turn: the best, and the median of
the plain loop's time over each engine's; the peak of GPU memory of each way. TF32 is off.

    python benchmarks/gpu.py --repeat 5 --json benchmarks/results/gpu.json

Without a GPU it says so and measures nothing; `--device cpu` tries the script itself out (with few `--clients`).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import tailorfl.methods  # noqa: F401  registers the methods
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.make import make_engine
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

RATE = 0.01
BERT = {"hidden": 384, "layers": 6, "heads": 12, "intermediate": 1536, "vocabulary": 30522, "length": 512}
WORK = {"cnn2": ((1, 28, 28), 10, 60, 10, "fedavg"), "lora": ((32,), 2, 8, 4, "fedit")}
"""Shape of a sample, classes, samples of a client, batch, method."""
ENGINES = ("sequential", "vectorized", "auto")


def module(name: str) -> nn.Module:
    """A fresh module."""
    shape, classes = WORK[name][:2]
    if name == "lora":
        return build("bert", shape, classes, lora=8, lora_dropout=0.0, pooling="mean", **BERT)
    return build(name, shape, classes)


def source(name: str, clients: int) -> Source:
    """Random samples."""
    shape, classes, samples = WORK[name][:3]
    rng, total = torch.Generator().manual_seed(0), clients * samples
    x = torch.randn(total, *shape, generator=rng)
    if name == "lora":
        x = torch.randint(1000, 30000, (total, *shape), generator=rng)
    return Source("random", x, torch.randint(0, classes, (total,), generator=rng), "classification", classes)


def plain(name: str, clients: int, device: torch.device) -> Callable[[], object]:
    """One round by hand."""
    samples, batch = WORK[name][2:4]
    data, net = source(name, clients), module(name).to(device)
    x, y = data.x.to(device), data.y.to(device)
    for path, p in net.named_parameters():
        p.requires_grad_(name != "lora" or "lora_" in path or path.startswith("head"))
    leaves = [p for p in net.parameters() if p.requires_grad]
    server = [p.detach().clone() for p in leaves]

    def step() -> list[Tensor]:
        total = [torch.zeros_like(p) for p in server]
        for client in range(clients):
            with torch.no_grad():
                torch._foreach_copy_(leaves, server)
            order = client * samples + torch.randperm(samples).to(device)
            for rows in torch.split(order, batch):
                gradient = torch.autograd.grad(cross_entropy(net(x[rows]), y[rows]), leaves)
                with torch.no_grad():
                    torch._foreach_add_(leaves, list(gradient), alpha=-RATE)
            torch._foreach_add_(total, [p.detach() for p in leaves])
        torch._foreach_copy_(server, [t / clients for t in total])
        return [p.cpu() for p in server]

    return step


def simulation(name: str, clients: int, engine: str, device: str) -> Simulation:
    """The same rounds in an engine."""
    _, _, samples, batch, method = WORK[name]
    rows = tuple(np.arange(i * samples, (i + 1) * samples) for i in range(clients))
    none = tuple(np.empty(0, dtype=np.int64) for _ in rows)
    data = Federation(source(name, clients), rows, none, none, tuple(map(str, range(clients))), clients)
    config = TrainConfig(epochs=1, batch_size=batch, lr=RATE)
    chosen = make_engine(engine, device=device)
    return Simulation(make_method(method), data, Model(lambda: module(name)), config, engine=chosen)


def measure(name: str, clients: int, device: str, repeat: int) -> dict[str, dict[str, float]]:
    """Seconds, times faster than the plain loop, and peak megabytes on the GPU, of every way."""
    where = torch.device(device)
    runs: dict[str, Callable[[], object]] = {"plain": plain(name, clients, where)}
    runs |= {engine: simulation(name, clients, engine, device).step for engine in ENGINES}
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    peak = dict.fromkeys(runs, 0.0)
    for again in range(repeat + 1):  # the first warms up
        for way, run in runs.items():
            if where.type == "cuda":
                torch.cuda.reset_peak_memory_stats(where)
            begin = time.perf_counter()
            run()  # ends with results on the host
            if again:
                seconds[way].append(time.perf_counter() - begin)
            if where.type == "cuda":
                peak[way] = torch.cuda.max_memory_allocated(where) / 2**20
    return {
        way: {
            "seconds": min(took),
            "times_faster": statistics.median(p / t for p, t in zip(seconds["plain"], took, strict=True)),
            "peak_mb": peak[way],
        }
        for way, took in seconds.items()
    }


def main() -> None:
    """Measures and prints a line for every way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--models", nargs="*", default=list(WORK))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        sys.exit(f"no GPU was found (torch {torch.__version__}); nothing was measured")
    torch.backends.cudnn.allow_tf32 = False
    name = platform.processor() if arguments.device == "cpu" else torch.cuda.get_device_name(arguments.device)
    out: dict[str, object] = {"machine": name, "torch": torch.__version__, **vars(arguments)}
    out["json"] = None
    for model in arguments.models:
        found = measure(model, arguments.clients, arguments.device, arguments.repeat)
        out[model] = found
        for way, n in found.items():
            print(
                f"{model:6s} {way:12s} {n['seconds']:8.4f} s  {n['times_faster']:6.2f} x  {n['peak_mb']:8.0f} MB",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
