"""kNN-Per (Marfoq et al., "Personalized Federated Learning through Local Memorization", ICML 2022).

    training:    FedAvg
    deployed:    the global model mixed with a vote of the client's own nearest training samples
                 memory {(z_j, y_j)}: z_j = f(x_j; φ) of own training samples;   K: the k nearest to z by ‖z − z_j‖
                 p(c|x) = Σ_{j∈K} κ_j 1[y_j = c] / Σ_{j∈K} κ_j,     κ_j = exp(−‖z − z_j‖² / (d_z s))
                 output  λ_i p + (1 − λ_i) σ(f(x; w)),   λ_i by validation accuracy, the smallest of the best

Outputs are logarithms of these probabilities, so that losses and metrics read them as logits. (The official code leaves
s unused, chooses λ and the memory's size on test samples, and by default mixes p with logits: `mix` = logits
gives λ_i p + (1 − λ_i) f(x; w).) λ_i is one of 0, 0.1, ..., 1; for a client without validation samples it is 0.5.

In regression, which the paper does not have, the vote is the neighbours' mean, and λ_i has the least squared error:

    output  λ_i Σ_{j∈K} κ_j y_j / Σ_{j∈K} κ_j  +  (1 − λ_i) f(x; w)

Motley (Wu et al., 2022) has this with κ_j = 1/‖z − z_j‖ and one λ for all clients.
Nothing is kept between rounds and nothing of the memory is sent, so a newcomer votes with its own samples at once. An
exported model is w with the memory and λ_i, so it contains features and labels of the client's samples.

| symbol | here |
|---|---|
| w | server state `w` |
| k, s | `neighbours`, `scale` |
| λ_i | `lam`, chosen by validation if it is not given |
| p is mixed with σ(f) or with f | `mix` |
| size of the memory | `capacity`, a random part of the training samples (default: all) |
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from tensordict import TensorDict
from torch import nn

from tailorfl.core.answers import Memory, Unaided, Voting, best_weight, chosen
from tailorfl.core.context import Context
from tailorfl.core.method import register
from tailorfl.core.reduction import exposure, to_fedavg
from tailorfl.errors import ConfigError
from tailorfl.methods.fedavg import FedAvg


@register
class KNNPer(FedAvg):
    """FedAvg whose deployed model is mixed with a vote of the client's nearest training samples."""

    name = "knn_per"
    title = "kNN-Per"
    paper = "Marfoq et al., ICML 2022"
    family = "knowledge"
    use = "a global model with the client's own nearest neighbours, without training"
    grid = {"neighbours": (5, 7, 10, 20), "scale": (0.1, 1.0, 10.0)}
    special_cases = [to_fedavg("with λ = 0", lam=0), to_fedavg("with an empty memory", capacity=0)]
    exposures = [exposure("a client's own samples in the answers of its deployed model", "sample")]
    has_personal = True
    answers = True
    neighbours: int = Field(10, ge=1, description="k: samples of the memory that vote")
    scale: float = Field(1.0, gt=0, description="s: how fast a vote falls with the squared distance")
    lam: float | None = Field(None, ge=0, le=1, description="λ of all clients; default: chosen by validation")
    mix: Literal["probabilities", "logits"] = Field(
        "probabilities",
        description="outputs to mix with the votes for classes; logits as in the authors' code",
    )
    capacity: int | None = Field(None, ge=0, description="largest number of samples in memory; default: all")

    def server_state(self, ctx: Context) -> TensorDict:
        if ctx.task not in ("classification", "regression"):
            raise ConfigError(
                f"{self.title} needs a classification or regression task, but the task is {ctx.task}"
            )
        if ctx.task == "regression" and self.mix == "logits":
            raise ConfigError(
                f"{self.title} with mix=logits needs classes; in regression it always uses the model's outputs, so "
                "leave mix out"
            )
        return super().server_state(ctx)

    def answering(self, memory: Memory) -> nn.Module:
        rows = chosen(len(memory.train_y), self.capacity)
        if not len(rows) or self.lam == 0:
            return Unaided()
        z, y, outputs = memory.train.features[rows], memory.train_y[rows], memory.train.outputs.shape[1]
        raw = self.mix == "logits" or y.is_floating_point()
        lam = 0.5 if self.lam is None else self.lam
        voting = Voting(z, y, outputs, self.neighbours, self.scale, lam, raw)
        if self.lam is None and len(memory.val_y):
            predictions = memory.val.outputs if raw else memory.val.outputs.softmax(1)
            voting.lam = best_weight(voting.vote(memory.val.features), predictions, memory.val_y)
        return voting
