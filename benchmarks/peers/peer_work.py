"""The work that all programs of this folder do, and how they are timed. Needs torch only: peers import it too.

Random samples of 28x28, equally many a client: all clients in every round, one epoch of plain SGD.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SHAPE = (1, 28, 28)
CHECK_LR = 0.1
"""Rate of the checked round; higher, so that what the steps do stands far above rounding."""

CHECK_STEPS = {"logistic": 6, "mlp": 3, "cnn2": 1, "dense": 3}
"""Steps of each client in the checked round, on all its samples at once: no order of batches to agree on."""

LAM = 1.0
"""Ditto's pull of the personal model towards the global one."""
ALPHA = 0.5
"""APFL's share of the personal model, at the start where it is learnt."""
PERSONAL = "personal."
"""Prefix of the first client's personal weights among those that are compared."""

State = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A method on a network, by so many clients."""

    method: str
    model: str
    clients: int
    samples: int = 60
    """Of each client."""
    batch: int = 10
    lr: float = 0.01
    classes: int = 10


EMNIST = Case("apfl", "dense", 340, samples=198, batch=20, lr=0.001, classes=62)
"""The shape of FedJAX's APFL example: its network and settings, EMNIST's mean number of samples of a writer."""


@dataclass(frozen=True)
class Work:
    """One case's data: `x` [clients * samples, 1, 28, 28], `y` [clients * samples]; clients hold equal slices."""

    case: Case
    x: Tensor
    y: Tensor
    init: State

    def samples(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels of one client, without a copy."""
        rows = slice(client * self.case.samples, (client + 1) * self.case.samples)
        return self.x[rows], self.y[rows]

    def network(self) -> nn.Sequential:
        """Return the network with the initial weights."""
        module = network(self.case.model, self.case.classes)
        module.load_state_dict(self.init)
        return module

    def save(self, path: Path) -> None:
        """Write the task for programs of other environments."""
        torch.save({"case": asdict(self.case), "x": self.x, "y": self.y, "init": self.init}, path)

    @staticmethod
    def load(path: Path) -> Work:
        """Return the task that `save` wrote."""
        saved = torch.load(path, weights_only=True)
        return Work(Case(**saved.pop("case")), **saved)


def network(model: str, classes: int = 10) -> nn.Sequential:
    """Return a module with the layers and names of tailorfl's `logistic`, `mlp` (`dense`: two layers) or `cnn2`."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    if model == "logistic":
        return nn.Sequential(layers | {"head": nn.Linear(784, classes)})
    if model in ("mlp", "dense"):
        width = 784
        for number in range(1, 2 if model == "mlp" else 3):
            layers |= {f"fc{number}": nn.Linear(width, 200), f"activation{number}": nn.ReLU()}
            width = 200
        return nn.Sequential(layers | {"head": nn.Linear(width, classes)})
    if model != "cnn2":
        raise ValueError(f"no model '{model}': logistic, mlp, dense or cnn2")
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
            head=nn.Linear(128, classes),
        )
    )


def make_work(case: Case) -> Work:
    """Return the task: random inputs and labels of a fixed seed, initial weights of another."""
    generator = torch.Generator().manual_seed(0)
    rows = case.clients * case.samples
    x = torch.randn(rows, *SHAPE, generator=generator)
    y = torch.randint(0, case.classes, (rows,), generator=generator)
    torch.manual_seed(0)
    init = network(case.model, case.classes).state_dict()
    return Work(case, x, y, {name: value.detach() for name, value in init.items()})


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
    """Some rounds, and the clocks between them: programs call `mark` before the first and after each."""

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
    check = Job(CHECK_STEPS[work.case.model], work.case.samples, CHECK_LR, 1)
    timed = Job(1, work.case.batch, work.case.lr, arguments.warmup + arguments.rounds)
    if arguments.check:
        run(work, arguments.work, (check,))
        torch.save(check.weights, arguments.check)
        return
    run(work, arguments.work, (timed,))
    cpu, wall = (seconds[arguments.warmup :] for seconds in timed.seconds())
    record = {"version": version, "torch": str(torch.__version__), "cpu": cpu, "wall": wall}
    arguments.out.write_text(json.dumps(record))
