"""Gradients of one batch: of every client at once (the sum's gradient), or a method's own direction.

Two ways through the same forward pass. The plain one differentiates the SUM of the clients' losses with
respect to stacked parameters: clients share no variable, so each client's slice is its own gradient, and
autograd runs once for the cohort. The directed one evaluates a method's `direction` for one client with
`torch.func.grad` and maps it over the cohort, which costs more and allows anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.func import grad_and_value, vmap

from tailorfl.core import tree
from tailorfl.core.feature_pull import FeaturePull
from tailorfl.core.objective import Loss
from tailorfl.core.privacy import SampleDP, private_gradient
from tailorfl.errors import TailorflError
from tailorfl.models.dropout import dropout_key, fold_key
from tailorfl.models.functional import Model

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

    @property
    def dims(self) -> tuple[int | None, ...]:
        """The client axes of `tensors`."""
        return (0, 0, None if self.weight is None else 0, 0)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """(x, y, weight, keys)."""
        return self.x, self.y, self.weight, self.keys

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
    objective: Objective, carry: Carry, leaves: Sequence[Tensor], batch: Batch, stacked: bool
) -> tuple[Tensor, list[Tensor]]:
    """Returns each client's loss and gradient; `leaves` are the trained tensors, requiring gradients."""
    names = tuple(carry.trained)

    def forward(
        values: Sequence[Tensor],
        own: dict[str, Tensor],
        moving: dict[str, Tensor],
        anchor: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor | None,
        key: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        at = dict(zip(names, values, strict=True))
        return objective.value(at, {**carry.common, **own}, moving, carry.names, (x, y, weight, key), anchor)

    with torch.enable_grad():
        if stacked:
            mapped = vmap(forward, in_dims=(0, 0, 0, 0, *batch.dims))
            values, buffers = mapped(tuple(leaves), carry.own, carry.moving, carry.anchor, *batch.tensors)
            found = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
        else:
            values, buffers = forward(leaves, carry.own, carry.moving, carry.anchor, *batch.only())
            found = torch.autograd.grad(values, leaves, allow_unused=True)
    carry.keep(buffers)
    unused = (torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True))
    return values.detach(), list(unused)


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
    ) -> tuple[Tensor, list[Tensor], list[int]]:
        """Returns each client's loss, the direction to descend along, in the order of `params`, and how many
        gradients of each batch were taken for it.

        `batches` are those of one step.
        """
        taken: list[int] = []

        def one(
            params: list[Tensor],
            owned: list[dict[str, Tensor]],
            moving: list[dict[str, Tensor]],
            anchors: list[dict[str, Tensor]],
            given: list[Tensor],
            batches: tuple[Pass, ...],
        ) -> tuple[Tensor, list[Tensor], list[dict[str, Tensor]]]:
            constant = [{**c.common, **own} for c, own in zip(carries, owned, strict=True)]
            passes = _Passes(self, carries, constant, [dict(m) for m in moving], anchors, batches)
            rest = iter(params)
            parts = [TensorDict({n: next(rest) for n in c.trained}, batch_size=[]) for c in carries]
            alone = self.components == ("",)
            state = parts[0] if alone else TensorDict(dict(zip(self.components, parts, strict=True)))
            found = (self.direction or plain)(state, passes.gradient, *rebuild(given))
            back = [found] if alone else [found.get(n) for n in self.components]
            flat = [part.get(n) for part, c in zip(back, carries, strict=True) for n in c.trained]
            taken[:] = passes.passes  # of every client alike: `vmap` runs this once for all
            return passes.loss(), flat, passes.moving

        held = ([c.own for c in carries], [c.moving for c in carries], [c.anchor for c in carries])
        if stacked:
            mapped = vmap(one, in_dims=(0, 0, 0, 0, 0, tuple(b.dims for b in batches)))
            value, gradient, buffers = mapped(params, *held, given, tuple(b.tensors for b in batches))
        else:
            value, gradient, buffers = one(params, *held, given, tuple(b.only() for b in batches))
        for carry, new in zip(carries, buffers, strict=True):
            carry.keep(new)
        return value, [g.clone() for g in gradient], taken


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
    """Forward and backward passes of one client on the batches of one step.

    The first pass of a component updates its batch statistics.
    """

    def __init__(
        self,
        how: Directed,
        carries: Sequence[Carry],
        constant: list[dict[str, Tensor]],
        moving: list[dict[str, Tensor]],
        anchors: list[dict[str, Tensor]],
        batches: tuple[Pass, ...],
    ) -> None:
        self.how, self.carries, self.constant, self.moving = how, carries, constant, moving
        self.anchors, self.batches = anchors, batches
        self.seen: set[str] = set()
        self.passes = [0] * len(batches)
        self.first: Tensor | None = None

    def gradient(self, parameters: TensorDict, of: str = "", batch: int = 0) -> TensorDict:
        """Returns the gradient of a batch's loss at `parameters` (trained names of component `of`)."""
        if not 0 <= batch < len(self.batches):
            raise TailorflError(
                f"a direction asked for batch {batch}, but its steps have {len(self.batches)}, counted from 0; "
                "say how many with fit(..., batches=...)"
            )
        which = self.how.components.index(of)
        buffers, constant, names = self.moving[which], self.constant[which], self.carries[which].names

        def loss_of(
            values: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor | None, key: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            batch = (x, y, weight, key)
            return self.how.objective.value(values, constant, buffers, names, batch, self.anchors[which])

        values, (x, y, weight, key) = tree.tensors(parameters), self.batches[batch]
        if self.how.dp is None:
            gradient, (value, moved) = grad_and_value(loss_of, has_aux=True)(values, x, y, weight, key)
        else:
            noise = fold_key(fold_key(key, self.how.number), sum(self.passes))
            gradient, value = private_gradient(loss_of, values, x, y, weight, self.how.dp, noise, key)
            moved = buffers
        self.passes[batch] += 1
        if of not in self.seen:
            self.seen.add(of)
            self.moving[which] = moved
        if self.first is None:
            self.first = value
        return TensorDict(gradient, batch_size=[])

    def loss(self) -> Tensor:
        """The loss of the first pass of this step."""
        return torch.zeros(()) if self.first is None else self.first
