"""Dropout whose mask is a function of a key.

The ordinary layer draws from the global random state, so its mask depends on everything that was drawn
before. Here the mask of an element depends on (key, number of the dropout call within the forward pass,
position of the element) alone. One client therefore gets the same masks in a loop, under `torch.func.vmap`
and on another machine, and rows that pad a batch at its end do not change the masks of the rows before
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tailorfl.errors import ModelError


def _signed(value: int) -> int:
    """The 64-bit pattern `value` as the signed integer that an int64 tensor holds."""
    return value - (1 << 64) if value >= 1 << 63 else value


# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the increment of the counter and the two multipliers.
_STEP = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)
_BITS = 24


def _shift_right(value: Tensor, bits: int) -> Tensor:
    # int64's own shift copies the sign bit downwards; the hash needs zeros there.
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _scramble(value: Tensor) -> Tensor:
    """SplitMix64's output function on int64 tensors (multiplication wraps modulo 2^64)."""
    value = (value ^ _shift_right(value, 30)) * _MULTIPLIER_1
    value = (value ^ _shift_right(value, 27)) * _MULTIPLIER_2
    return value ^ _shift_right(value, 31)


def fold_key(key: Tensor, number: Tensor | int) -> Tensor:
    """A new key from a key and a number such as a step or a sample index; int64, shape of `key` + `number`.

    Keys of different numbers are unrelated streams, also where the numbers are consecutive.
    """
    offset = number * _STEP
    if isinstance(offset, int):
        offset = _signed(offset % (1 << 64))  # Python's integers do not wrap by themselves
    return _scramble(_scramble(key + _STEP) + offset)


@dataclass
class _Stream:
    key: Tensor
    calls: int = 0


_STREAM: ContextVar[_Stream | None] = ContextVar("tailorfl_dropout_stream", default=None)


@contextmanager
def dropout_key(key: Tensor) -> Iterator[None]:
    """Gives the dropout layers called inside the block their key: an int64 tensor without axes.

    Under `vmap` enter the block inside the vmapped function; the key may then differ from client to client.
    Use one block for one forward pass: a second pass in the same block continues the count of calls and
    gets other masks, a second block with the same key repeats them (as sharpness-aware methods want). A
    function vmapped over samples needs one key per sample: `fold_key(key, row)`. Raises ModelError if the
    key is something else.
    """
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or key.dim() != 0:
        given = f"{key.dtype} of shape {tuple(key.shape)}" if isinstance(key, Tensor) else type(key).__name__
        raise ModelError(f"a dropout key is an int64 tensor without axes, got {given}.")
    token = _STREAM.set(_Stream(key))
    try:
        yield
    finally:
        _STREAM.reset(token)


def keep_mask(key: Tensor, call: int, shape: torch.Size, p: float, device: torch.device) -> Tensor:
    """Bool tensor of `shape`, each element True with probability 1-p (to 2^-24)."""
    position = torch.arange(shape.numel(), dtype=torch.int64, device=device)
    bits = _scramble(fold_key(key.to(device), call) + position * _STEP)
    return (_shift_right(bits, 64 - _BITS) < round((1.0 - p) * (1 << _BITS))).reshape(shape)


class Dropout(nn.Dropout):
    """Zeroes elements with probability p and scales the others by 1/(1-p); the mask comes from `dropout_key`.

    Never writes to its input, whatever `inplace` says.
    """

    def forward(self, input: Tensor) -> Tensor:
        """A tensor shaped like `input`; raises ModelError in training mode (p > 0) outside `dropout_key`."""
        if not self.training or self.p == 0:
            return input
        stream = _STREAM.get()
        if stream is None:
            raise ModelError(
                "a dropout layer in training mode has no key; run the forward pass inside "
                "`with dropout_key(key):`, or call .eval() on the module."
            )
        call, stream.calls = stream.calls, stream.calls + 1
        if self.p == 1:
            return torch.zeros_like(input)
        keep = keep_mask(stream.key, call, input.shape, self.p, input.device)
        return torch.where(keep, input * (1.0 / (1.0 - self.p)), 0.0)


_UNKEYED = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _draws_unkeyed(module: nn.Module) -> bool:
    inner = isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
    return inner or isinstance(module, _UNKEYED)


def replace_dropout(module: nn.Module) -> nn.Module:
    """The module with every `nn.Dropout` in it replaced by `Dropout`: same names, probabilities and modes.

    Works in place and returns the module (or its replacement, if the module itself is an `nn.Dropout`).
    Raises ModelError for layers that draw masks of another kind from the global random state; calls of
    `torch.nn.functional.dropout` inside a user's forward cannot be seen.
    """
    unkeyed = [f"{name or '(the module)'} ({type(part).__name__})"
               for name, part in module.named_modules() if _draws_unkeyed(part)]  # fmt: skip
    if unkeyed:
        raise ModelError(
            f"these layers draw dropout masks that no key controls: {', '.join(unkeyed)}; "
            "use nn.Dropout layers, or set their probability to 0 and remove channel-wise ones."
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
