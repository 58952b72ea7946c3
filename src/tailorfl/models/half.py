"""Networks that compute in bfloat16: the products and convolutions of a forward pass, and of the backward pass behind.

Weights, what comes out of a network, and all that is made of that stay float32: losses, gradients, updates, sums.
Inside `in_bfloat16` a forward pass runs under torch's autocast; the layers of a cohort
(`tailorfl.models.cohort_layers`, `tailorfl.models.cohort_convs`), which it does not see, round what goes into a product
themselves:

    Y = round(X) round(W)ᵀ,   dW = round(G)ᵀ round(X),   dX = round(G) round(W)       sums inside a product in float32

Norms, pooling and activations take what they are given; a norm's statistics are float32 in either case.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

HALF = torch.bfloat16

_DEVICE: ContextVar[str | None] = ContextVar("tailorfl_half", default=None)
"""The kind of device whose forward passes are in bfloat16, None where they are not."""


@contextmanager
def in_bfloat16(device: str) -> Iterator[None]:
    """Return a block in which networks compute in bfloat16 on a kind of device: cpu or cuda."""
    token = _DEVICE.set(device)
    try:
        yield
    finally:
        _DEVICE.reset(token)


@contextmanager
def in_float32() -> Iterator[None]:
    """Return a block in which networks compute in float32, whatever they do around it."""
    token = _DEVICE.set(None)
    try:
        yield
    finally:
        _DEVICE.reset(token)


def is_half() -> bool:
    """Whether networks compute in bfloat16 here."""
    return _DEVICE.get() is not None


def forward_pass() -> AbstractContextManager[object]:
    """Return the block of one forward pass: under autocast where networks compute in bfloat16, else nothing."""
    device = _DEVICE.get()
    # Each weight is used once in most passes, and what autocast keeps of it would be of a map that is gone.
    return nullcontext() if device is None else torch.autocast(device, HALF, cache_enabled=False)


def widened(tensor: Tensor) -> Tensor:
    """Return what leaves a network: float32 where it is bfloat16, else the tensor itself."""
    return tensor.float() if is_half() and tensor.dtype is HALF else tensor


def rounded(tensor: Tensor) -> Tensor:
    """Return what goes into a product: bfloat16 where networks compute in it, else the tensor itself."""
    return tensor.to(HALF) if is_half() and tensor.dtype is torch.float32 else tensor
