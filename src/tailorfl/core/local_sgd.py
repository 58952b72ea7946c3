"""LocalSGD: the one loop in which all local training happens, for one client or a whole cohort at once.

    for every batch:   g = ∇F(p; batch)                       or the method's own direction (SAM, APFL, ...)
                       g = g + λ(p − centre)                   proximal pull, penalty (λ/2)‖p − centre‖²
                       p = p − η · SGD(g)                      momentum and weight decay as in torch.optim.SGD

Tensors are physical here (no vmap wrapper): a cohort carries a leading client axis and is ordered by falling number of steps,
so the clients still active at a step are a prefix and an idle client is never touched. Updates are in place on tensors this
loop owns. The gradient of a cohort is the gradient of the SUM of its clients' losses, since clients share no variable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.func import grad_and_value, vmap

from tailorfl.core.objective import Loss
from tailorfl.core.plan import BatchPlan
from tailorfl.core.privacy import SampleDP, private_gradient
from tailorfl.data.source import Source
from tailorfl.models.dropout import dropout_key
from tailorfl.models.functional import Model

Gradient = Callable[..., TensorDict]
"""`grad(parameters, of="")`: the mini-batch gradient of component `of` at `parameters`."""
Direction = Callable[..., TensorDict]
"""`direction(state, grad, *given)`: what to descend along, with the names of the trained parameters of `state`."""


@dataclass(frozen=True)
class FitOptions:
    """What one call of `Client.fit` does; the same for every client of a cohort."""

    trained: tuple[tuple[str, ...], ...]
    """Names of the trained parameters of each component (one component unless several models train together)."""
    components: tuple[str, ...] = ("",)
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    repeat: int = 1
    prox: float | None = None
    direction: Direction | None = None
    dp: SampleDP | None = None


@dataclass
class Carry:
    """Tensors of one component that travel through the loop."""

    trained: dict[str, Tensor]
    """Owned and updated in place, [clients, ...] (or without the client axis for one client)."""
    moving: dict[str, Tensor]
    """Owned batch-norm buffers, updated in place."""
    fixed: dict[str, Tensor]
    """Neither trained nor owned; without a client axis where all clients share them."""
    shared: frozenset[str]
    """Names in `fixed` without a client axis."""


class LocalSGD:
    """The loop over a batch plan for `clients` clients; `stacked` tells whether tensors have the client axis."""

    def __init__(self, model: Model, source: Source, loss: Loss, options: FitOptions, stacked: bool) -> None:
        self.model, self.source, self.loss, self.options, self.stacked = model, source, loss, options, stacked
        self.trained = tuple(frozenset(names) for names in options.trained)

    def run(
        self,
        carries: Sequence[Carry],
        plan: BatchPlan,
        centre: Sequence[Tensor] | None,
        strength: Tensor | None,
        given: Sequence[Tensor],
        rebuild: Callable[[Sequence[Tensor]], tuple[Any, ...]],
        dropout_keys: Tensor,
    ) -> Tensor:
        """Trains in place and returns the mean training loss of each client, [clients] (0-d for one client).

        `plan` is ordered by falling steps; `centre` and `strength` are the proximal centre, in the order of the trained
        tensors, and λ where it is a tensor ([clients]); `given` are extra inputs of the direction, `rebuild` makes them
        its arguments; `dropout_keys` int64 [clients].
        """
        options = self.options
        params = [t for carry in carries for t in carry.trained.values()]
        velocity = [torch.zeros_like(p) for p in params] if options.momentum else []
        clients, longest = plan.count.shape
        total = torch.zeros(clients)
        rows = torch.from_numpy(plan.rows)
        active_at = (plan.count > 0).sum(0)
        for step in range(longest):
            active = int(active_at[step])
            counts = plan.count[:active, step]
            for members, size in self._groups(counts):
                index = slice(0, active) if members is None else members
                batch = rows[index, step, : int(counts.max())] if members is None else rows[index, step, :size]
                weight = self._weight(counts, batch.shape[1]) if members is None else None
                x, y = self.source.take(batch), self.source.y[batch]
                cut = _Cut(index, clients, self.stacked)
                p, v = cut.take(params), cut.take(velocity)
                part = [cut.carry(carry, p) for carry in carries]
                pull = None if centre is None else cut.take(centre)
                force = strength if strength is None or not self.stacked else strength[index]
                extra = cut.take(given)
                for again in range(options.repeat):
                    keys = dropout_keys[index] + (step * options.repeat + again)
                    value = self._step(part, p, v, x, y, weight, pull, force, rebuild(extra), extra, rebuild, keys)
                    total[index] += value.reshape(-1)
                cut.put(params, p)
                cut.put(velocity, v)
                for carry, piece in zip(carries, part, strict=True):
                    cut.put(list(carry.moving.values()), list(piece.moving.values()))
        taken = torch.from_numpy(plan.steps).clamp(min=1) * options.repeat
        mean = total / taken
        return mean if self.stacked else mean[0]

    def _groups(self, counts: Any) -> list[tuple[Tensor | None, int]]:
        """How the active clients are batched together: all at once with padding, or by true size where a batch counts as a whole."""
        if not self.model.has_batch_statistics or (counts == counts[0]).all():
            return [(None, int(counts[0]))]
        return [(torch.from_numpy((counts == size).nonzero()[0]), int(size)) for size in sorted(set(counts.tolist()))]

    @staticmethod
    def _weight(counts: Any, width: int) -> Tensor | None:
        if (counts == width).all():
            return None
        return (torch.arange(width)[None, :] < torch.from_numpy(counts)[:, None]).float()

    def _step(
        self,
        carries: list[Carry],
        params: list[Tensor],
        velocity: list[Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor | None,
        centre: list[Tensor] | None,
        strength: Tensor | None,
        arguments: tuple[Any, ...],
        given: list[Tensor],
        rebuild: Callable[[Sequence[Tensor]], tuple[Any, ...]],
        keys: Tensor,
    ) -> Tensor:
        options = self.options
        if options.direction is None and options.dp is None:
            value, gradient = self._sum_gradient(carries[0], params, x, y, weight, keys)
        else:
            value, gradient = self._directed(carries, params, x, y, weight, given, rebuild, keys)
        if centre is not None:
            pull = torch._foreach_sub(params, centre)
            if strength is None:
                assert options.prox is not None
                torch._foreach_add_(gradient, pull, alpha=options.prox)
            else:
                torch._foreach_add_(gradient, [_along(strength, d) * d for d in pull])
        if options.clip is not None:
            self._clip(gradient, options.clip)
        if options.weight_decay:
            torch._foreach_add_(gradient, params, alpha=options.weight_decay)
        if velocity:
            torch._foreach_mul_(velocity, options.momentum)
            torch._foreach_add_(velocity, gradient)
            gradient = velocity
        torch._foreach_add_(params, gradient, alpha=-options.lr)
        return value

    def _sum_gradient(
        self, carry: Carry, params: list[Tensor], x: Tensor, y: Tensor, weight: Tensor | None, keys: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Loss of each client and the gradients of their sum."""
        names = tuple(carry.trained)
        trained = self.trained[0]

        def forward(
            values: tuple[Tensor, ...], own: dict[str, Tensor], moving: dict[str, Tensor], x: Tensor, y: Tensor,
            weight: Tensor | None, key: Tensor,
        ) -> tuple[Tensor, dict[str, Tensor]]:
            buffers = {n: b.clone() for n, b in moving.items()}
            state = {**common, **own, **dict(zip(names, values, strict=True)), **buffers}
            with dropout_key(key):
                outputs = self.model.forward_train(state, x, trained)
            return self.loss(outputs, y, weight), buffers

        common = {n: carry.fixed[n] for n in carry.shared}
        own = {n: t for n, t in carry.fixed.items() if n not in carry.shared}
        with torch.enable_grad():
            leaves = tuple(p.detach().requires_grad_() for p in params)
            if self.stacked:
                in_dims = (0, 0, 0, 0, 0, None if weight is None else 0, 0)
                values, buffers = vmap(forward, in_dims=in_dims)(leaves, own, carry.moving, x, y, weight, keys)
                gradient = torch.autograd.grad(values.sum(), leaves, allow_unused=True, materialize_grads=True)
            else:
                w = None if weight is None else weight[0]
                values, buffers = forward(leaves, own, carry.moving, x[0], y[0], w, keys[0])
                gradient = torch.autograd.grad(values, leaves, allow_unused=True, materialize_grads=True)
        for name, buffer in buffers.items():
            carry.moving[name].copy_(buffer)
        return values.detach(), list(gradient)

    def _directed(
        self,
        carries: list[Carry],
        params: list[Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor | None,
        given: list[Tensor],
        rebuild: Callable[[Sequence[Tensor]], tuple[Any, ...]],
        keys: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """Loss of each client and the direction a method chose, computed for one client and mapped over the cohort."""
        options = self.options
        owned = [{n: t for n, t in c.fixed.items() if n not in c.shared} for c in carries]
        moving = [c.moving for c in carries]

        def one(
            params: list[Tensor], owned: list[dict[str, Tensor]], moving: list[dict[str, Tensor]], x: Tensor, y: Tensor,
            weight: Tensor | None, given: list[Tensor], key: Tensor,
        ) -> tuple[Tensor, list[Tensor], list[dict[str, Tensor]]]:
            fixed = [{**{n: c.fixed[n] for n in c.shared}, **o} for c, o in zip(carries, owned, strict=True)]
            passes = _Passes(self, fixed, [dict(m) for m in moving], x, y, weight, key)
            components: dict[str, TensorDict] = {}
            at = 0
            for name, carry in zip(options.components, carries, strict=True):
                own = dict(zip(carry.trained, params[at : at + len(carry.trained)], strict=True))
                at += len(own)
                components[name] = TensorDict(own, batch_size=[])
            state = components[""] if options.components == ("",) else TensorDict(dict(components), batch_size=[])
            direction = plain if options.direction is None else options.direction
            found = direction(state, passes.gradient, *rebuild(given))
            parts = [found] if options.components == ("",) else [found.get(n) for n in options.components]
            flat = [part.get(n) for part, c in zip(parts, carries, strict=True) for n in c.trained]
            return passes.loss(), flat, passes.moving

        if self.stacked:
            in_dims = (0, 0, 0, 0, 0, None if weight is None else 0, 0, 0)
            value, gradient, buffers = vmap(one, in_dims=in_dims)(params, owned, moving, x, y, weight, given, keys)
        else:
            w = None if weight is None else weight[0]
            value, gradient, buffers = one(params, owned, moving, x[0], y[0], w, given, keys[0])
        for carry, new in zip(carries, buffers, strict=True):
            for name, buffer in new.items():
                carry.moving[name].copy_(buffer)
        return value, [g.clone() for g in gradient]

    def _clip(self, gradient: list[Tensor], limit: float) -> None:
        """Scales each client's whole gradient to Euclidean norm `limit` at most, as torch's clip_grad_norm_ does."""
        first = 1 if self.stacked else 0
        squares = sum(g.square().flatten(first).sum(-1) if g.ndim > first else g.square() for g in gradient)
        assert isinstance(squares, Tensor)
        scale = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for g in gradient:
            g.mul_(_along(scale, g))


def plain(state: TensorDict, grad: Gradient) -> TensorDict:
    """The direction of ordinary SGD: the gradient where the client is."""
    return grad(state)


class _Passes:
    """Forward and backward passes of one client on one batch; the first pass of a component updates its batch statistics."""

    def __init__(
        self, loop: LocalSGD, fixed: list[dict[str, Tensor]], moving: list[dict[str, Tensor]], x: Tensor, y: Tensor,
        weight: Tensor | None, key: Tensor,
    ) -> None:
        self.loop, self.fixed, self.moving = loop, fixed, moving
        self.x, self.y, self.weight, self.key = x, y, weight, key
        self.seen: set[str] = set()
        self.first: Tensor | None = None

    def gradient(self, parameters: TensorDict, of: str = "") -> TensorDict:
        """Returns the gradient of the batch loss at `parameters` (trained names of component `of`)."""
        loop, which = self.loop, self.loop.options.components.index(of)
        buffers, fixed, trained = self.moving[which], self.fixed[which], self.loop.trained[which]

        def loss_of(values: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
            moved = {n: b.clone() for n, b in buffers.items()}
            with dropout_key(self.key):
                outputs = loop.model.forward_train({**fixed, **values, **moved}, x, trained)
            return loop.loss(outputs, y, weight), moved

        values = dict(parameters.items())
        if loop.options.dp is None:
            gradient, (value, moved) = grad_and_value(loss_of, has_aux=True)(values, self.x, self.y, self.weight)
        else:
            gradient, value = private_gradient(loss_of, values, self.x, self.y, self.weight, loop.options.dp, self.key)
            moved = buffers
        if of not in self.seen:
            self.seen.add(of)
            self.moving[which] = moved
        if self.first is None:
            self.first = value
        return TensorDict(gradient, batch_size=[])

    def loss(self) -> Tensor:
        """The loss of the first pass of this step."""
        return torch.zeros(()) if self.first is None else self.first


class _Cut:
    """The part of a cohort's tensors that takes a step: a prefix as views, or chosen clients as copies that are written back."""

    def __init__(self, index: slice | Tensor, clients: int, stacked: bool) -> None:
        self.index, self.stacked = index, stacked
        self.whole = not stacked or (isinstance(index, slice) and index.stop == clients)

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors) if self.whole else [t[self.index] for t in tensors]

    def carry(self, carry: Carry, params: list[Tensor]) -> Carry:
        if self.whole:
            return carry
        trained = dict(zip(carry.trained, params, strict=False)) if params else {}
        fixed = {n: t if n in carry.shared else t[self.index] for n, t in carry.fixed.items()}
        return Carry(trained, {n: t[self.index] for n, t in carry.moving.items()}, fixed, carry.shared)

    def put(self, tensors: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        if not self.whole and isinstance(self.index, Tensor):
            for tensor, value in zip(tensors, new, strict=True):
                tensor[self.index] = value


def _along(scale: Tensor, like: Tensor) -> Tensor:
    """`scale` [clients] (or 0-d) shaped to multiply `like` [clients, ...]."""
    return scale.reshape(scale.shape + (1,) * (like.ndim - scale.ndim))
