"""The order of memory in which the images of a whole cohort lie: channels first or channels last."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def arranged(x: Tensor, channels_last: bool) -> Tensor:
    """`x` [clients, batch, channels, height, width] in the wanted order of memory."""
    if not channels_last:
        return x.contiguous()
    batch, channels, height, width = x.shape[1:]
    if channels == 1:
        # Both orders are the same in memory; only these strides say that channels come last.
        pixels = height * width
        return x.contiguous().as_strided(x.shape, (batch * pixels, pixels, 1, width, 1))
    return x.movedim(2, -1).contiguous().movedim(-1, 2)


def channels_last(x: Tensor) -> Tensor:
    """`x` [batch, channels, height, width] with channels last in memory.

    Written out: of a single channel both orders are the same memory, and torch then keeps the strides that say which.
    """
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)


def laid_out(x: Tensor, last: bool) -> Tensor:
    """`x` with channels last in memory where that is wanted and it is of images or a convolution, [., ., ., .]."""
    return channels_last(x) if last and x.dim() == 4 else x


def stacked(images: Iterable[Tensor], clients: int, channels_last: bool) -> Tensor:
    """Return [clients, batch, channels, height, width] in the wanted order of memory, of each client's images."""
    out: Tensor | None = None
    for i, image in enumerate(images):
        if clients == 1:
            if not channels_last:
                return image.contiguous().unsqueeze(0)
            return image.movedim(1, -1).contiguous().unsqueeze(0).movedim(-1, 2)
        if out is None:
            out = empty(image, clients, channels_last)
        out[i] = image
    assert out is not None
    return out


def empty(like: Tensor, clients: int, channels_last: bool) -> Tensor:
    """Return room for [clients, batch, channels, height, width] in the wanted order; `like` is one client's part."""
    if not channels_last:
        return like.new_empty(clients, *like.shape)
    batch, channels, height, width = like.shape
    return like.new_empty(clients, batch, height, width, channels).movedim(-1, 2)
