"""The order of memory in which the images of a whole cohort lie: channels first or channels last."""

from __future__ import annotations

from collections.abc import Iterable

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


def stacked(images: Iterable[Tensor], clients: int, channels_last: bool) -> Tensor:
    """Returns [clients, batch, channels, height, width] in the wanted order of memory, of each client's images."""
    out: Tensor | None = None
    for i, image in enumerate(images):
        pixels = image.movedim(1, -1) if channels_last else image
        if clients == 1:
            out = pixels.contiguous().unsqueeze(0)
            break
        if out is None:
            out = pixels.new_empty(clients, *pixels.shape)
        out[i] = pixels
    assert out is not None
    return out.movedim(-1, 2) if channels_last else out


def empty(like: Tensor, clients: int, channels_last: bool) -> Tensor:
    """Returns room for [clients, batch, channels, height, width] in the wanted order; `like` is one client's part."""
    if not channels_last:
        return like.new_empty(clients, *like.shape)
    batch, channels, height, width = like.shape
    return like.new_empty(clients, batch, height, width, channels).movedim(-1, 2)
