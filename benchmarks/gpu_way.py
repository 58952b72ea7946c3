"""One way to do rounds of FedAvg, in a process of its own; `gpu.py` starts it and reads what it writes.

A way is a plain loop (`loop`, with data, module and server state on the device and nothing else in its way) or an
engine of this library, with what follows behind commas: `channels last`, `CUDA graph`, `tf32`, `bfloat16`, `chunk N`,
`grouped` (convolutions of all clients as one with groups, and not client by client). First a round of one full-batch
step for every client, whose weights are kept for the comparison; then rounds of mini-batches: two that warm up, and
those that are timed, each until its results are on the host.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.base import Engine
from tailorfl.engines.choice import make_engine
from tailorfl.engines.devices import computing
from tailorfl.engines.in_process import MOST, Vectorized
from tailorfl.engines.memory import fitting
from tailorfl.models import cohort_convs
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.cohort import TrainConfig

RATE, CHECK_RATE = 0.01, 0.1
"""Of timed rounds; of the round that is compared, higher so that the step stands far above rounding."""
WARM_UP, LEAST = 2, 3
"""Rounds before the clock starts, and rounds that are timed at least."""
State = dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """A network and its clients, all of which take part in every round with one epoch of SGD."""

    shape: tuple[int, ...]
    classes: int
    clients: int
    samples: int
    batch: int
    network: str
    options: dict[str, Any] = field(default_factory=dict)
    method: str = "fedavg"

    def module(self) -> nn.Module:
        """Return the network, the same weights each time."""
        torch.manual_seed(0)
        return build(self.network, self.shape, self.classes, **self.options)

    def source(self) -> Source:
        """Return random samples, those of a client in a row."""
        rng, total = torch.Generator().manual_seed(0), self.clients * self.samples
        if self.method == "fedit":
            x = torch.randint(1000, 30000, (total, *self.shape), generator=rng)
        else:
            x = torch.randn(total, *self.shape, generator=rng)
        y = torch.randint(0, self.classes, (total,), generator=rng)
        return Source("random", x, y, "classification", self.classes)

    def trained(self, module: nn.Module) -> State:
        """Return the parameters that are trained, by name."""
        adapters = self.method == "fedit"
        named = dict(module.named_parameters())
        return {n: p for n, p in named.items() if not adapters or "lora_" in n or n.startswith("head")}


IMAGE = (1, 28, 28)
MINILM = {"hidden": 384, "layers": 6, "heads": 12, "intermediate": 1536, "vocabulary": 30522, "length": 512}
ADAPTERS = {"lora": 8, "lora_dropout": 0.0, "pooling": "mean"}
VIT_S = {"hidden": 384, "layers": 12, "heads": 6, "intermediate": 1536, "patch": 16}
WORKS = {
    "logistic": Work(IMAGE, 10, 100, 60, 10, "logistic"),
    "mlp": Work(IMAGE, 10, 100, 60, 10, "mlp", {"hidden": [200]}),
    "cnn2": Work(IMAGE, 10, 100, 60, 10, "cnn2"),
    "lora": Work((32,), 2, 100, 8, 4, "bert", {**ADAPTERS, **MINILM}, "fedit"),
    "resnet18": Work((3, 32, 32), 10, 20, 40, 20, "resnet18", {"norm": "group"}),
    "vit_s": Work((3, 224, 224), 10, 8, 20, 10, "vit", VIT_S),
}
TINY = {
    "lora": Work((8,), 2, 4, 8, 4, "bert", {**ADAPTERS, "hidden": 16, "vocabulary": 30522}, "fedit"),
    "vit_s": Work((3, 16, 16), 10, 3, 8, 4, "vit"),
    "resnet18": Work((3, 18, 18), 10, 3, 8, 4, "resnet18", {"norm": "group", "width": 8}),
}
"""To try the script out on a processor."""


class Loop:
    """FedAvg's round by hand.

    Args:
        work: what it does.
        device: where.
        words: what follows behind `loop`.
    """

    def __init__(self, work: Work, device: torch.device, words: set[str]) -> None:
        self.work, self.device = work, device
        self.last, self.graph = "channels last" in words, "CUDA graph" in words
        self.net = work.module().to(device)
        trained = work.trained(self.net)
        for p in self.net.parameters():
            p.requires_grad_(any(p is t for t in trained.values()))
        if self.last:
            self.net = self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            trained = work.trained(self.net)
        self.names, self.leaves = list(trained), list(trained.values())
        data = work.source()
        self.x, self.y = data.x.to(device), data.y.to(device)
        if self.last:
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.server = [p.detach().clone() for p in self.leaves]
        self.orders = torch.Generator().manual_seed(1)
        self.replay: Callable[[Tensor, Tensor], None] | None = None

    def step(self, x: Tensor, y: Tensor, rate: float) -> None:
        """One step of SGD on a batch."""
        gradient = torch.autograd.grad(cross_entropy(self.net(x), y), self.leaves)
        with torch.no_grad():
            torch._foreach_add_(self.leaves, list(gradient), alpha=-rate)

    def captured(self) -> Callable[[Tensor, Tensor], None]:
        """Return a step whose kernels were recorded once and are launched together."""
        x, y = self.x[: self.work.batch].clone(), self.y[: self.work.batch].clone()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self.step(x, y, RATE)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(x, y, RATE)

        def replay(inputs: Tensor, labels: Tensor) -> None:
            x.copy_(inputs)
            y.copy_(labels)
            graph.replay()

        return replay

    def round(self, batch: int, rate: float) -> State:
        """One round; returns the server's weights on the host."""
        work = self.work
        if self.graph and batch == work.batch and self.replay is None:
            self.replay = self.captured()
        drawn = [torch.randperm(work.samples, generator=self.orders) for _ in range(work.clients)]
        rows = torch.stack(drawn) + work.samples * torch.arange(work.clients)[:, None]
        rows = rows.to(self.device)  # once a round, not once a client
        total = [torch.zeros_like(p) for p in self.server]
        for client in range(work.clients):
            with torch.no_grad():
                torch._foreach_copy_(self.leaves, self.server)
            for some in torch.split(rows[client], batch):
                if self.graph and batch == work.batch and self.replay is not None:
                    self.replay(self.x[some], self.y[some])
                else:
                    self.step(self.x[some], self.y[some], rate)
            torch._foreach_add_(total, [p.detach() for p in self.leaves])
        torch._foreach_copy_(self.server, [t / work.clients for t in total])
        return {n: p.detach().cpu().contiguous() for n, p in zip(self.names, self.server, strict=True)}


def simulation(work: Work, engine: Any, batch: int, rate: float) -> Simulation:
    """The same rounds in an engine."""
    rows = tuple(np.arange(i * work.samples, (i + 1) * work.samples) for i in range(work.clients))
    none = tuple(np.empty(0, dtype=np.int64) for _ in rows)
    data = Federation(work.source(), rows, none, none, tuple(map(str, range(work.clients))), work.clients)
    config = TrainConfig(epochs=1, batch_size=batch, lr=rate)
    return Simulation(make_method(work.method), data, Model(work.module), config, engine=engine)


def way_of(
    work: Work, device: torch.device, way: str
) -> tuple[Callable[[], State], Callable[[], object], Any]:
    """Return the round that is compared, one that is timed, and the engine if there is one."""
    kind, *words = way.split(", ")
    if "grouped" in words:
        cohort_convs.SMALL_CONV = sys.maxsize
    if kind == "loop":
        loop = Loop(work, device, set(words))
        return (
            lambda: Loop(work, device, set(words)).round(work.samples, CHECK_RATE),
            (lambda: loop.round(work.batch, RATE)),
            None,
        )
    chunk = next((int(word.split()[1]) for word in words if word.startswith("chunk ")), None)
    precision = precision_in(words)

    def make() -> Engine:
        return make_engine(kind, chunk=chunk, device=str(device), precision=precision)

    engine = make()
    sim = simulation(work, engine, work.batch, RATE)

    def compared() -> State:
        once = simulation(work, make(), work.samples, CHECK_RATE)
        once.step()
        shared = once.method.shared(once.server)
        assert isinstance(shared, TensorDict)  # one architecture
        return {n: t.cpu().clone() for n, t in tree.leaves(shared)}

    return compared, sim.step, engine


def precision_in(words: Sequence[str]) -> str:
    """The precision that the words of a way name."""
    return next((word for word in words if word in ("tf32", "bfloat16")), "float32")


def in_precision_of(way: str, device: torch.device) -> AbstractContextManager[Any]:
    """The block for a loop's precision; engines have their own."""
    kind, *words = way.split(", ")
    return computing(precision_in(words) if kind == "loop" else "float32", device)


def main() -> None:
    """Do a way and write its record, and the weights of the round that is compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=list(WORKS))
    parser.add_argument("way")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the timed rounds, about")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda":
        cudnn: Any = torch.backends.cudnn
        parts: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
        for part in parts:
            part.fp32_precision = "ieee"
    work = TINY.get(given.model, WORKS[given.model]) if given.tiny else WORKS[given.model]
    with in_precision_of(given.way, device):
        compared, run, engine = way_of(work, device, given.way)
        torch.save(compared(), given.out.with_suffix(".pt"))
        start = {n: t.detach().cpu().clone() for n, t in work.trained(work.module()).items()}
        torch.save(start, given.out.with_suffix(".start.pt"))
        for _ in range(WARM_UP):
            run()
        seconds: list[float] = []
        end = time.perf_counter() + given.seconds
        while len(seconds) < LEAST or time.perf_counter() < end:
            begin = time.perf_counter()
            run()  # ends with results on the host
            seconds.append(time.perf_counter() - begin)
    record: dict[str, Any] = {"seconds": seconds, "clients": work.clients}
    if device.type == "cuda":
        record["held_mb"] = torch.cuda.memory_reserved(device) / 2**20
    vectorized = getattr(engine, "current", engine)
    if isinstance(vectorized, Vectorized) and vectorized.place.bytes_each:
        fit = fitting(device, max(vectorized.place.bytes_each.values()))
        record["at_once"] = min(MOST, fit, vectorized.most or MOST)
    if engine is not None:
        record["engine"] = engine.name
    given.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
