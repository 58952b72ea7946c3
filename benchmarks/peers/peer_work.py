"""The work that all programs of this folder do, and how they are timed. Needs torch only: peers import it too.

FedAvg on 100 clients x 60 random samples of 28x28 in 10 classes: all clients in every round, plain SGD.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLIENTS, SAMPLES, SHAPE, CLASSES = 100, 60, (1, 28, 28), 10
BATCH, LR = 10, 0.01
CHECK_LR = 0.1
"""Rate of the checked round; higher, so that what the steps do stands far above rounding."""

CHECK_STEPS = {"logistic": 6, "cnn2": 1}
"""Steps of each client in the checked round, on all its samples at once: no order of batches to agree on."""

State = dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """One model's task: `x` [clients * samples, 1, 28, 28], `y` [clients * samples]; clients hold equal slices."""

    model: str
    x: Tensor
    y: Tensor
    init: State

    def samples(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels of one client, without a copy."""
        rows = slice(client * SAMPLES, (client + 1) * SAMPLES)
        return self.x[rows], self.y[rows]

    def network(self) -> nn.Sequential:
        """Return the network with the initial weights."""
        module = network(self.model)
        module.load_state_dict(self.init)
        return module

    def save(self, path: Path) -> None:
        """Write the task for programs of other environments."""
        torch.save({"model": self.model, "x": self.x, "y": self.y, "init": self.init}, path)

    @staticmethod
    def load(path: Path) -> Work:
        """Return the task that `save` wrote."""
        return Work(**torch.load(path, weights_only=True))


def network(model: str) -> nn.Sequential:
    """Return a module with the layers and name of tailorfl's `logistic` or `cnn2`."""
    if model == "logistic":
        return nn.Sequential(OrderedDict(flatten=nn.Flatten(), head=nn.Linear(784, CLASSES)))
    if model != "cnn2":
        raise ValueError(f"no model '{model}': logistic or cnn2")
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 32, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(3136, 128),
            fc_relu1=nn.ReLU(),
            head=nn.Linear(128, CLASSES),
        )
    )


def make_work(model: str) -> Work:
    """Return the task: random inputs and labels of a fixed seed, initial weights of another."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS * SAMPLES, *SHAPE, generator=generator)
    y = torch.randint(0, CLASSES, (CLIENTS * SAMPLES,), generator=generator)
    torch.manual_seed(0)
    return Work(model, x, y, {name: value.detach() for name, value in network(model).state_dict().items()})


def train_client(module: nn.Module, parameters: Sequence[Tensor], x: Tensor, y: Tensor, job: Job) -> None:
    """Train in place by SGD as one writes it for speed: `autograd.grad`, foreach updates, no optimizer object."""
    for _ in range(job.epochs):
        for batch in torch.randperm(len(x)).split(job.batch_size):
            loss = F.cross_entropy(module(x[batch]), y[batch])
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-job.lr)


def descendants_seconds() -> float:
    """Return the CPU seconds, user and system, of all living descendants of this process and of what they waited for.

    Linux only; counted in ticks of 10 ms. A program whose work is done by other processes (Ray's) is charged for all
    of them.
    """
    stats: dict[int, tuple[int, int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # it ended since the folder was listed
                continue
            stats[int(entry)] = int(fields[1]), sum(int(ticks) for ticks in fields[11:15])
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    total, stack = 0, list(children.get(os.getpid(), ()))
    while stack:
        pid = stack.pop()
        total += stats[pid][1]
        stack += children.get(pid, ())
    return total / os.sysconf("SC_CLK_TCK")


@dataclass
class Job:
    """Some rounds of FedAvg, and the clocks between them: programs call `mark` before the first and after each."""

    epochs: int
    batch_size: int
    lr: float
    rounds: int
    weights: State | None = None
    _ended: list[tuple[float, float]] = field(default_factory=list)
    _begun: list[tuple[float, float]] = field(default_factory=list)

    def mark(self) -> None:
        """Note a boundary of rounds; what the noting costs is charged to no round."""
        waited = resource.getrusage(resource.RUSAGE_CHILDREN)
        own, wall = time.process_time(), time.perf_counter()
        others = descendants_seconds() + waited.ru_utime + waited.ru_stime
        self._ended.append((own + others, wall))
        self._begun.append((time.process_time() + others, time.perf_counter()))

    def seconds(self) -> tuple[list[float], list[float]]:
        """Return the CPU seconds of all processes, and the wall seconds, of every round."""
        pairs = list(zip(self._begun, self._ended[1:], strict=False))
        if len(pairs) != self.rounds:
            raise RuntimeError(f"{self.rounds} rounds were asked for, but {len(pairs)} were run")
        return [end[0] - begin[0] for begin, end in pairs], [end[1] - begin[1] for begin, end in pairs]


def main(version: str, run: Callable[[Work, Path, Sequence[Job]], None]) -> None:
    """Run one program: the round that is checked, if asked for, then the rounds that are timed; write files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--check", type=Path, help="where the weights after the checked round go")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    work = Work.load(arguments.work)
    check = Job(CHECK_STEPS[work.model], SAMPLES, CHECK_LR, 1)
    timed = Job(1, BATCH, LR, arguments.warmup + arguments.rounds)
    run(work, arguments.work, (check, timed) if arguments.check else (timed,))
    if arguments.check:
        torch.save(check.weights, arguments.check)
    cpu, wall = (seconds[arguments.warmup :] for seconds in timed.seconds())
    record = {"version": version, "torch": str(torch.__version__), "cpu": cpu, "wall": wall}
    arguments.out.write_text(json.dumps(record))
