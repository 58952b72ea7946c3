"""Random numbers that are a function of a key, as torch operations: the same bits on any device and under `vmap`.

Models (dropout masks) and data (augmented images) draw from it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """Return the 64-bit pattern `value` as the signed integer that an int64 tensor holds."""
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
    """Apply SplitMix64's output function to int64 tensors (multiplication wraps modulo 2^64)."""
    value = (value ^ _shift_right(value, 30)) * _MULTIPLIER_1
    value = (value ^ _shift_right(value, 27)) * _MULTIPLIER_2
    return value ^ _shift_right(value, 31)


def fold_key(key: Tensor, number: Tensor | int) -> Tensor:
    """Return a new key from a key and a number such as a step or a sample index; int64, shape of `key` + `number`.

    Keys of different numbers are unrelated streams, even if the numbers are consecutive.
    """
    offset = number * _STEP
    if isinstance(offset, int):
        offset = _signed(offset % (1 << 64))  # Python's integers do not wrap
    return _scramble(_scramble(key + _STEP) + offset)


def keep_mask(key: Tensor, call: int, shape: torch.Size, p: float, device: torch.device) -> Tensor:
    """Return a bool tensor of `shape`, each element True with probability 1-p (to 2^-24)."""
    position = torch.arange(shape.numel(), dtype=torch.int64, device=device)
    bits = _scramble(fold_key(key.to(device), call) + position * _STEP)
    return (_shift_right(bits, 64 - _BITS) < round((1.0 - p) * (1 << _BITS))).reshape(shape)


def uniform(key: Tensor, call: int, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return numbers of `shape` strictly between 0 and 1, the midpoints of 2^24 equal parts."""
    position = torch.arange(shape.numel(), dtype=torch.int64, device=device)
    bits = _shift_right(_scramble(fold_key(key.to(device), call) + position * _STEP), 64 - _BITS)
    # In float64 first: the last midpoints are not representable in float32.
    inside = ((bits.double() + 0.5) / (1 << _BITS)).clamp(max=1 - torch.finfo(dtype).eps)
    return inside.to(dtype).reshape(shape)


def below(bound: int, key: Tensor, number: int) -> Tensor:
    """Return integers in 0..bound-1, int64 of the shape of `key`: uniform to bound / 2^24."""
    return (_shift_right(fold_key(key, number), 64 - _BITS) * bound) >> _BITS
