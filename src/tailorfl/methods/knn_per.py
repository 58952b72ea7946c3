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
exported model is w: who deploys it needs the client's samples beside it.

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
from torch import Tensor

from tailorfl.core.answers import Memory, Shown
from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.method import Family, register
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

    def answer(self, asked: Shown, memory: Memory) -> Tensor:
        kept = chosen(len(memory.train_y), self.capacity)
        if not len(kept) or self.lam == 0 or not len(asked.outputs):
            return asked.outputs
        z, y = memory.train.features[kept], memory.train_y[kept]

        def parts(shown: Shown) -> tuple[Tensor, Tensor]:
            own = shown.outputs if self.mix == "logits" else shown.outputs.softmax(1)
            return self.vote(shown.features, z, y, shown.outputs.shape[1]), own

        if (lam := self.lam) is None:
            lam = best_weight(*parts(memory.val), memory.val_y) if len(memory.val_y) else 0.5
        p, own = parts(asked)
        mixed = lam * p + (1 - lam) * own
        return mixed if self.mix == "logits" else mixed.clamp(min=LEAST).log()

    def vote(self, asked: Tensor, z: Tensor, y: Tensor, classes: int) -> Tensor:
        """Returns p [rows, classes] of features `asked` [rows, d_z], given those of the memory and its labels."""
        found = []
        for part in torch.split(asked, AT_ONCE):
            # Entry by entry: a product of matrices would round the distance of a sample to itself away from 0.
            square = torch.cdist(part, z, compute_mode="donot_use_mm_for_euclid_dist").square()
            near, which = square.topk(min(self.neighbours, len(z)), dim=1, largest=False)
            # Relative to the nearest, which changes no share and keeps a far sample's weights from all being 0.
            kernel = torch.exp((near[:, :1] - near) / (z.shape[1] * self.scale))
            votes = torch.zeros(len(part), classes, dtype=kernel.dtype).scatter_add_(1, y[which], kernel)
            found.append(votes / votes.sum(1, keepdim=True))
        return torch.cat(found)

    def unprotected(self, level: PrivacyLevel) -> str:
        return "a client's own samples in the answers of its deployed model" if level == "sample" else ""

    def reductions(self, facts: Facts) -> tuple[Reduction, ...]:
        reasons = {"with λ = 0": self.lam == 0, "with an empty memory": self.capacity == 0}
        return next((self.as_fedavg(because) for because, holds in reasons.items() if holds), ())


def best_weight(p: Tensor, own: Tensor, y: Tensor) -> float:
    """Returns the smallest λ of the grid with which most samples are right."""
    right = [float(((lam * p + (1 - lam) * own).argmax(1) == y).sum()) for lam in GRID]
    return GRID[right.index(max(right))]


def chosen(samples: int, capacity: int | None) -> Tensor:
    """Returns which of so many samples are in the memory, the same whenever it is asked."""
    most = samples if capacity is None else min(capacity, samples)
    return torch.from_numpy(generator(0, "memory", samples).permutation(samples)[:most])
