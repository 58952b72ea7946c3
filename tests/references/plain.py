"""What the references are made of: a problem to solve, local training and averages, in plain torch.

Nothing in here or in the references imports the library. A reference is a function of a `Problem` and of its method's
options that returns an `Outcome`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

State = dict[str, Tensor]
"""A model: tensors by name, without the frozen ones."""
Batch = tuple[Tensor, Tensor]
"""(inputs, labels); labels may carry `class_weights` [classes], those of their client."""
Batches = list[list[Batch]]
"""Steps of one or more batches each."""


@dataclass(frozen=True)
class Settings:
    """Local training of a run."""

    lr: float
    momentum: float
    weight_decay: float
    clip: float | None
    linear: bool
    adamw: bool


def plain(train: Settings) -> Settings:
    """Steps p − η g at a constant rate; clipping stays."""
    return replace(train, momentum=0.0, weight_decay=0.0, linear=False, adamw=False)


@dataclass(frozen=True)
class Problem:
    """All that a run starts from and draws at random; nothing that it computes."""

    module: nn.Module
    init: State
    rounds: list[tuple[int, ...]]
    """Who is sampled in each round."""
    train: Settings
    sizes: list[int]
    """Training samples of every client."""
    batches: Callable[..., Batches]
    """(client, round, epochs=None, steps=None, first=0, purpose="train", per_step=1): the steps of a training.

    Without epochs and steps it has the run's length.
    """
    whole: Callable[[int, str], Batch]
    """(client, "train" or "val"): all samples."""
    validation: Batch
    """The server's own labelled samples."""
    public: Tensor
    """Inputs of the public set."""
    public_batches: Callable[[int, int, int, int], list[Tensor]]
    """(client, round, batch, steps): rows of the public set at each step of a client."""
    distil_batches: Callable[[int, int, int], list[Tensor]]
    """(round, batch, steps): rows of the public set at each step of the server."""
    orders: Callable[[int, int, int], list[Tensor]]
    """(round, count, passes): in which order the server's passes see what it was sent."""
    first_server: State
    """The server's state before the first round, by path: what it draws at random stands there."""
    first_private: list[State]
    """Every client's, likewise."""
    draws: dict[str, Any] = field(default_factory=dict)
    """Other random draws of the method."""

    siblings: dict[str, Problem] = field(default_factory=dict)
    """The problem of every architecture, where clients have several: they differ in module and states."""
    assignment: tuple[str, ...] = ()
    """The architecture of every client."""

    def kind(self, client: int) -> str:
        return self.assignment[client] if self.assignment else ""

    def of(self, client: int) -> Problem:
        """The problem as a client of its architecture sees it."""
        return self.siblings[self.kind(client)] if self.assignment else self

    @property
    def clients(self) -> range:
        return range(len(self.sizes))

    @property
    def parameters(self) -> list[str]:
        """Names of what is trained: no frozen tensors, no running statistics."""
        return [n for n, _ in self.module.named_parameters() if n in self.init]


@dataclass
class Outcome:
    """What a run ends with."""

    shared: State | None
    """The global model."""
    personal: list[State]
    """Every client's deployable model; empty where that is the global one."""
    server: State = field(default_factory=dict)
    """Some of the server's state, by path."""
    private: list[State] = field(default_factory=list)
    """Some of every client's state, by path."""


def mean_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """The mean of cross entropies, each times what its class counts."""
    counted = getattr(y, "class_weights", None)
    if counted is None:
        return cross_entropy(outputs, y)
    return cross_entropy(outputs, y, weight=counted.to(outputs), reduction="sum") / len(y)


def clone(state: State) -> State:
    return {n: t.detach().clone() for n, t in state.items()}


def mean(states: Sequence[State], weights: Sequence[float]) -> State:
    """Σ a_i state_i with a_i ∝ `weights`; integer counters are the first one's."""
    total = float(sum(weights))
    return {
        n: sum(s[n] * (a / total) for s, a in zip(states, weights, strict=True))  # type: ignore[misc]
        if first.is_floating_point()
        else first.clone()
        for n, first in states[0].items()
    }


def weights_of(p: Problem, clients: Sequence[int], weights: str) -> list[float]:
    return [float(p.sizes[i]) if weights == "samples" else 1.0 for i in clients]


def norms(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Layers with running statistics."""
    return [(n, m) for n, m in module.named_modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]


def last_linear(module: nn.Module) -> nn.Linear:
    return [m for m in module.modules() if isinstance(m, nn.Linear)][-1]


def outputs(p: Problem, state: State, x: Tensor) -> Tensor:
    """Logits in evaluation mode; nothing is recorded."""
    with torch.no_grad():
        return functional_call(copy.deepcopy(p.module).eval(), clone(state), (x,))


def features(module: nn.Module, state: State, x: Tensor) -> Tensor:
    """What goes into the last linear layer."""
    found: list[Tensor] = []
    handle = last_linear(module).register_forward_pre_hook(lambda _, args: found.append(args[0]))
    functional_call(module, state, (x,))
    handle.remove()
    return found[0]


Term = Callable[[State, Batch], Tensor]


class Trainer:
    """One model in training: gradients anywhere, and the steps of one torch optimizer.

    Args:
        steps: K, for the linear schedule.
        only: names of the parameters that train; None: all.
        train: settings, by default the problem's.
    """

    def __init__(
        self,
        p: Problem,
        start: State,
        steps: int,
        only: Collection[str] | None = None,
        train: Settings | None = None,
    ) -> None:
        self.rule = p.train if train is None else train
        self.names = [n for n in p.parameters if only is None or n in only]
        self.rest = {n: t.clone() for n, t in start.items() if n not in self.names}
        self.params = {n: start[n].detach().clone().requires_grad_() for n in self.names}
        self.module = copy.deepcopy(p.module).train()
        for name, norm in norms(self.module):
            norm.train(any(f"{name}.{n}" in self.names for n, _ in norm.named_parameters(recurse=False)))
        self.optimizer: torch.optim.Optimizer | None = None
        if self.names:
            rule, tensors = self.rule, list(self.params.values())
            if rule.adamw:
                self.optimizer = torch.optim.AdamW(tensors, rule.lr, weight_decay=rule.weight_decay)
            else:
                self.optimizer = torch.optim.SGD(
                    tensors, rule.lr, momentum=rule.momentum, weight_decay=rule.weight_decay
                )
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda k: 1 - k / steps if rule.linear and k < steps else 1.0
            )

    @property
    def now(self) -> State:
        """The parameters, detached."""
        return {n: t.detach().clone() for n, t in self.params.items()}

    @property
    def state(self) -> State:
        return clone({**self.rest, **self.params})

    def gradient(
        self, batch: Batch, at: State | None = None, term: Term | None = None, update_norms: bool = True
    ) -> State:
        """∇ of the mean loss (plus `term`) of a batch at the present parameters, or at those given."""
        point = {n: t.detach().clone().requires_grad_() for n, t in (self.now if at is None else at).items()}
        rest = self.rest if update_norms else clone(self.rest)
        state = {**rest, **point}
        loss = mean_loss(functional_call(self.module, state, (batch[0],)), batch[1])
        if term is not None:
            loss = loss + term(state, batch)
        found = torch.autograd.grad(loss, list(point.values()))
        return dict(zip(point, found, strict=True))

    def clipped(self, gradient: State) -> State:
        """A gradient of norm `clip` at most, for directions that add something to it which is not clipped."""
        if self.rule.clip is None:
            return gradient
        norm = torch.stack([t.square().sum() for t in gradient.values()]).sum().sqrt()
        return {n: t * min(1.0, self.rule.clip / (float(norm) + 1e-6)) for n, t in gradient.items()}

    def step(self, direction: State, clip: bool = True) -> None:
        """Clip as torch does, this model by itself, and take one step of the optimizer."""
        if self.optimizer is None:
            return
        for n, t in self.params.items():
            t.grad = direction[n].clone()
        if clip and self.rule.clip is not None:
            nn.utils.clip_grad_norm_(list(self.params.values()), self.rule.clip)
        self.optimizer.step()
        self.scheduler.step()


def pull(lam: float, centre: State) -> Term:
    """(λ/2)‖θ − centre‖² over the parameters that train."""

    def term(state: State, batch: Batch) -> Tensor:
        moving = [n for n, t in state.items() if t.requires_grad]
        return lam / 2 * sum(((state[n] - centre[n]) ** 2).sum() for n in moving)  # type: ignore[return-value]

    return term


def fit(
    p: Problem,
    start: State,
    steps: Batches,
    only: Collection[str] | None = None,
    term: Term | None = None,
    train: Settings | None = None,
) -> State:
    """LocalSGD: one step on every batch; a fresh optimizer."""
    trainer = Trainer(p, start, len(steps), only, train)
    for (batch,) in steps:
        if trainer.names:
            trainer.step(trainer.gradient(batch, term=term))
    return trainer.state


def norm_of(state: State) -> Tensor:
    return torch.sqrt(sum((t**2).sum() for t in state.values()))  # type: ignore[call-overload,no-any-return]


def add(a: State, b: State, factor: float | Tensor = 1.0) -> State:
    """a + factor · b, by the names of b; the rest as in a."""
    return {n: a[n] + factor * b[n] if n in b and a[n].is_floating_point() else a[n] for n in a}


def sub(a: State, b: State) -> State:
    return {n: a[n] - b[n] for n in a}
