"""Answers of a deployed model that need more than a pass through it: their inputs, and the vote of a memory.

The vote is the class shares of the nearest samples in the memory, or their mean target. kNN-Per mixes it with the
model's own answers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tailorfl.training.keys import generator


class Shown(NamedTuple):
    """Outputs and features of a model on samples, in evaluation mode."""

    outputs: Tensor
    """[rows, outputs]"""
    features: Tensor
    """Inputs of its head, [rows, width]."""


class Memory(NamedTuple):
    """A client's own samples as its model sees them, and their targets."""

    train: Shown
    train_y: Tensor
    val: Shown
    val_y: Tensor


class Answering(nn.Module):
    """A network and the module that turns its outputs and features into answers, as one: samples -> answers.

    Args:
        network: samples -> outputs [rows, outputs].
        head: name of the layer in it whose input is the features.
        answers: (outputs, features [rows, width]) -> answers [rows, outputs].
    """

    def __init__(self, network: nn.Module, head: str, answers: nn.Module) -> None:
        super().__init__()
        self.network, self.head, self.answers = network, head, answers

    def forward(self, x: Tensor) -> Tensor:
        """Return the answers to samples `x`, [rows, outputs]."""
        inputs = []
        head = self.network.get_submodule(self.head)
        hook = head.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        try:
            outputs = self.network(x)
        finally:
            hook.remove()
        features = inputs[0][:, -1] if inputs[0].dim() == 3 else inputs[0]
        answers: Tensor = self.answers(outputs, features)
        return answers


GRID = tuple(step / 10 for step in range(11))
LEAST = 1e-12
"""Probabilities are at least this, so that their logarithms are finite."""
AT_ONCE = 1024
"""Samples whose distances to the memory are computed at once."""


class Voting(nn.Module):
    """A deployed model's answers: its outputs or their probabilities, mixed with a vote of the samples in its memory.

    Args:
        z, y: features [samples, d_z] of the memory, and its classes int64 [samples] or numbers [samples, outputs].
        outputs: number of classes or of predicted numbers.
        neighbours, scale: k and s.
        lam: λ, the share of the vote.
        raw: whether the vote is mixed with the outputs themselves, not with their softmax.
    """

    z: Tensor
    y: Tensor

    def __init__(
        self, z: Tensor, y: Tensor, outputs: int, neighbours: int, scale: float, lam: float, raw: bool
    ) -> None:
        super().__init__()
        self.register_buffer("z", z)
        self.register_buffer("y", y)
        self.outputs, self.neighbours, self.scale = outputs, min(neighbours, len(z)), scale
        self.lam, self.raw = lam, raw

    def forward(self, outputs: Tensor, features: Tensor) -> Tensor:
        """Return the mixture of outputs [rows, outputs] and features [rows, d_z], in logarithms for probabilities."""
        probabilities = outputs if self.raw else outputs.softmax(1)
        mixed = self.lam * self.vote(features) + (1 - self.lam) * probabilities
        return mixed if self.raw else mixed.clamp(min=LEAST).log()

    def vote(self, features: Tensor) -> Tensor:
        """Return the class shares, or mean target, of the samples nearest to features [rows, d_z]: [rows, outputs]."""
        votes = [features.new_zeros(0, self.outputs)]
        for part in torch.split(features, AT_ONCE):
            # Entry by entry: a product of matrices would round the distance of a sample to itself away from 0.
            square = torch.cdist(part, self.z, compute_mode="donot_use_mm_for_euclid_dist").square()
            near, which = square.topk(self.neighbours, dim=1, largest=False)
            # Relative to the nearest: shares stay the same, and the weights of a far sample do not all underflow to 0.
            kernel = torch.exp((near[:, :1] - near) / (self.z.shape[1] * self.scale))
            votes.append(self._weighted(self.y[which], kernel) / kernel.sum(1, keepdim=True))
        return torch.cat(votes)

    def _weighted(self, y: Tensor, kernel: Tensor) -> Tensor:
        """Return Σ_j κ_j 1[y_j = c] of classes [rows, k], or Σ_j κ_j y_j of numbers [rows, k, outputs]."""
        if y.is_floating_point():
            return (kernel[:, :, None] * y).sum(1)
        # `shape[0]` and not `len`, which a trace of TorchScript would take for a constant.
        return kernel.new_zeros(kernel.shape[0], self.outputs).scatter_add(1, y, kernel)


class Unaided(nn.Module):
    """A module that returns the model's outputs unchanged."""

    def forward(self, outputs: Tensor, features: Tensor) -> Tensor:
        """Return `outputs`."""
        return outputs


def best_weight(vote: Tensor, outputs: Tensor, y: Tensor) -> float:
    """Return the smallest λ of the grid with the fewest wrong classes, or the least squared error of numbers."""

    def error(lam: float) -> float:
        mixed = lam * vote + (1 - lam) * outputs
        wrong = (mixed - y).square() if y.is_floating_point() else mixed.argmax(1) != y
        return float(wrong.sum())

    errors = [error(lam) for lam in GRID]
    return GRID[errors.index(min(errors))]


def chosen(samples: int, capacity: int | None) -> Tensor:
    """Return the indices of the samples, out of `samples`, that are in the memory; the same at every call."""
    most = samples if capacity is None else min(capacity, samples)
    return torch.from_numpy(generator(0, "memory", samples).permutation(samples)[:most])
