"""Linear layers of a whole cohort at once, in which every client has weights of its own; what all such layers share.

`torch.func.vmap` maps a layer over clients by rewriting it as one larger operation: a convolution becomes one with as
many groups as clients, the gradient of a weight comes out transposed in memory. Here each layer has a batching rule of
its own and a backward pass of its own, on physical tensors [clients, batch, ...]:

    Y = X Wᵀ + b,   dW = Gᵀ X,   dX = G W         batched products, all in the order that memory has

A layer may also take its step of gradient descent inside its backward pass (`tailorfl.models.descent`): the product
Gᵀ X is then subtracted from W while it is computed, and no gradient is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import _add_batch_dim, is_batchedtensor, maybe_get_level
from torch.nn import functional as F

from tailorfl.models.descent import Share, share_of
from tailorfl.models.mapping import mapped_once, outside, physical


class Linear(nn.Linear):
    """A linear layer whose weight may be one of many clients'."""

    def forward(self, input: Tensor) -> Tensor:
        """[batch, in] (or [..., in]) -> [batch, out]."""
        if not is_batchedtensor(self.weight) or not mapped_once(input, self.weight, self.bias):
            return F.linear(input, self.weight, self.bias)
        return together(linear, input, self.weight, self.bias, shared_input=input.dim() == 2)


def together(
    layer: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shared_input: bool = False,
) -> Tensor:
    """Returns a layer of the mapped tensors, computed on their physical ones.

    `shared_input` says that the layer takes an input without client axis, where all clients share it.
    """
    level = maybe_get_level(weight)
    w, w_dim = physical(weight)
    clients = w.shape[w_dim or 0]
    with outside():
        images, x_dim = physical(x)
        if x_dim is not None or not shared_input:
            images = front(images, x_dim, clients)
        b = None if bias is None else front(*physical(bias), clients)
        found = layer(images, front(w, w_dim, clients), b)
    out: Tensor = _add_batch_dim(found, 0, level)
    return out


def front(tensor: Tensor, dim: int | None, clients: int) -> Tensor:
    """[clients, ...]; a view without copies where all clients share it."""
    if dim is None:
        return tensor.expand(clients, *tensor.shape)
    return tensor if dim == 0 else tensor.movedim(dim, 0)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns every client's X Wᵀ + b, [clients, ..., out].

    `x` [clients, ..., in], or [batch, in] that all clients share; `weight` [clients, out, in]; `bias` [clients, out].
    """
    if x.dim() == 2:
        # One product for all clients: their weights stand below each other.
        clients, out, _ = weight.shape
        y = F.linear(x, weight.reshape(clients * out, -1), None if bias is None else bias.reshape(-1))
        return y.view(len(x), clients, out).transpose(0, 1)
    flat = x.flatten(1, -2)
    result: Tensor = _CohortLinear.apply(flat, weight, bias)  # type: ignore[no-untyped-call]
    return result if x.dim() == 3 else result.view(*x.shape[:-1], -1)


class _CohortLinear(torch.autograd.Function):
    """Batched linear layers, x [clients, batch, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.share, ctx.biased = share_of(weight), bias is not None
        if bias is None:
            return torch.bmm(x, weight.transpose(1, 2))
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        share: Share | None = ctx.share
        # Before the weight may change.
        dx = torch.bmm(g, weight) if ctx.needs_input_grad[0] else None
        dw = None
        if share is not None:
            share.subtract_product(weight, g, x)
        elif ctx.needs_input_grad[1]:
            dw = torch.bmm(g.transpose(1, 2), x)
        return dx, dw, g.sum(1) if ctx.biased and ctx.needs_input_grad[2] else None
