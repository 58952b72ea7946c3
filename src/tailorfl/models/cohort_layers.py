"""Linear layers and norms of a whole cohort at once, with separate weights and statistics for every client.

`torch.func.vmap` maps a layer over clients by rewriting it as one larger operation: a convolution becomes one with as
many groups as clients, the gradient of a weight comes out transposed in memory. Here each layer has its own batching
rule and backward pass, on physical tensors [clients, batch, ...]:

    Y = X Wᵀ + b,   dW = Gᵀ X,   dX = G W         batched products, all in memory order

A layer may also take its step of gradient descent inside its backward pass. The gradient of a weight is the product
Gᵀ X, and the step subtracts it from the weight. Separately, the gradient is written to memory and read again, which is
most of the time of a step if batches are small and weights are not. Inside `descending` a layer does both at once, as
soon as its backward pass has used the weight, and no gradient is ever stored:

    W = keep · W + pull · C − rate · Gᵀ X          keep = 1 − η δ − η λ,  pull = η λ,  rate = η

with weight decay δ and the proximal centre C of strength λ. That is the same step, summed in another order. It is right
only for a weight that one layer uses once in a forward pass; the code that opens the block names those.

Norms of images have batching rules for the same reason: vmap's copies their input into another order. Large images go
client by client, small ones together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import (
    _add_batch_dim,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_get_level,
)
from torch.nn import functional as F

from tailorfl.models.half import HALF, rounded, widened
from tailorfl.models.mapping import front, mapped_once, outside, physical, together

LARGE_NORM = 20_000
"""Numbers in one client's batch from which on clients are normalised one by one."""
HALF_SUM = 32
"""Samples from which on a product in bfloat16 and a separate step are faster than both at once in float32."""


@dataclass(frozen=True)
class WeightStep:
    """The step of one weight, [clients, ...]."""

    rate: float | Tensor
    """η, one for all or [clients]."""
    keep: float | Tensor = 1.0
    pull: float | Tensor = 0.0
    centre: Tensor | None = None

    def subtract_product(self, weight: Tensor, g: Tensor, x: Tensor) -> None:
        """Take the step along Gᵀ X; `g` [clients, batch, out], `x` [clients, batch, in]."""
        if isinstance(self.rate, Tensor):
            g, scale = g * self.rate[:, None, None], -1.0
        else:
            scale = -self.rate
        if isinstance(self.keep, Tensor):
            weight.mul_(self.keep.reshape(-1, *[1] * (weight.dim() - 1)))
        keep = 1.0 if isinstance(self.keep, Tensor) else self.keep
        flat = weight.flatten(2)
        if x.dtype is HALF and x.shape[1] >= HALF_SUM:
            if keep != 1.0:
                flat.mul_(keep)
            flat.add_(torch.bmm(g.transpose(1, 2).to(HALF), x).to(flat.dtype), alpha=scale)
        else:
            flat.baddbmm_(g.transpose(1, 2).to(flat.dtype), x.to(flat.dtype), beta=keep, alpha=scale)
        if self.centre is not None:
            if isinstance(self.pull, Tensor):
                weight.add_(self.centre * self.pull.reshape(-1, *[1] * (weight.dim() - 1)))
            else:
                weight.add_(self.centre, alpha=self.pull)

    def subtract(self, weight: Tensor, client: int, gradient: Tensor) -> None:
        """Take one client's step along a gradient."""
        client_weight = weight[client]
        rate, keep, pull = (
            float(t[client]) if isinstance(t, Tensor) else t for t in (self.rate, self.keep, self.pull)
        )
        if keep != 1.0:
            client_weight.mul_(keep)
        client_weight.add_(gradient.to(client_weight.dtype), alpha=-rate)
        if self.centre is not None:
            client_weight.add_(self.centre[client], alpha=pull)


@dataclass
class Descent:
    """A forward pass whose layers may take their steps in its backward pass."""

    shares: Mapping[int, WeightStep]
    """The step of each weight, by its address in memory."""
    taken: set[int] = field(default_factory=set)
    """Addresses of the weights whose layers take their step."""


_OPEN: ContextVar[Descent | None] = ContextVar("tailorfl_descent", default=None)


@contextmanager
def descending(shares: Mapping[int, WeightStep]) -> Iterator[Descent]:
    """Open a block in which layers of a forward pass take over the steps in `shares`."""
    descent = Descent(shares)
    token = _OPEN.set(descent)
    try:
        yield descent
    finally:
        _OPEN.reset(token)


def step_of(weight: Tensor) -> WeightStep | None:
    """Return the step of a weight in the open block, which the caller then has to take; None if there is none."""
    descent = _OPEN.get()
    if descent is None or not descent.shares:
        return None
    address = weight.data_ptr()
    step = descent.shares.get(address)
    if step is not None:
        descent.taken.add(address)
    return step


def used_once(loss: Tensor, leaves: Sequence[Tensor]) -> tuple[bool, ...]:
    """Return for each leaf whether its only use is as the weight of one layer that can take its step."""
    users: dict[int, list[tuple[str, int]]] = {}
    visited, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        for argument, (after, _) in enumerate(node.next_functions):
            leaf = getattr(after, "variable", None)
            if leaf is not None:
                users.setdefault(id(leaf), []).append((type(node).__name__, argument))
            else:
                waiting.append(after)
    able = ([("_CohortLinearBackward", 1)], [("_CohortConvBackward", 1)])  # (x, weight, bias, ...)
    return tuple(users.get(id(leaf)) in able for leaf in leaves)


class Linear(nn.Linear):
    """A linear layer whose weight may have a client axis."""

    def forward(self, input: Tensor) -> Tensor:
        """[batch, in] (or [in], or [..., in]) -> [batch, out]."""
        if is_batchedtensor(self.weight) and input.dim() > 1:
            outputs = together(linear, input, self.weight, self.bias, shared_input=input.dim() == 2)
            if outputs is not None:
                return outputs
        return F.linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return every client's X Wᵀ + b, [clients, ..., out].

    `x` [clients, ..., in], or [batch, in] that all clients share; `weight` [clients, out, in]; `bias` [clients, out].
    """
    if x.dim() == 2:
        # One product for all clients, with their weights stacked along the output axis.
        clients, out, _ = weight.shape
        y = F.linear(x, weight.reshape(clients * out, -1), None if bias is None else bias.reshape(-1))
        return y.view(len(x), clients, out).transpose(0, 1)
    flat = x.flatten(1, -2)
    result: Tensor = _CohortLinear.apply(flat, weight, bias)  # type: ignore[no-untyped-call]
    return result if x.dim() == 3 else result.view(*x.shape[:-1], result.shape[-1])


class _CohortLinear(torch.autograd.Function):
    """Batched linear layers, x [clients, batch, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.share, ctx.biased = step_of(weight), bias is not None
        x, w = rounded(x), rounded(weight)
        # A step inside the backward pass changes the weight itself, not the rounded copy in the product.
        ctx.save_for_backward(x, w, weight)
        if bias is None:
            return torch.bmm(x, w.transpose(1, 2))
        return torch.baddbmm(rounded(bias).unsqueeze(1), x, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w, weight = ctx.saved_tensors
        share: WeightStep | None = ctx.share
        # Before the weight may change. Autograd converts a rounded gradient back to the type of the input.
        dx = torch.bmm(g, w) if ctx.needs_input_grad[0] else None
        dw = None
        if share is not None:
            share.subtract_product(weight, g, x)
        elif ctx.needs_input_grad[1]:
            dw = torch.bmm(g.transpose(1, 2), x)
        return dx, dw, g.sum(1) if ctx.biased and ctx.needs_input_grad[2] else None


class Embedding(nn.Embedding):
    """A table that may have a client axis; torch's map would train the padding row of all clients but the first."""

    def forward(self, input: Tensor) -> Tensor:
        """[...] rows of the table -> [..., width]."""
        if self.padding_idx is None or not is_batchedtensor(self.weight):
            return super().forward(input)
        entries = F.embedding(
            input, self.weight, None, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )
        return torch.where((input == self.padding_idx).unsqueeze(-1), entries.detach(), entries)


class PReLU(nn.PReLU):
    """A ReLU with trained slopes, whose gradient torch computes wrongly inside two maps, of clients and samples."""

    def forward(self, input: Tensor) -> Tensor:
        """[batch, channels, ...] -> the same."""
        if not any(map(is_functorch_wrapped_tensor, (input, self.weight))):
            return super().forward(input)
        slopes = self.weight if len(self.weight) == 1 else self.weight.reshape(-1, *[1] * (input.dim() - 2))
        return torch.where(input > 0, input, slopes * input)


class GroupNorm(nn.GroupNorm):
    """A group norm of images that may have a client axis."""

    def forward(self, input: Tensor) -> Tensor:
        """[batch, channels, ...] -> the same."""
        if not is_batchedtensor(input) or not mapped_once(input, self.weight, self.bias):
            return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        level = maybe_get_level(input)
        with outside():
            x = front(*physical(input), 0)
            weight, bias = (
                None if t is None else front(*physical(t), len(x)) for t in (self.weight, self.bias)
            )
            y = self._large(x, weight, bias) if x[0].numel() >= LARGE_NORM else self._small(x, weight, bias)
        out: Tensor = _add_batch_dim(y, 0, level)
        return out

    def _large(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        none = [None] * len(x)
        by_client = zip(
            x.contiguous().unbind(),
            none if weight is None else weight.unbind(),
            none if bias is None else bias.unbind(),
            strict=True,
        )
        return torch.stack(
            [F.group_norm(images, self.num_groups, w, b, self.eps) for images, w, b in by_client]
        )

    def _small(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = F.group_norm(x.flatten(0, 1).contiguous(), self.num_groups, eps=self.eps).reshape(x.shape)
        shape = (len(x), 1, -1, *[1] * (x.dim() - 3))
        if weight is not None:
            y = y * weight.reshape(shape)
        return y if bias is None else y + bias.reshape(shape)


class BatchNorm1d(nn.BatchNorm1d):
    """A batch norm of features, in float32: mapped over clients it needs one type, which is that of its statistics."""

    def forward(self, input: Tensor) -> Tensor:
        """[batch, features] or [batch, channels, length] -> the same."""
        return super().forward(widened(input))


class BatchNorm2d(nn.BatchNorm2d):
    """A batch norm of images that may have a client axis, in float32."""

    def forward(self, input: Tensor) -> Tensor:
        """[batch, channels, height, width] -> the same; in training mode running statistics change in place."""
        input = widened(input)
        tensors = (input, self.weight, self.bias, self.running_mean, self.running_var)
        if (
            not is_batchedtensor(input)
            or self.momentum is None
            or self.running_mean is None
            or self.running_var is None
            or not mapped_once(*tensors)
            or (self.training and not is_batchedtensor(self.running_mean))
        ):
            return super().forward(input)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        level = maybe_get_level(input)
        with outside():
            x = front(*physical(input), 0)
            clients = len(x)
            outputs = [
                [None] * clients if t is None else front(*physical(t), clients).unbind() for t in tensors[1:]
            ]
            parts = zip(x.contiguous().unbind(), *outputs, strict=True)
            y = torch.stack(
                [
                    F.batch_norm(images, mean, var, w, b, self.training, self.momentum, self.eps)
                    for images, w, b, mean, var in parts
                ]
            )
        out: Tensor = _add_batch_dim(y, 0, level)
        return out
