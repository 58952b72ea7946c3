"""Two linear heads between which a gate splits the features: y = W (r ⊙ z) + b + W' ((1 − r) ⊙ z) + b'."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from tailorfl.models.dropout import Gumbel
from tailorfl.models.layers import replace_head

OWN = ("weight", "bias", "context")
"""Names of what is a client's own: W, b and the context."""


class Gate(nn.Module):
    """A share of each feature: the first of two softmax probabilities of (logit + Gumbel noise)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.ReLU())
        self.noise = Gumbel()

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> shares r [..., width]."""
        first, second = self.noise(self.inner(x)).chunk(2, -1)
        return torch.sigmoid(first - second)


class GatedHead(nn.Module):
    """A linear head for a share of the features and another head, `common`, for the rest."""

    context: Tensor

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self.common = copy.deepcopy(head)
        self.gate = Gate(head.in_features)
        self.register_buffer("context", head.weight.detach().sum(0))

    def forward(self, z: Tensor) -> Tensor:
        """Features [..., width] -> outputs [..., classes]."""
        r = self.gate(z * normalize(self.context, dim=0))
        out: Tensor = linear(r * z, self.weight, self.bias) + self.common((1 - r) * z)
        return out


def add_gate(module: nn.Module) -> None:
    """Turn the head of a network into a `GatedHead` of two equal heads; in place.

    Raises:
        ModelError: the head is no ordinary linear layer inside a network.
    """
    replace_head(module, GatedHead, "a gate stands before")


def is_own(name: str, tensor: Tensor, module: nn.Module) -> bool:
    """Whether a tensor is the weight, the bias or the context of such a head; a selector."""
    return isinstance(module, GatedHead) and name.rpartition(".")[2] in OWN


def common(module: nn.Module) -> list[str]:
    """Return the names of the tensors of the other head, as a selector."""
    return [
        f"{path}.common.{name}"
        for path, part in module.named_modules()
        if isinstance(part, GatedHead)
        for name, _ in part.common.named_parameters()
    ]
