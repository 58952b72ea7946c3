"""Gradients of one batch of every client at once.

What is differentiated is the SUM of the clients' losses with respect to stacked parameters: clients share no variable,
so each client's slice is its own gradient, and autograd runs once for the cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.models.cohort_layers import WeightStep, descending, used_once
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
    own: dict[str, Tensor]
    """Neither trained nor owned, each client's."""
    common: dict[str, Tensor]
    """The same without a client axis: all clients share them."""
    given: Packed
    """What each term of the loss is given, [clients, ...]."""

    @cached_property
    def names(self) -> frozenset[str]:
        """Of what is trained."""
        return frozenset(self.trained)

    def keep(self, buffers: dict[str, Tensor]) -> None:
        """Writes new batch-norm buffers."""
        for name, buffer in buffers.items():
            self.moving[name].copy_(buffer)

    @cached_property
    def given_one(self) -> tuple[tuple[Any, ...], ...]:
        """What each term is given, of the one client there is."""
        return self.given.unpack()  # type: ignore[no-any-return]


class Pass(NamedTuple):
    """A batch of one client."""

    x: Tensor
    y: Tensor
    weight: Tensor | None
    """1 for real samples, 0 for padding; None if all are real."""
    key: Tensor
    """int64 0-d, of the dropout masks and of privacy noise."""
    classes: Tensor | None = None
    """[classes] what a sample of a class counts in the loss; None: all alike."""


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
    classes: Tensor | None = None
    """[clients, classes] what a sample of a class counts in the loss; None: all alike."""

    def seen(self, clients: Level) -> Pass:
        """The batch as the code of one client sees it inside a map over clients."""
        tensors = {"x": self.x, "y": self.y, "key": self.keys}
        if self.weight is not None:
            tensors["weight"] = self.weight
        if self.classes is not None:
            tensors["classes"] = self.classes
        found = clients.each(tensors)
        return Pass(found["x"], found["y"], found.get("weight"), found["key"], found.get("classes"))

    def only(self) -> Pass:
        """That of the one client there is, without the client axis."""
        weight, classes = (None if t is None else t[0] for t in (self.weight, self.classes))
        return Pass(self.x[0], self.y[0], weight, self.keys[0], classes)


@dataclass(frozen=True)
class LocalObjective:
    """The model and loss that are differentiated."""

    model: Model
    loss: Loss
    terms: tuple[Term, ...] = ()
    """What a method adds to the loss, or puts in its place."""
    balanced: bool = False
    """Whether the last that is given is (γ log n_c,), by which the run's loss shifts the outputs in training."""

    @property
    def takes(self) -> bool:
        """Whether it is given anything of each client."""
        return bool(self.terms) or self.balanced

    def value(
        self,
        state: dict[str, Tensor],
        moving: Collection[str],
        trained: frozenset[str],
        batch: Pass,
        given: Sequence[Any] = (),
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns (loss, new buffers) of one client.

        `state` has all tensors of its model, `moving` names the buffers to update; `given` is what each term is given.
        """
        buffers, loss = {n: state[n].clone() for n in moving}, self.loss.weighed(batch.classes)
        if buffers:
            state = {**state, **buffers}
        if self.balanced:
            *given, (prior,) = given
            loss = loss.shifted(prior)
        # A mask key is set where masks are drawn: without dropout that is nowhere.
        with dropout_key(batch.key) if self.model.has_dropout else nullcontext():
            if not self.terms:
                outputs = self.model.forward_train(state, batch.x, trained)
                return loss(outputs, batch.y, batch.weight), buffers
            outputs, features = self.model.features_train(state, batch.x, trained)
        seen = Seen(self.model, loss, batch[:3], outputs, features, state)
        parts = [] if any(term.replaces for term in self.terms) else [seen.loss]
        for term, own in zip(self.terms, given, strict=True):
            value, kept = term.value(seen, own)
            parts.append(value)
            buffers |= kept
        return reduce(torch.add, parts), buffers


def sum_gradient(
    objective: LocalObjective,
    carry: Carry,
    leaves: Sequence[Tensor],
    batch: Batch,
    shares: Mapping[int, WeightStep],
) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the loss and gradient of each client of a cohort; `leaves` are the trained tensors, requiring gradients.

    Those in `shares`, by the place of their memory, take their step on the way; their gradient is None.
    """
    taken: Collection[int] = ()
    if shares:
        with descending(shares) as descent:
            values, found, buffers = gradients_of(objective, carry, leaves, batch, stacked=True)
        taken = descent.taken
    else:
        values, found, buffers = gradients_of(objective, carry, leaves, batch, stacked=True)
    if buffers:
        carry.keep(buffers)
    if not taken:
        return values, list(filled(found, leaves))
    rest = [k for k, leaf in enumerate(leaves) if leaf.data_ptr() not in taken]
    own = dict(zip(rest, filled([found[k] for k in rest], [leaves[k] for k in rest]), strict=True))
    return values, [own.get(k) for k in range(len(leaves))]


def gradients_of(
    objective: LocalObjective, carry: Carry, leaves: Sequence[Tensor], batch: Batch, stacked: bool
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
    objective: LocalObjective, carry: Carry, leaves: Sequence[Tensor], batch: Batch
) -> tuple[bool, ...]:
    """Returns which of `leaves` enter the loss through one layer only, which could take their step by itself."""
    with torch.enable_grad():
        return used_once(_losses(objective, carry, leaves, batch, stacked=True)[0], leaves)


def _losses(
    objective: LocalObjective, carry: Carry, leaves: Sequence[Tensor], batch: Batch, stacked: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Each client's loss, and its new batch-norm buffers."""
    at = dict(zip(carry.trained, leaves, strict=True))
    if not stacked:
        state = {**carry.common, **carry.own, **carry.moving, **at}
        given = carry.given_one if objective.takes else ()
        return objective.value(state, carry.moving, carry.names, batch.only(), given)
    with over_clients(len(batch.keys)) as clients:
        state = {**carry.common, **clients.each({**carry.own, **carry.moving, **at})}
        given = carry.given.map(clients.one).unpack() if objective.takes else ()
        value, moved = objective.value(state, carry.moving, carry.names, batch.seen(clients), given)
        return clients.all(value), {name: clients.all(t) for name, t in moved.items()}
