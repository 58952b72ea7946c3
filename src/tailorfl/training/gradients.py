"""Gradients of one batch of every client at once.

What is differentiated is the SUM of the clients' losses with respect to stacked parameters: clients share no variable,
so each client's slice is its own gradient, and autograd runs once for the cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.models.cohort_layers import WeightStep, descending, used_once
from tailorfl.models.dropout import dropout_key
from tailorfl.models.functional import Model
from tailorfl.models.mapping import over_clients
from tailorfl.training.objective import Loss
from tailorfl.training.packing import NOTHING, Packed
from tailorfl.training.terms import Seen, Term

Gradient = Callable[..., TensorDict]
"""`grad(parameters, of="", batch=0)`: the gradient of component `of` at `parameters` on a batch of the step."""
Direction = Callable[..., TensorDict]
"""`direction(state, grad, *given)`: what to descend along, by the names of the trained parameters."""
Directions = Direction | Mapping[str, Direction]
"""One direction for all components together, or one for each, which take their steps in this order: a direction sees
the components before its own after their step, and returns what its own descends along."""


class Batch(NamedTuple):
    """A batch of every client that takes a step, [clients, ...]; for the code of one client, that client's."""

    x: Tensor
    y: Tensor
    weight: Tensor | None
    """1 for real samples, 0 for padding; None if all are real."""
    key: Tensor
    """int64 [clients], of the dropout masks and of privacy noise."""
    classes: Tensor | None = None
    """[clients, classes] what a sample of a class counts in the loss; None: all alike."""
    prior: Tensor | None = None
    """[clients, outputs] by which the balanced softmax shifts outputs; None: the loss is another one."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with every tensor changed, as into that of one client inside a map."""
        return Batch(*[None if tensor is None else change(tensor) for tensor in self])  # type: ignore[arg-type]


@dataclass
class Component:
    """Tensors of one of the models that train together, [clients, ...] (or of one client without that axis)."""

    trained: dict[str, Tensor]
    """Owned and updated in place."""
    moving: dict[str, Tensor]
    """Owned buffers of batch norm and what terms keep, updated in place."""
    own: dict[str, Tensor]
    """Neither trained nor owned, each client's."""
    common: dict[str, Tensor]
    """The same without an axis of clients: all clients share them."""
    given: Packed = NOTHING
    """What each term of the loss is given."""

    def __post_init__(self) -> None:
        self.names = frozenset(self.trained)
        """Of what is trained."""
        self.state = {**self.common, **self.own, **self.moving, **self.trained}
        """All of these tensors by name."""

    def keep(self, buffers: Mapping[str, Tensor]) -> None:
        """Write new buffers."""
        for name, buffer in buffers.items():
            self.moving[name].copy_(buffer)

    def of(self, which: slice | Tensor) -> Component:
        """Return the part of some clients; the trained tensors only lend their names."""
        moving, own = ({n: t[which] for n, t in tensors.items()} for tensors in (self.moving, self.own))
        return Component(self.trained, moving, own, self.common, self.given.map(lambda t: t[which]))


@dataclass(frozen=True)
class LocalObjective:
    """The model and loss that are differentiated."""

    model: Model
    loss: Loss
    terms: tuple[Term, ...] = ()
    """What a method adds to the loss, or puts in its place."""

    def value(
        self,
        state: dict[str, Tensor],
        moving: Collection[str],
        trained: frozenset[str],
        batch: Batch,
        given: Sequence[Any] = (),
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss, new buffers) of one client.

        Args:
            state: all tensors of its model.
            moving: names of the buffers to update in copies; of the others those in `state` are updated.
            trained: names of the tensors that train.
            batch: of this client.
            given: what each term is given.
        """
        buffers = {n: state[n].clone() for n in moving}
        if buffers:
            state = {**state, **buffers}
        loss = self.loss if batch.classes is None else self.loss.weighed(batch.classes)
        if batch.prior is not None:
            loss = loss.shifted(batch.prior)
        # A mask key is set where masks are drawn: without dropout that is nowhere.
        with dropout_key(batch.key) if self.model.has_dropout else nullcontext():
            if not self.terms:
                outputs = self.model.forward_train(state, batch.x, trained)
                return loss(outputs, batch.y, batch.weight), buffers
            outputs, features = self.model.features_train(state, batch.x, trained)
        seen = Seen(self.model, loss, batch[:3], outputs, features, state)
        parts = [] if any(term.replaces for term in self.terms) else [seen.loss]
        for term, inputs in zip(self.terms, given, strict=True):
            value, kept = term.value(seen, inputs)
            parts.append(value)
            buffers |= kept
        return reduce(torch.add, parts), buffers


def client_gradient(
    objective: LocalObjective, component: Component, leaves: Sequence[Tensor], batch: Batch
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of one client, 0-d, and its gradient at `leaves`, its trained tensors; updates its buffers."""
    with torch.enable_grad():
        # The running statistics are the training's own: the pass updates them where they are.
        given = component.given.unpack() if objective.terms else ()
        value, kept = objective.value(component.state, (), component.names, batch, given)
        slopes = torch.autograd.grad(value, leaves, allow_unused=True)
    if kept:
        component.keep(kept)
    return value.detach(), filled(slopes, leaves)


def cohort_gradient(
    objective: LocalObjective,
    component: Component,
    leaves: Sequence[Tensor],
    batch: Batch,
    shares: Mapping[int, WeightStep],
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss and gradient of each client of a cohort, and update its buffers.

    `leaves` are the trained tensors. Those in `shares`, by the place of their memory, take their step on the way; their
    gradient is None.
    """
    taken: Collection[int] = ()
    if shares:
        with descending(shares) as descent:
            values, slopes, buffers = gradients_of(objective, component, leaves, batch, stacked=True)
        taken = descent.taken
    else:
        values, slopes, buffers = gradients_of(objective, component, leaves, batch, stacked=True)
    if buffers:
        component.keep(buffers)
    if not taken:
        return values, list(filled(slopes, leaves))
    rest = [k for k, leaf in enumerate(leaves) if leaf.data_ptr() not in taken]
    left = dict(zip(rest, filled([slopes[k] for k in rest], [leaves[k] for k in rest]), strict=True))
    return values, [left.get(k) for k in range(len(leaves))]


def gradients_of(
    objective: LocalObjective, component: Component, leaves: Sequence[Tensor], batch: Batch, stacked: bool
) -> tuple[Tensor, tuple[Tensor | None, ...], dict[str, Tensor]]:
    """Return each client's loss, its gradient at `leaves`, and its new buffers.

    A gradient is None where the loss does not depend on its leaf.
    """
    with torch.enable_grad():
        values, buffers = _losses(objective, component, leaves, batch, stacked)
        slopes: Sequence[Tensor | None] = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
    return values.detach(), tuple(slopes), buffers


def filled(slopes: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients with zeros where the loss does not depend on a leaf."""
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(slopes, leaves, strict=True)]


def single_users(
    objective: LocalObjective, component: Component, leaves: Sequence[Tensor], batch: Batch
) -> tuple[bool, ...]:
    """Return which of `leaves` enter the loss through one layer only, which could take their step by itself."""
    with torch.enable_grad():
        return used_once(_losses(objective, component, leaves, batch, stacked=True)[0], leaves)


def _losses(
    objective: LocalObjective, component: Component, leaves: Sequence[Tensor], batch: Batch, stacked: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return each client's loss, and its new buffers."""
    at = dict(zip(component.trained, leaves, strict=True))
    if not stacked:
        state = {**component.state, **at}
        return objective.value(state, component.moving, component.names, batch, component.given.unpack())
    with over_clients(len(batch.key)) as clients:
        state = {
            **component.common,
            **clients.each({**component.own, **component.moving, **at}),
        }
        given = component.given.map(clients.one).unpack()
        value, moved = objective.value(
            state, component.moving, component.names, batch.map(clients.one), given
        )
        return clients.all(value), {name: clients.all(t) for name, t in moved.items()}
