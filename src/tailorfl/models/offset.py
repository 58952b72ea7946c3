"""A linear head that adds a vector to its features first: y = W (z + b) + c."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tailorfl.errors import ModelError
from tailorfl.models.layers import head_layer

OFFSET = "offset"
"""Name of the vector in its layer."""


class OffsetLinear(nn.Linear):
    """A linear layer whose input is moved by a vector first."""

    offset: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """Features [..., inputs] -> outputs [..., outputs]."""
        return nn.functional.linear(input + self.offset, self.weight, self.bias)


def add_offset(module: nn.Module) -> None:
    """Turns the head of a network into an `OffsetLinear` with the vector 0, in place: no name and no output changes.

    Raises:
        ModelError: the head is no ordinary linear layer.
    """
    head = head_layer(module)
    if type(head) is not nn.Linear:
        raise ModelError(
            f"a vector is added to the features before a head that is a linear layer, but that of a "
            f"{type(module).__name__} is {'not there' if head is None else f'a {type(head).__name__}'}"
        )
    head.__class__ = OffsetLinear
    head.register_parameter(OFFSET, nn.Parameter(torch.zeros_like(head.weight[0])))


def is_offset(name: str, tensor: Tensor, module: nn.Module) -> bool:
    """Whether a tensor of a model is such a vector; a selector."""
    return isinstance(module, OffsetLinear) and name.rpartition(".")[2] == OFFSET
