"""Noise that a layer adds in training, a function of a key as the masks of dropout are."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from tailorfl.hashing import uniform
from tailorfl.models.dropout import Keyed, next_draw


class PlainGumbel(nn.Module):
    """Adds independent standard Gumbel noise in training mode, of torch's own random numbers."""

    def forward(self, input: Tensor) -> Tensor:
        """A tensor shaped like `input`."""
        if not self.training:
            return input
        return input - torch.log(-torch.log(torch.rand_like(input).clamp(1e-7, 1 - 1e-7)))


class Gumbel(Keyed):
    """Adds independent standard Gumbel noise −log(−log u) in training mode, and nothing in evaluation mode."""

    plain: ClassVar[type[nn.Module]] = PlainGumbel

    def forward(self, input: Tensor) -> Tensor:
        """A tensor shaped like `input`."""
        if not self.training:
            return input
        u = uniform(*next_draw("Gumbel"), input.shape, input.device, input.dtype)
        return input - torch.log(-torch.log(u))
