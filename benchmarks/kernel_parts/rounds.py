"""Rounds of the plain loop and of the vectorized engine against the rate of a large product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from kernel_parts.steps import NETWORKS
from kernel_parts.timing import BATCH, RATE, Cell, Table, in_turn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tailorfl.benchmark.plain_loop import LoopClient, fastest, shuffled
from tailorfl.core.method import make_method
from tailorfl.data.build import build as federate
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.choice import make_engine
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.objective import LOSSES

BERT = {"hidden": 384, "layers": 6, "heads": 12, "intermediate": 1536, "vocabulary": 30522, "length": 512}
"""The sizes of all-MiniLM-L6-v2."""

RESNETS: dict[str, dict[str, object]] = {"resnet20": {"norm": "group"}}
SHARES = {"cnn2": 0.2, "resnet20": 0.1}
"""Which share of the 100 clients runs."""


def federated(x: Tensor, classes: int, clients: int) -> Federation:
    """Return clients with equal shares of samples, which have random classes."""
    y = torch.randint(0, classes, (len(x),))
    own, names = torch.arange(len(x)) // (len(x) // clients), tuple(map(str, range(clients)))
    source = Source(
        "random", x, y, "classification", classes, groups={"client": own}, group_names={"client": names}
    )
    return federate(source=source, partition="natural", split={"train": 1.0, "test": 0.0})


class Round:
    """One round of FedAvg of equal clients, with the plain loop and with the vectorized engine."""

    def __init__(self, model: Model, x: Tensor, classes: int, clients: int, batch: int = BATCH) -> None:
        self.data = federated(x, classes, clients)
        config = TrainConfig(epochs=1, batch_size=batch, lr=RATE)
        self.clients, self.batch, self.batches = clients, batch, len(x) // clients // batch
        self.steps = clients * self.batches
        self.start = tree.tensors(model.init(0))
        one = self.loop_clients()[:1]
        self.loop = fastest(model, self.data.source, LOSSES["classification"], config, self.start, one)
        engine = make_engine("vectorized", None)
        self.sim = Simulation(make_method("fedavg"), self.data, model, config, engine=engine)

    def loop_clients(self) -> list[LoopClient]:
        """Every client with its batches."""
        rows = (torch.as_tensor(r) for r in self.data.train)
        gradients = self.batches * self.batch
        return [LoopClient(1 / self.clients, shuffled(r, self.batch, gradients)) for r in rows]

    def plain(self) -> object:
        """A round of the loop."""
        return self.loop.round(self.start, self.loop_clients())

    def step(self) -> object:
        """One step of the loop, on the first client's first batch."""
        return self.loop.round(self.start, [LoopClient(1.0, self.loop_clients()[0].batches[:1])])

    def gflop(self) -> float:
        """GFLOP of a round, counted in one step."""
        with FlopCounterMode(display=False) as counter:
            self.step()
        return float(self.steps * counter.get_total_flops() / 1e9)

    def row(self, name: str, repeat: int, share: float = 1.0) -> dict[str, Cell]:
        """Return how near a round is to the rate of a large product; `share` is that of the clients which run.

        The product takes its turn with the rounds: on a busy machine the rate is not the same from minute to minute.
        """
        large, out = torch.randn(1024, 1024), torch.empty(1024, 1024)
        ways = {
            "product": lambda: torch.mm(large, large, out=out),
            "plain": self.plain,
            "engine": self.sim.step,
        }
        found = in_turn(ways, repeat, least=0.1)
        work, plain, engine = self.gflop(), found["plain"], found["engine"]
        limit = work / (2 * 1024**3 / 1e9) * found["product"]
        with Products() as products:
            self.step()
        alone = self.steps * products.seconds()
        return {
            "work": name,
            "GFLOP a round": work / share,
            "product GFLOP/s": work / limit,
            "limit s": limit / share,
            "loop s": plain / share,
            "loop GFLOP/s": work / plain,
            "loop % of limit": 100 * limit / plain,
            "engine s": engine / share,
            "engine GFLOP/s": work / engine,
            "engine % of limit": 100 * limit / engine,
            "engine: times as fast": plain / engine,
            "at most": plain / limit,
            "its products alone s": alone / share,
            "at most, by these": plain / alone,
        }


def networks() -> Table:
    """Return rounds of 100 clients of 60 samples; of large networks a share of them runs, and seconds are scaled."""
    table: Table = []
    for name, options in {**NETWORKS, **RESNETS}.items():
        shape, share = ((3, 32, 32) if name in RESNETS else (1, 28, 28)), SHARES.get(name, 1.0)
        clients = round(100 * share)
        model = Model(
            lambda name=name, options=options, shape=shape: build(name, shape, 10, **options)  # type: ignore[misc]
        )
        made = Round(model, torch.randn(clients * 60, *shape), 10, clients)
        table.append(made.row(name, 3 if share < 1 else 7, share))
    return table


def lora() -> Table:
    """Return rounds of LoRA (rank 8, query and value) on a BERT of 6 layers, 384 wide."""
    table: Table = []
    for clients, steps, batch, length in ((4, 1, 10, 64), (8, 2, 4, 32)):
        options = {**BERT, "lora": 8, "lora_dropout": 0.0, "pooling": "mean"}
        model = Model(lambda length=length, options=options: build("bert", (length,), 2, **options))  # type: ignore[misc]
        x = torch.randint(1000, 30000, (clients * steps * batch, length))
        made = Round(model, x, 2, clients, batch)
        table.append(made.row(f"batch {batch}, {length} tokens, {clients} clients × {steps} steps", repeat=3))
    return table


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the matrix products and convolutions that run inside, by operation and by the form of their operands."""

    ATEN = torch.ops.aten
    OPS = (
        ATEN.mm.default,
        ATEN.addmm.default,
        ATEN.bmm.default,
        ATEN.convolution.default,
        ATEN.convolution_backward.default,
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.OPS:
            self.seen[func, tuple(map(_form, args))] += 1
        return func(*args, **(kwargs or {}))

    def seconds(self) -> float:
        """Return the time of all of them, each alone and repeated."""
        total = 0.0
        for (op, forms), times in self.seen.items():
            operands = [
                torch.empty_strided(form.shape, form.stride).normal_() if isinstance(form, Laid) else form
                for form in forms
            ]
            total += times * in_turn({"": _apply(op, operands)}, repeat=3, least=0.01)[""]
        return total


class Laid(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _form(operand: Any) -> Any:
    if isinstance(operand, Tensor):
        return Laid(tuple(operand.shape), operand.stride())
    return tuple(operand) if isinstance(operand, list) else operand


def _apply(op: Any, operands: list[Any]) -> Callable[[], object]:
    return lambda: op(*operands)
