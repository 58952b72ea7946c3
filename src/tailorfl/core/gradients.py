"""Gradients of one batch: of every client at once (the sum's gradient), or a method's own direction.

Both differentiate the SUM of the clients' losses with respect to stacked parameters: clients share no variable, so each
client's slice is its own gradient, and autograd runs once for the cohort. A method's `direction` is the mathematics of
one client and is mapped over the cohort; each gradient that it asks for is taken outside the map, of all clients at
once. Only private gradients are taken inside it, sample by sample, with `torch.func.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.feature_pull import FeaturePull
from tailorfl.core.objective import Loss
from tailorfl.core.privacy import SampleDP, private_gradient
from tailorfl.errors import TailorflError
from tailorfl.models.descent import Share, descending, used_once
from tailorfl.models.dropout import dropout_key, fold_key
from tailorfl.models.functional import Model
from tailorfl.models.mapping import Level, outside, over_clients

Gradient = Callable[..., TensorDict]
"""`grad(parameters, of="", batch=0)`: the gradient of component `of` at `parameters` on a batch of the step."""
Direction = Callable[..., TensorDict]
"""`direction(state, grad, *given)`: what to descend along, by the names of the trained parameters."""
Rebuild = Callable[[Sequence[Tensor]], tuple[Any, ...]]
"""Makes the extra arguments of a direction from flat tensors."""


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
    anchor: dict[str, Tensor] = field(default_factory=dict)
    """The state whose features the objective pulls to, [clients, ...]; empty without such a term."""
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
    pull: FeaturePull | None = None
    """A further term of the loss, of the features."""

    def value(
        self,
        values: dict[str, Tensor],
        constant: dict[str, Tensor],
        moving: dict[str, Tensor],
        trained: frozenset[str],
        batch: Pass,
        anchor: dict[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns (loss, new buffers) of one client.

        `batch` is (x, y, weight, key); `anchor` the state that `pull` pulls to.
        """
        x, y, weight, key = batch
        buffers = {n: b.clone() for n, b in moving.items()}
        state = {**constant, **values, **buffers}
        if self.pull is None:
            with dropout_key(key):
                outputs = self.model.forward_train(state, x, trained)
            return self.loss(outputs, y, weight), buffers
        with dropout_key(key):
            outputs, features = self.model.features_train(state, x, trained)
        fixed = self.model.outputs_and_features(anchor, x)[1]
        return self.loss(outputs, y, weight) + self.pull.term(features, fixed, weight), buffers


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
    own = dict(zip(rest, _filled([found[k] for k in rest], [leaves[k] for k in rest]), strict=True))
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


def _filled(found: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor]:
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
        return objective.value(at, constant, carry.moving, carry.names, batch.only(), carry.anchor)
    with over_clients(len(batch.keys)) as clients:
        value, moved = objective.value(
            {name: clients.one(leaf) for name, leaf in zip(carry.trained, leaves, strict=True)},
            {**carry.common, **clients.each(carry.own)},
            clients.each(carry.moving),
            carry.names,
            batch.seen(clients),
            clients.each(carry.anchor),
        )
        return clients.all(value), {name: clients.all(t) for name, t in moved.items()}


@dataclass(frozen=True)
class Directed:
    """How to find a direction that is not simply the gradient.

    Attributes:
        components: names of the models that train together.
        direction: the method's own, or None for the (private) gradient.
        dp: privacy of every gradient, or None.
        number: which fit of its client in this round this is (privacy noise must differ between fits).
    """

    objective: Objective
    components: tuple[str, ...]
    direction: Direction | None
    dp: SampleDP | None
    number: int

    def gradient(
        self,
        carries: Sequence[Carry],
        params: list[Tensor],
        batches: Sequence[Batch],
        given: list[Tensor],
        rebuild: Rebuild,
        stacked: bool,
    ) -> tuple[Tensor, list[Tensor | None], list[int]]:
        """Returns each client's loss, the direction to descend along, in the order of `params`, and how many
        gradients of each batch were taken for it.

        `batches` are those of one step.
        """
        with over_clients(len(batches[0].keys)) if stacked else nullcontext() as clients:
            passes = _Passes(self, carries, batches, clients)
            rest = iter(passes.seen(params))
            parts = [TensorDict({n: next(rest) for n in c.trained}, batch_size=[]) for c in carries]
            alone = self.components == ("",)
            state = parts[0] if alone else TensorDict(dict(zip(self.components, parts, strict=True)))
            found = (self.direction or plain)(state, passes.gradient, *rebuild(passes.seen(given)))
            back = [found] if alone else [found.get(n) for n in self.components]
            flat = [part.get(n) for part, c in zip(back, carries, strict=True) for n in c.trained]
            gradient = [g.clone() if clients is None else clients.all(g).clone() for g in flat]
        for carry, new in zip(carries, passes.moved, strict=True):
            carry.keep(new)
        return passes.loss(), list(gradient), passes.passes


def plain(state: TensorDict, grad: Gradient) -> TensorDict:
    """The direction of ordinary SGD: the gradient where the client is."""
    return grad(state)


def gradients_asked(
    direction: Direction | None, state: TensorDict, given: Sequence[Any], batches: int
) -> list[int]:
    """Returns how many gradients a direction asks for on each of the batches of a step; no sample is looked at.

    `state` and `given` are those of one client. A direction has no conditions on values, so any will do.
    """
    asked = [0] * batches

    def grad(parameters: TensorDict, of: str = "", batch: int = 0) -> TensorDict:
        asked[batch] += 1
        return parameters * 0.0

    (direction or plain)(state, grad, *given)
    return asked


class _Passes:
    """Forward and backward passes on the batches of one step, for one client or, inside a map, for all of them.

    A direction is the mathematics of one client, but its gradients are taken of all clients at once: what it asks for
    is evaluated outside the map. The first pass of a component updates its batch statistics.
    """

    def __init__(
        self, how: Directed, carries: Sequence[Carry], batches: Sequence[Batch], clients: Level | None
    ) -> None:
        self.how, self.carries, self.batches, self.clients = how, carries, batches, clients
        self.moved: list[dict[str, Tensor]] = [{} for _ in carries]
        self.passes = [0] * len(batches)
        self.met: set[str] = set()
        self.first: Tensor | None = None

    def seen(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the direction sees of tensors: those of one client."""
        return list(tensors) if self.clients is None else [self.clients.one(t) for t in tensors]

    def gradient(self, parameters: TensorDict, of: str = "", batch: int = 0) -> TensorDict:
        """Returns the gradient of a batch's loss at `parameters` (trained names of component `of`)."""
        if not 0 <= batch < len(self.batches):
            raise TailorflError(
                f"a direction asked for batch {batch}, but its steps have {len(self.batches)}, counted from 0; "
                "say how many with fit(..., batches=...)"
            )
        which = self.how.components.index(of)
        carry, at = self.carries[which], tree.tensors(parameters)
        if self.how.dp is not None:
            gradient, value = self._private(carry, at, self.batches[batch])
            moved = carry.moving
        else:
            gradient, value, moved = self._plain(carry, at, self.batches[batch])
        self.passes[batch] += 1
        if of not in self.met:
            self.met.add(of)
            self.moved[which] = moved
        if self.first is None:
            self.first = value
        return TensorDict(gradient, batch_size=[])

    def _plain(
        self, carry: Carry, at: dict[str, Tensor], batch: Batch
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        objective, clients = self.how.objective, self.clients
        if clients is None:
            leaves = [at[n].detach().requires_grad_() for n in carry.trained]
            value, found, moved = gradients_of(objective, carry, leaves, batch, stacked=False)
            return dict(zip(carry.trained, _filled(found, leaves), strict=True)), value, moved
        with outside():
            leaves = [clients.back(at[n]).detach().requires_grad_() for n in carry.trained]
            value, found, moved = gradients_of(objective, carry, leaves, batch, stacked=True)
        every = zip(carry.trained, _filled(found, leaves), strict=True)
        return {n: clients.one(g) for n, g in every}, value, moved

    def _private(self, carry: Carry, at: dict[str, Tensor], batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        how, clients = self.how, self.clients
        own, moving, anchor = carry.own, carry.moving, carry.anchor
        x, y, weight, key = batch.only() if clients is None else batch.seen(clients)
        if clients is not None:
            own, moving, anchor = clients.each(own), clients.each(moving), clients.each(anchor)
        constant = {**carry.common, **own}

        def loss_of(
            values: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor | None, key: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            return how.objective.value(values, constant, moving, carry.names, (x, y, weight, key), anchor)

        assert how.dp is not None
        noise = fold_key(fold_key(key, how.number), sum(self.passes))
        gradient, value = private_gradient(loss_of, at, x, y, weight, how.dp, noise, key)
        return gradient, value if clients is None else clients.all(value)

    def loss(self) -> Tensor:
        """The loss of the first pass of this step, [clients] (0-d of one client)."""
        if self.first is not None:
            return self.first
        return torch.zeros(()) if self.clients is None else torch.zeros(self.clients.clients)
