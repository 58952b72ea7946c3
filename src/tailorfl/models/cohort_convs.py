"""Convolutions of a whole cohort at once, in which every client has weights of its own.

As `tailorfl.models.cohort_layers`, on physical tensors [clients, batch, channels, height, width]: client by client
where each is large enough, small ones as one grouped convolution, those of single pixels as linear layers. A
convolution takes along the pooling and the ReLU behind it (`tailorfl.models.pooling`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.nn import functional as F

from tailorfl.models.cohort_layers import WeightStep, linear, step_of
from tailorfl.models.half import rounded
from tailorfl.models.layouts import arranged, stacked
from tailorfl.models.mapping import together
from tailorfl.models.pooling import Pool, of_all

SMALL_CONV = 200_000
"""Floating-point operations a sample below which a loop over clients costs more than one convolution with groups."""

Pair = tuple[int, ...]
"""A number for each of the two axes of an image."""


class Conv2d(nn.Conv2d):
    """A convolution whose weight may be one of many clients'."""

    channels_last: bool
    """The layout in which a network's convolutions run one after another, see `Skeleton`."""
    pool: Pool | None = None
    """What this layer does besides, see `tailorfl.models.pooling.taken_along`."""

    def forward(self, input: Tensor) -> Tensor:
        """[batch, channels, height, width] -> the same with other sizes."""
        plain = self.padding_mode == "zeros" and input.dim() == 4
        if is_batchedtensor(self.weight) and plain and not isinstance(self.padding, str):
            layer = partial(
                conv2d,
                stride=self.stride,
                padding=self.padding,
                dilation=self.dilation,
                groups=self.groups,
                channels_last=self.channels_last,
                pool=self.pool,
            )
            outputs = together(layer, input, self.weight, self.bias)
            if outputs is not None:
                return outputs
        plain_outputs: Tensor = self._conv_forward(input, self.weight, self.bias)
        return plain_outputs if self.pool is None else self.pool(plain_outputs)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    channels_last: bool,
    pool: Pool | None = None,
) -> Tensor:
    """Return every client's convolution, pooled where `pool` says how, [clients, batch, out, height, width].

    `x` [clients, batch, in, height, width]; `weight` [clients, out, in / groups, kernel, kernel]; `bias` [clients,
    out].
    """
    clients, batch, channels, height, width = x.shape
    kernel = weight.shape[-2:]
    if kernel == (1, 1) and stride == (1, 1) and padding == (0, 0) and groups == 1:
        y = linear(x.movedim(2, -1), weight.flatten(2), bias).movedim(-1, 2)
        return y if pool is None else of_all(pool, y)
    if 2 * height * width * weight[0].numel() // (stride[0] * stride[1]) < SMALL_CONV:
        merged = x.transpose(0, 1).reshape(batch, clients * channels, height, width)
        flat = None if bias is None else bias.reshape(-1)
        y = F.conv2d(merged, weight.flatten(0, 1), flat, stride, padding, dilation, clients * groups)
        y = y if pool is None else pool(y)
        return y.view(batch, clients, weight.shape[1], *y.shape[-2:]).transpose(0, 1)
    result: Tensor = _CohortConv.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, (stride, padding, dilation, groups), channels_last, pool
    )
    return result


class _CohortConv(torch.autograd.Function):
    """One convolution after another, each with its pooling: libraries are at their best there, caches too."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: tuple[Any, ...],
        channels_last: bool,
        pool: Pool | None,
    ) -> Tensor:
        x, w = arranged(rounded(x), channels_last), rounded(weight)
        bias = None if bias is None else rounded(bias)
        ctx.how, ctx.last, ctx.pool = geometry, channels_last, pool
        ctx.share, ctx.biased = step_of(weight), bias is not None
        clients = len(weight)
        images = (F.conv2d(x[i], w[i], None if bias is None else bias[i], *geometry) for i in range(clients))
        if pool is None:
            out, maxima = stacked(images, clients, channels_last), None
        else:
            out, maxima, ctx.unpooled = pool.apart(images, clients, channels_last)
        ctx.save_for_backward(x, w, weight, None if pool is None else out, maxima)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w, weight, out, maxima = ctx.saved_tensors
        share: WeightStep | None = ctx.share
        pool: Pool | None = ctx.pool
        stride, padding, dilation, groups = ctx.how
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        mask = [needs_x, needs_w, ctx.biased and needs_b]
        g = arranged(g, ctx.last)
        gradients = g.unbind() if pool is None else pool.back(g, out, maxima, ctx.unpooled, ctx.last)
        by_client: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        for i, gradient in enumerate(gradients):
            dx, dw, db = torch.ops.aten.convolution_backward(
                gradient,
                x[i],
                w[i],
                [weight.shape[1]],
                stride,
                padding,
                dilation,
                False,
                [0, 0],
                groups,
                mask,
            )
            if share is not None:
                share.subtract(weight, i, dw)
                dw = None
            by_client.append((dx, dw, db))
        return (
            stacked((dx for dx, _, _ in by_client), len(by_client), ctx.last) if needs_x else None,
            torch.stack([dw for _, dw, _ in by_client if dw is not None])
            if needs_w and share is None
            else None,
            torch.stack([db for _, _, db in by_client if db is not None]) if mask[2] else None,
            None,
            None,
            None,
        )
