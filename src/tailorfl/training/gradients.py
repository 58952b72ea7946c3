"""Gradients of one batch for all clients at once, and of a term on public samples.

The SUM of the clients' losses is differentiated with respect to stacked parameters. Clients share no variables, so each
client's slice is its own gradient, and autograd runs once for the cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.func import vmap

from tailorfl.data.source import Source
from tailorfl.models.cohort_layers import WeightStep, descending, used_once
from tailorfl.models.dropout import dropout_key
from tailorfl.models.functional import Model
from tailorfl.models.mapping import over_clients
from tailorfl.training.keys import Keys
from tailorfl.training.objective import Loss, Seen, Term
from tailorfl.training.operations import NOTHING, Packed
from tailorfl.training.plan import make_plan

Gradient = Callable[..., TensorDict]
"""`grad(parameters, of="", batch=0)`: the gradient of component `of` at `parameters` on a batch of the step."""
Direction = Callable[..., TensorDict]
"""`direction(state, grad, *given)`: the descent direction, by names of the trained parameters."""
Directions = Direction | Mapping[str, Direction]
"""One direction for all components together, or one for each. Components step in this order: a direction sees those
before its own after their step, and returns the descent direction of its own."""


class Batch(NamedTuple):
    """A batch of every client that takes a step, [clients, ...]; in code for one client, that client's batch."""

    x: Tensor
    y: Tensor
    weight: Tensor | None
    """1 for real samples, 0 for padding; None if all are real."""
    key: Tensor
    """int64 [clients], keys of dropout masks and privacy noise."""
    classes: Tensor | None = None
    """[clients, classes] class weights in the loss; None: equal weights."""
    prior: Tensor | None = None
    """[clients, outputs] shift of outputs by the balanced softmax; None for other losses."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with every tensor changed, for instance to one client's inside a map."""
        return Batch(*[None if tensor is None else change(tensor) for tensor in self])  # type: ignore[arg-type]


@dataclass
class Component:
    """Tensors of one of the models that train together, [clients, ...] (without that axis for one client)."""

    trained: dict[str, Tensor]
    """Owned and updated in place."""
    moving: dict[str, Tensor]
    """Owned buffers of batch norm, and tensors that terms keep, updated in place."""
    own: dict[str, Tensor]
    """Neither trained nor owned; each client's own."""
    common: dict[str, Tensor]
    """Neither trained nor owned; shared by all clients, without an axis of clients."""
    given: Packed = NOTHING
    """The inputs of each term of the loss."""

    def __post_init__(self) -> None:
        self.names = frozenset(self.trained)
        """Names of the trained tensors."""
        self.state = {**self.common, **self.own, **self.moving, **self.trained}
        """All of these tensors by name."""

    def keep(self, buffers: Mapping[str, Tensor]) -> None:
        """Write new buffers."""
        for name, buffer in buffers.items():
            self.moving[name].copy_(buffer)

    def of(self, which: slice | Tensor) -> Component:
        """Return the part of some clients; the trained tensors are not cut, only their names matter."""
        moving, unshared = ({n: t[which] for n, t in tensors.items()} for tensors in (self.moving, self.own))
        return Component(self.trained, moving, unshared, self.common, self.given.map(lambda t: t[which]))


@dataclass(frozen=True)
class LocalObjective:
    """The model and loss that are differentiated."""

    model: Model
    loss: Loss
    terms: tuple[Term, ...] = ()
    """Terms that a method adds to the loss, or that replace it."""

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
            state: all tensors of the client's model.
            moving: names of the buffers whose copies are updated; other buffers are updated in `state`.
            trained: names of the trained tensors.
            batch: of this client.
            given: the inputs of each term.
        """
        buffers = {n: state[n].clone() for n in moving}
        if buffers:
            state = {**state, **buffers}
        loss = self.loss if batch.classes is None else self.loss.weighed(batch.classes)
        if batch.prior is not None:
            loss = loss.shifted(batch.prior)
        # Without dropout no masks are drawn, and no key is needed.
        with dropout_key(batch.key) if self.model.has_dropout else nullcontext():
            if not self.terms:
                outputs = self.model.forward_train(state, batch.x, trained)
                return loss(outputs, batch.y, batch.weight), buffers
            outputs, features = self.model.features_train(state, batch.x, trained)
        seen = Seen(self.model, loss, batch[:3], outputs, features, state)
        parts = [] if any(term.replaces for term in self.terms) else [seen.loss]
        for term, inputs in zip(self.terms, given, strict=True):
            value, new_buffers = term.value(seen, inputs)
            parts.append(value)
            buffers |= new_buffers
        return reduce(torch.add, parts), buffers


def client_gradient(
    objective: LocalObjective, component: Component, leaves: Sequence[Tensor], batch: Batch
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of one client, 0-d, and its gradient at `leaves`, its trained tensors; update its buffers."""
    with torch.enable_grad():
        # The fit owns the running statistics, so the pass updates them in place.
        term_inputs = component.given.unpack() if objective.terms else ()
        value, new_buffers = objective.value(component.state, (), component.names, batch, term_inputs)
        slopes = torch.autograd.grad(value, leaves, allow_unused=True)
    if new_buffers:
        component.keep(new_buffers)
    return value.detach(), filled(slopes, leaves)


def cohort_gradient(
    objective: LocalObjective,
    component: Component,
    leaves: Sequence[Tensor],
    batch: Batch,
    shares: Mapping[int, WeightStep],
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss and gradient of each client of a cohort, and update its buffers.

    `leaves` are the trained tensors. Those in `shares`, by memory address, take their step during the backward pass;
    their gradient is None.
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
    waiting = [k for k, leaf in enumerate(leaves) if leaf.data_ptr() not in taken]
    filled_in = dict(
        zip(waiting, filled([slopes[k] for k in waiting], [leaves[k] for k in waiting]), strict=True)
    )
    return values, [filled_in.get(k) for k in range(len(leaves))]


def gradients_of(
    objective: LocalObjective, component: Component, leaves: Sequence[Tensor], batch: Batch, stacked: bool
) -> tuple[Tensor, tuple[Tensor | None, ...], dict[str, Tensor]]:
    """Return each client's loss, its gradient at `leaves`, and its new buffers.

    A gradient is None if the loss does not depend on its leaf.
    """
    with torch.enable_grad():
        values, buffers = _losses(objective, component, leaves, batch, stacked)
        slopes: Sequence[Tensor | None] = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
    return values.detach(), tuple(slopes), buffers


def filled(slopes: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients, with zeros for leaves that the loss does not depend on."""
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(slopes, leaves, strict=True)]


def single_users(
    objective: LocalObjective, component: Component, leaves: Sequence[Tensor], batch: Batch
) -> tuple[bool, ...]:
    """Return which of `leaves` enter the loss through one layer only, and could step inside its backward pass."""
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
        term_inputs = component.given.map(clients.one).unpack()
        value, moved = objective.value(
            state, component.moving, component.names, batch.map(clients.one), term_inputs
        )
        return clients.all(value), {name: clients.all(t) for name, t in moved.items()}


@dataclass(frozen=True)
class PublicTerm:
    """One term on public samples, for all clients of a cohort or for one client."""

    term: Term
    model: Model
    loss: Loss
    source: Source
    given: Packed
    """The inputs of the term, [clients, ...] (or without the client axis for one client)."""
    rows: Tensor
    """[clients, steps, batch] int64 rows of the public set."""
    stacked: bool

    def gradient(
        self, component: Component, params: Sequence[Tensor], step: int, which: slice | Tensor
    ) -> list[Tensor]:
        """Return the term's gradient at `params` for the clients `which`, whose tensors `component` holds.

        Clients share no variables, so the gradient of the sum of their terms holds each client's gradient.
        """
        leaves = [p.detach().requires_grad_() for p in params]
        at = dict(zip(component.trained, leaves, strict=True))
        rows = self.rows[which, step] if self.stacked else self.rows[0, step]
        x = self.source.take(rows)
        with torch.enable_grad():
            if self.stacked:
                term_inputs = [t[which] for t in self.given.leaves]
                mapped = vmap(self._value, in_dims=(0, 0, None, 0, 0, 0))
                value = mapped(
                    at, {**component.own, **component.moving}, component.common, x, rows, term_inputs
                ).sum()
            else:
                state = {**component.own, **component.moving}
                value = self._value(at, state, component.common, x, rows, self.given.leaves)
            slopes = torch.autograd.grad(value, leaves, allow_unused=True)
        return filled(slopes, leaves)

    def _value(
        self,
        at: Mapping[str, Tensor],
        unshared: Mapping[str, Tensor],
        common: Mapping[str, Tensor],
        x: Tensor,
        rows: Tensor,
        term_inputs: Sequence[Tensor],
    ) -> Tensor:
        """Return the term of one client, with its model in evaluation mode."""
        state = {**common, **unshared, **at}
        seen = Seen.evaluated(self.model, self.loss, (x, torch.empty(0), None), state, rows)
        value: Tensor = self.term.function(seen, *Packed(list(term_inputs), self.given.form).unpack())
        return value


def public_rows(keys: Keys, samples: int, batch: int, steps: int, first: int = 0) -> Tensor:
    """Return the public samples of every client and step, int64 [clients, steps, batch].

    `keys` [clients] uint64; if `batch` is larger than `samples`, a batch has all of them; `first` skips steps.
    """
    if batch >= samples:
        return torch.arange(samples).expand(len(keys), steps, samples)
    members = [np.arange(samples, dtype=np.int64)] * len(keys)
    plan = make_plan(members, keys, batch, steps=steps, first=first, min_batch=batch)
    return torch.from_numpy(plan.rows)
