"""A linear head whose features a vector changes first: y = W relu(z ⊙ (1 + γ(u)) + β(u)) + c."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tailorfl.models.layers import replace_head

OWN = ("weight", "bias", "condition")
"""Names of what is the head's own: W, c and u."""


class Conditioning(nn.Module):
    """Features changed by a vector: relu(z ⊙ (1 + γ(u)) + β(u)), γ and β each Linear, ReLU, LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))
        self.shift = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        """Features [..., width] and a vector [width] -> features [..., width]."""
        row = u[None]
        return torch.relu(z * (1 + self.scale(row)[0]) + self.shift(row)[0])


class ConditionalHead(nn.Module):
    """A linear head on features that its vector `condition` changes first; it also has a vector for every class."""

    condition: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.conditioning = Conditioning(weight.shape[1])
        self.embeddings = nn.Parameter(torch.randn_like(weight))
        self.register_buffer("condition", torch.zeros_like(weight[0]).detach())

    def forward(self, z: Tensor) -> Tensor:
        """Features [..., width] -> outputs [..., classes]."""
        return linear(self.conditioning(z, self.condition), self.weight, self.bias)


def add_condition(module: nn.Module) -> None:
    """Turn the head of a network into a `ConditionalHead` with its weights and u = 0; in place.

    Raises:
        ModelError: the head is no ordinary linear layer inside a network.
    """
    replace_head(
        module, lambda head: ConditionalHead(head.weight, head.bias), "a vector changes the features before"
    )


def is_own(name: str, tensor: Tensor, module: nn.Module) -> bool:
    """Whether a tensor is the weight, the bias or the vector of such a head; a selector."""
    return isinstance(module, ConditionalHead) and name.rpartition(".")[2] in OWN
