"""LoRA of which a client has the first ranks only: y = W x + s B (m ⊙ A x), m its vector of 0 and a scale.

Cut-off rows of A and columns of B then have no share in the outputs and no gradient, so clients of several ranks have
tensors of one shape and train side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

KEPT = "kept"
"""Name of m."""


class RankedUp(nn.Module):
    """The factor B of LoRA behind a vector for its ranks."""

    kept: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer(KEPT, torch.ones_like(weight[0]).detach())

    def forward(self, h: Tensor) -> Tensor:
        """[..., r] -> [..., out]."""
        return linear(h * self.kept, self.weight)


def add_ranks(module: nn.Module) -> None:
    """Turn every factor B of LoRA in a network into a `RankedUp` with m = 1, in place: no output changes."""
    factors = {
        path: part
        for path, part in module.named_modules()
        if isinstance(part, nn.Linear) and "lora_B" in path.split(".")
    }
    for path, part in factors.items():
        module.set_submodule(path, RankedUp(part.weight))


def fold_ranks(module: nn.Module) -> None:
    """Turn every `RankedUp` into the linear layer B · diag(m), in place: no output changes."""
    ranked = {path: part for path, part in module.named_modules() if isinstance(part, RankedUp)}
    for path, part in ranked.items():
        plain = nn.Linear(part.weight.shape[1], part.weight.shape[0], bias=False, device="meta")
        plain.weight = nn.Parameter((part.weight * part.kept).detach(), requires_grad=False)
        module.set_submodule(path, plain)


def is_kept(name: str, tensor: Tensor, module: nn.Module) -> bool:
    """Whether a tensor is such a vector; a selector."""
    return isinstance(module, RankedUp) and name.rpartition(".")[2] == KEPT
