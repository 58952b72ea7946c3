"""Dropout whose mask, and noise whose draws, are a function of a key.

The ordinary layer draws from the global random state, so its mask depends on everything that was drawn
before. Here the mask of an element depends only on (key, number of the dropout call within the forward pass,
position of the element). One client therefore gets the same masks in a loop, under `torch.func.vmap`
and on another machine, and rows that pad the end of a batch do not change the masks of the rows before
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from tailorfl.errors import ModelError
from tailorfl.hashing import fold_key as fold_key
from tailorfl.hashing import keep_mask, uniform


@dataclass
class _Stream:
    key: Tensor
    calls: int = 0


_STREAM: ContextVar[_Stream | None] = ContextVar("tailorfl_dropout_stream", default=None)


@contextmanager
def dropout_key(key: Tensor) -> Iterator[None]:
    """Give the dropout layers called inside the block their key: an int64 tensor without axes.

    Under `vmap` enter the block inside the vmapped function; the key may then differ from client to client.
    Use one block for one forward pass: a second pass in the same block continues the count of calls and
    gets other masks, a second block with the same key repeats them (as sharpness-aware methods want). A
    function vmapped over samples needs one key per sample: `fold_key(key, row)`. Raises ModelError if the
    key is something else.
    """
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or key.dim() != 0:
        description = (
            f"{key.dtype} of shape {tuple(key.shape)}" if isinstance(key, Tensor) else type(key).__name__
        )
        raise ModelError(f"a dropout key is an int64 tensor without axes, got {description}.")
    token = _STREAM.set(_Stream(key))
    try:
        yield
    finally:
        _STREAM.reset(token)


def next_draw(layer: str) -> tuple[Tensor, int]:
    """Return (key of the forward pass, number of this draw in it), for `tailorfl.hashing`.

    Raises:
        ModelError: the pass has no key; names the layer.
    """
    stream = _STREAM.get()
    if stream is None:
        raise ModelError(
            f"a {layer} layer in training mode has no key; run the forward pass inside `with dropout_key(key):`, or "
            "call .eval() on the module."
        )
    call, stream.calls = stream.calls, stream.calls + 1
    return stream.key, call


class Keyed(nn.Module):
    """Base of layers that draw in training mode, only by `next_draw`."""

    plain: ClassVar[type[nn.Module]]
    """The class that replaces the layer if there are no keys: the same with torch's own random numbers."""


class Dropout(Keyed, nn.Dropout):
    """Zeroes elements with probability p and scales the others by 1/(1-p); the mask comes from `dropout_key`.

    Never writes to its input, regardless of `inplace`.
    """

    plain: ClassVar[type[nn.Module]] = nn.Dropout

    def forward(self, input: Tensor) -> Tensor:
        """Return a tensor shaped like `input`; raises ModelError in training mode (p > 0) outside `dropout_key`."""
        if not self.training or self.p == 0:
            return input
        key, call = next_draw("dropout")
        if self.p == 1:
            return torch.zeros_like(input)
        keep = keep_mask(key, call, self.mask_shape(input), self.p, input.device)
        return torch.where(keep, input * (1.0 / (1.0 - self.p)), 0.0)

    def mask_shape(self, input: Tensor) -> torch.Size:
        """Return the shape of an input's mask, which is broadcast to it."""
        return input.shape


class ChannelDropout(Dropout):
    """Zeroes whole channels of `[samples, channels, ...]` with probability p, as `nn.Dropout2d` does for images."""

    plain: ClassVar[type[nn.Module]] = nn.Dropout2d

    def mask_shape(self, input: Tensor) -> torch.Size:
        """Return the shape with one element per sample and channel."""
        return torch.Size((*input.shape[:2], *(1 for _ in input.shape[2:])))


_UNKEYED = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _draws_unkeyed(module: nn.Module) -> bool:
    inner = isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
    return inner or isinstance(module, _UNKEYED)


def replace_dropout(module: nn.Module) -> nn.Module:
    """Return the module with every `nn.Dropout` in it replaced by `Dropout`: same names, probabilities and modes.

    Works in place and returns the module (or its replacement, if the module itself is an `nn.Dropout`).
    Raises ModelError for layers that draw masks of another kind from the global random state; calls of
    `torch.nn.functional.dropout` inside a user's forward cannot be detected.
    """
    unkeyed = [f"{name or '(the module)'} ({type(part).__name__})"
               for name, part in module.named_modules() if _draws_unkeyed(part)]  # fmt: skip
    if unkeyed:
        raise ModelError(
            f"these layers draw dropout masks without a dropout key: {', '.join(unkeyed)}; use nn.Dropout layers, or "
            "set their probability to 0 and remove channel-wise ones."
        )
    replaced: dict[int, Dropout] = {}

    def keyed(part: nn.Module) -> nn.Module:
        if not isinstance(part, nn.Dropout) or isinstance(part, Dropout):
            return part
        return replaced.setdefault(id(part), Dropout(part.p)).train(part.training)

    for parent in list(module.modules()):
        # named_children() skips repetitions, and a layer used under two names must be replaced under both.
        for name, child in list(parent._modules.items()):
            if child is not None and keyed(child) is not child:
                setattr(parent, name, keyed(child))
    return keyed(module)


def plain_dropout(module: nn.Module) -> nn.Module:
    """Return the module with every `Dropout` in it turned into an `nn.Dropout`, and other `Keyed` layers likewise.

    The module is changed in place.
    """
    for part in module.modules():
        if isinstance(part, Keyed):
            object.__setattr__(part, "__class__", part.plain)
    return module


class PlainGumbel(nn.Module):
    """Adds independent standard Gumbel noise in training mode, with torch's own random numbers."""

    def forward(self, input: Tensor) -> Tensor:
        """Return a tensor shaped like `input`."""
        if not self.training:
            return input
        return input - torch.log(-torch.log(torch.rand_like(input).clamp(1e-7, 1 - 1e-7)))


class Gumbel(Keyed):
    """Adds independent standard Gumbel noise −log(−log u) in training mode, and nothing in evaluation mode."""

    plain: ClassVar[type[nn.Module]] = PlainGumbel

    def forward(self, input: Tensor) -> Tensor:
        """Return a tensor shaped like `input`."""
        if not self.training:
            return input
        u = uniform(*next_draw("Gumbel"), input.shape, input.device, input.dtype)
        return input - torch.log(-torch.log(u))
