"""A vote of the nearest samples of a memory, which kNN-Per mixes with a model's answers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tailorfl.training.keys import generator

GRID = tuple(step / 10 for step in range(11))
LEAST = 1e-12
"""Probabilities are at least this, so that their logarithms are finite."""
AT_ONCE = 1024
"""Samples whose distances to the memory are taken together."""


class Voting(nn.Module):
    """A deployed model's answers: its probabilities (or logits), mixed with a vote of the samples in its memory.

    Args:
        z, y: features [samples, d_z] and classes int64 [samples] of the memory.
        classes: how many there are.
        neighbours, scale: k and s.
        lam: λ, the share of the vote.
        logits: whether it is mixed with logits.
    """

    z: Tensor
    y: Tensor

    def __init__(
        self, z: Tensor, y: Tensor, classes: int, neighbours: int, scale: float, lam: float, logits: bool
    ) -> None:
        super().__init__()
        self.register_buffer("z", z)
        self.register_buffer("y", y)
        self.classes, self.neighbours, self.scale = classes, min(neighbours, len(z)), scale
        self.lam, self.logits = lam, logits

    def forward(self, outputs: Tensor, features: Tensor) -> Tensor:
        """Outputs [rows, classes] and features [rows, d_z] of samples -> logits, or logarithms of probabilities."""
        own = outputs if self.logits else outputs.softmax(1)
        mixed = self.lam * self.vote(features) + (1 - self.lam) * own
        return mixed if self.logits else mixed.clamp(min=LEAST).log()

    def vote(self, features: Tensor) -> Tensor:
        """Features [rows, d_z] -> p: shares of the classes among the nearest samples, [rows, classes]."""
        found = [features.new_zeros(0, self.classes)]
        for part in torch.split(features, AT_ONCE):
            # Entry by entry: a product of matrices would round the distance of a sample to itself away from 0.
            square = torch.cdist(part, self.z, compute_mode="donot_use_mm_for_euclid_dist").square()
            near, which = square.topk(self.neighbours, dim=1, largest=False)
            # Relative to the nearest, which changes no share and keeps a far sample's weights from all being 0.
            kernel = torch.exp((near[:, :1] - near) / (self.z.shape[1] * self.scale))
            votes = kernel.new_zeros(part.shape[0], self.classes)
            votes = votes.scatter_add(1, self.y[which], kernel)
            found.append(votes / votes.sum(1, keepdim=True))
        return torch.cat(found)


class Unaided(nn.Module):
    """Answers with the model's outputs as they are."""

    def forward(self, outputs: Tensor, features: Tensor) -> Tensor:
        """Returns `outputs`."""
        return outputs


def best_weight(p: Tensor, own: Tensor, y: Tensor) -> float:
    """Returns the smallest λ of the grid with which most samples are right."""
    right = [float(((lam * p + (1 - lam) * own).argmax(1) == y).sum()) for lam in GRID]
    return GRID[right.index(max(right))]


def chosen(samples: int, capacity: int | None) -> Tensor:
    """Returns which of so many samples are in the memory, the same whenever it is asked."""
    most = samples if capacity is None else min(capacity, samples)
    return torch.from_numpy(generator(0, "memory", samples).permutation(samples)[:most])
