"""kNN-Per (Marfoq et al., "Personalized Federated Learning through Local Memorization", ICML 2022).

    training:    FedAvg
    deployed:    the global model beside a vote of the client's own nearest training samples
                 memory {(z_j, y_j)}: z_j = f(x_j; φ) of own training samples;   K: the k nearest to z by ‖z − z_j‖
                 p(c|x) = Σ_{j∈K} κ_j 1[y_j = c] / Σ_{j∈K} κ_j,     κ_j = exp(−‖z − z_j‖² / (d_z s))
                 output  λ_i p + (1 − λ_i) σ(f(x; w)),   λ_i by validation accuracy, the smallest of the best

Outputs are logarithms of these probabilities, so that losses and metrics read them as logits. (The official code leaves
s unused, chooses λ and the memory's size on test samples, and unless told otherwise mixes p with logits: `mix` = logits
gives λ_i p + (1 − λ_i) f(x; w).) λ_i is among 0, 0.1, ..., 1; a client without validation samples mixes half and half.
Nothing is kept between rounds and nothing of the memory is sent, so a newcomer votes with its own samples at once. An
exported model is w with the memory and λ_i, so whoever gets it gets features and labels of the client's samples.

| symbol | here |
|---|---|
| w | server state `w` |
| k, s | `neighbours`, `scale` |
| λ_i | `lam`, chosen by validation if it is not given |
| what p is mixed with | `mix` |
| size of the memory | `capacity`, a random part of the training samples (default: all) |
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.core.answers import Memory
from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.method import Family, Grid, register
from tailorfl.core.reduction import Facts, Reduction
from tailorfl.methods.class_features import classes_only
from tailorfl.methods.fedavg import FedAvg
from tailorfl.settings.privacy import PrivacyLevel
from tailorfl.training.keys import generator

GRID = tuple(step / 10 for step in range(11))
LEAST = 1e-12
"""Probabilities are at least this, so that their logarithms are finite."""
AT_ONCE = 1024
"""Samples whose distances to the memory are taken together."""


@register
class KNNPer(FedAvg):
    """FedAvg whose deployed model asks the client's nearest training samples."""

    name: ClassVar[str] = "knn_per"
    title: ClassVar[str] = "kNN-Per"
    paper: ClassVar[str] = "Marfoq et al., ICML 2022"
    family: ClassVar[Family] = "knowledge"
    grid: ClassVar[Grid] = {"neighbours": (5, 7, 10, 20), "scale": (0.1, 1.0, 10.0)}
    has_personal: ClassVar[bool] = True
    answers: ClassVar[bool] = True
    neighbours: int = Field(10, ge=1, description="k: samples of the memory that vote")
    scale: float = Field(1.0, gt=0, description="s: how fast a vote falls with the squared distance")
    lam: float | None = Field(None, ge=0, le=1, description="λ of all clients; default by validation")
    mix: Literal["probabilities", "logits"] = Field(
        "probabilities", description="what votes are mixed with; logits as in the authors' code"
    )
    capacity: int | None = Field(None, ge=0, description="most samples in the memory; default all")

    def server_state(self, ctx: Context) -> TensorDict:
        classes_only(ctx, self.title)
        return super().server_state(ctx)

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return received

    def answering(self, memory: Memory) -> nn.Module:
        kept = chosen(len(memory.train_y), self.capacity)
        if not len(kept) or self.lam == 0:
            return Unaided()
        z, y, classes = memory.train.features[kept], memory.train_y[kept], memory.train.outputs.shape[1]
        logits = self.mix == "logits"
        lam = 0.5 if self.lam is None else self.lam
        voting = Voting(z, y, classes, self.neighbours, self.scale, lam, logits)
        if self.lam is None and len(memory.val_y):
            own = memory.val.outputs if logits else memory.val.outputs.softmax(1)
            voting.lam = best_weight(voting.vote(memory.val.features), own, memory.val_y)
        return voting

    def unprotected(self, level: PrivacyLevel) -> str:
        return "a client's own samples in the answers of its deployed model" if level == "sample" else ""

    def reductions(self, facts: Facts) -> tuple[Reduction, ...]:
        reasons = {"with λ = 0": self.lam == 0, "with an empty memory": self.capacity == 0}
        return next((self.as_fedavg(because) for because, holds in reasons.items() if holds), ())


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
