"""Networks that compute in bfloat16: the products and convolutions of a forward pass and its backward pass.

Weights, outputs of a network, and all that is computed from them stay float32: losses, gradients, updates, sums.
Inside `in_bfloat16` a forward pass runs under torch's autocast; the layers of a cohort
(`tailorfl.models.cohort_layers`, `tailorfl.models.cohort_convs`), which it does not see, round the factors of a product
themselves:

    Y = round(X) round(W)ᵀ,   dW = round(G)ᵀ round(X),   dX = round(G) round(W)       sums inside a product in float32

Norms, pooling and activations take either type; a norm's statistics are always float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

HALF = torch.bfloat16

_DEVICE: ContextVar[str | None] = ContextVar("tailorfl_half", default=None)
"""The kind of device whose forward passes are in bfloat16; None: none."""


@contextmanager
def in_bfloat16(device: str) -> Iterator[None]:
    """Open a block in which networks compute in bfloat16 on a kind of device: cpu or cuda."""
    token = _DEVICE.set(device)
    try:
        yield
    finally:
        _DEVICE.reset(token)


@contextmanager
def in_float32() -> Iterator[None]:
    """Open a block in which networks compute in float32, even inside `in_bfloat16`."""
    token = _DEVICE.set(None)
    try:
        yield
    finally:
        _DEVICE.reset(token)


def is_half() -> bool:
    """Return whether networks compute in bfloat16 here."""
    return _DEVICE.get() is not None


def forward_pass() -> AbstractContextManager[object]:
    """Return the context of one forward pass: autocast if networks compute in bfloat16, else a null context."""
    device = _DEVICE.get()
    # Most passes use each weight once, and autocast's cached copy would belong to a map that is closed.
    return nullcontext() if device is None else torch.autocast(device, HALF, cache_enabled=False)


def widened(tensor: Tensor) -> Tensor:
    """Return an output of a network as float32 if it is bfloat16, else the tensor itself."""
    return tensor.float() if is_half() and tensor.dtype is HALF else tensor


def rounded(tensor: Tensor) -> Tensor:
    """Return a factor of a product as bfloat16 if networks compute in it, else the tensor itself."""
    return tensor.to(HALF) if is_half() and tensor.dtype is torch.float32 else tensor
