"""Gradients of one batch of every client at once.

What is differentiated is the SUM of the clients' losses with respect to stacked parameters: clients share no variable,
so each client's slice is its own gradient, and autograd runs once for the cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.models.descent import Share, descending, used_once
from tailorfl.models.dropout import dropout_key
from tailorfl.models.functional import Model
from tailorfl.models.mapping import Level, over_clients
from tailorfl.training.objective import Loss
from tailorfl.training.packing import Packed
from tailorfl.training.sample_privacy import Release
from tailorfl.training.terms import Seen, Term

Gradient = Callable[..., TensorDict]
"""`grad(parameters, of="", batch=0)`: the gradient of component `of` at `parameters` on a batch of the step."""
Direction = Callable[..., TensorDict]
"""`direction(state, grad, *given)`: what to descend along, by the names of the trained parameters."""


@dataclass
class Carry:
    """Tensors of one component that travel through the training loop."""

    trained: dict[str, Tensor]
    """Owned and updated in place, [clients, ...] (or without the client axis for one client)."""
    moving: dict[str, Tensor]
    """Owned batch-norm buffers, updated in place."""
    fixed: dict[str, Tensor]
    """Neither trained nor owned; without a client axis where all clients share them."""
    shared: frozenset[str]
    """Names in `fixed` without a client axis."""
    given: tuple[Packed, ...] = ()
    """What each term of the loss is given, [clients, ...]."""
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = frozenset(self.trained)
        self.common = {n: t for n, t in self.fixed.items() if n in self.shared}
        self.own = {n: t for n, t in self.fixed.items() if n not in self.shared}

    def keep(self, buffers: dict[str, Tensor]) -> None:
        """Writes new batch-norm buffers."""
        for name, buffer in buffers.items():
            self.moving[name].copy_(buffer)


Pass = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""(x, y, weight, key) of one client."""


@dataclass(frozen=True)
class Batch:
    """One batch of every active client: [clients, batch, ...]."""

    x: Tensor
    y: Tensor
    weight: Tensor | None
    """1 for real samples, 0 for padding; None if all are real."""
    keys: Tensor
    """[clients] int64 keys of the dropout masks and of privacy noise."""
    release: Release | None = None
    """How a private sum becomes a gradient; None without privacy."""

    def seen(self, clients: Level) -> Pass:
        """(x, y, weight, key) as the code of one client sees them inside a map over clients."""
        weight = None if self.weight is None else clients.one(self.weight)
        return clients.one(self.x), clients.one(self.y), weight, clients.one(self.keys)

    def only(self) -> Pass:
        """(x, y, weight, key) of the one client there is, without the client axis."""
        return self.x[0], self.y[0], None if self.weight is None else self.weight[0], self.keys[0]


@dataclass(frozen=True)
class Objective:
    """The model and loss that are differentiated."""

    model: Model
    loss: Loss
    terms: tuple[Term, ...] = ()
    """What a method adds to the loss, or puts in its place."""

    def value(
        self,
        values: dict[str, Tensor],
        constant: dict[str, Tensor],
        moving: dict[str, Tensor],
        trained: frozenset[str],
        batch: Pass,
        given: Sequence[Packed] = (),
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns (loss, new buffers) of one client.

        `batch` is (x, y, weight, key); `given` what each term is given.
        """
        x, y, weight, key = batch
        buffers = {n: b.clone() for n, b in moving.items()}
        state = {**constant, **values, **buffers}
        if not self.terms:
            with dropout_key(key):
                outputs = self.model.forward_train(state, x, trained)
            return self.loss(outputs, y, weight), buffers
        with dropout_key(key):
            outputs, features = self.model.features_train(state, x, trained)
        own = {n: t for n, t in state.items() if n not in self.model.sizes}
        seen = Seen(self.model, self.loss, (x, y, weight), outputs, features, own)
        parts = [] if any(term.replaces for term in self.terms) else [seen.loss]
        parts += [term.function(seen, *g.unpack()) for term, g in zip(self.terms, given, strict=True)]
        return reduce(torch.add, parts), buffers


def sum_gradient(
    objective: Objective,
    carry: Carry,
    leaves: Sequence[Tensor],
    batch: Batch,
    stacked: bool,
    shares: Mapping[int, Share],
) -> tuple[Tensor, list[Tensor | None]]:
    """Returns each client's loss and gradient; `leaves` are the trained tensors, requiring gradients.

    Those in `shares`, by the place of their memory, take their step on the way; their gradient is None.
    """
    with descending(shares) as descent:
        values, found, buffers = gradients_of(objective, carry, leaves, batch, stacked)
    carry.keep(buffers)
    rest = [k for k, leaf in enumerate(leaves) if leaf.data_ptr() not in descent.taken]
    own = dict(zip(rest, filled([found[k] for k in rest], [leaves[k] for k in rest]), strict=True))
    return values, [own.get(k) for k in range(len(leaves))]


def gradients_of(
    objective: Objective, carry: Carry, leaves: Sequence[Tensor], batch: Batch, stacked: bool
) -> tuple[Tensor, tuple[Tensor | None, ...], dict[str, Tensor]]:
    """Returns each client's loss, its gradient at `leaves` (None where the loss does not depend on one), and its new
    batch-norm buffers.
    """
    with torch.enable_grad():
        values, buffers = _losses(objective, carry, leaves, batch, stacked)
        found: Sequence[Tensor | None] = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
    return values.detach(), tuple(found), buffers


def filled(found: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Gradients with zeros where the loss does not depend on a leaf."""
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


def single_users(
    objective: Objective, carry: Carry, leaves: Sequence[Tensor], batch: Batch, stacked: bool
) -> tuple[bool, ...]:
    """Returns which of `leaves` enter the loss through one layer only, which could take their step by itself."""
    with torch.enable_grad():
        return used_once(_losses(objective, carry, leaves, batch, stacked)[0], leaves)


def _losses(
    objective: Objective, carry: Carry, leaves: Sequence[Tensor], batch: Batch, stacked: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Each client's loss, and its new batch-norm buffers."""
    if not stacked:
        at, constant = dict(zip(carry.trained, leaves, strict=True)), {**carry.common, **carry.own}
        return objective.value(at, constant, carry.moving, carry.names, batch.only(), carry.given)
    with over_clients(len(batch.keys)) as clients:
        value, moved = objective.value(
            {name: clients.one(leaf) for name, leaf in zip(carry.trained, leaves, strict=True)},
            {**carry.common, **clients.each(carry.own)},
            clients.each(carry.moving),
            carry.names,
            batch.seen(clients),
            [given.map(clients.one) for given in carry.given],
        )
        return clients.all(value), {name: clients.all(t) for name, t in moved.items()}
