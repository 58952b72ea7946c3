"""FedPHP (Li et al., "FedPHP: Federated Personalization with Inherited Private Models", ECML PKDD 2021).

    FedAvg whose local training is taught by an inherited private model v_i, a moving average of the client's models

    server sends w
    client i:  θ = LocalSGD(w, E) on  (1 − λ) F + λ R,   v_i in evaluation mode, no gradient
                   kd:   R = −mean_b Σ_c σ(f(x; v_i)/4)_c log σ(f(x; θ))_c
                   mmd:  R = MMD²(features under θ, features under v_i)
               μ = min(0.9 k_i / (qT), 0.9);   v_i = μ v_i + (1 − μ) θ;   k_i = k_i + 1            sends θ
    server:    w = Σ_S a_i θ                                                     deployed: v_i

R acts from the first participation on, with the initial v_i, and its temperature applies only to the teacher: both as
in the official code. MMD² is the V-statistic with five Gaussian kernels exp(−d²/(b 2^{k−2})), k = 0..4, and b the
mean squared distance of two different rows of the joint batch (1e-8 is added), through which no gradient flows, as in
the official code. A batch of one sample has R = 0 with mmd: b would be the only distance, so in that code the value of
R is constant and its slope is one over that distance. MMD² compares the samples of a batch, so sample-level privacy
refuses it. Running statistics are averaged like parameters. qT, the number of times that a client takes part in a run,
is not known beforehand if clients are sampled, so it is an option. A newcomer has v_i = w and k_i = 0.

| symbol | here |
|---|---|
| w | server state `w` |
| v_i, k_i | client state `v`, `count` |
| λ, R, qT | `lam`, `teach`, `horizon` |
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.method import register
from tailorfl.core.reduction import to_fedavg
from tailorfl.methods.class_features import classes_only
from tailorfl.methods.feature_distances import mmd_by_mean_distance
from tailorfl.methods.fedavg import FedAvg
from tailorfl.training import tree
from tailorfl.training.objective import Seen, Term

TEMPERATURE = 4.0
MOST = 0.9
"""The largest weight of the old v_i in its moving average."""


@register
class FedPHP(FedAvg):
    """FedAvg taught by each client's own moving average, which it deploys."""

    name = "fedphp"
    title = "FedPHP"
    paper = "Li et al., ECML PKDD 2021"
    family = "two models"
    use = "models that remember: the client's past model next to the new global one"
    grid = {"lam": (0.01, 0.05, 0.1, 0.3), "horizon": (10.0, 30.0, 100.0)}
    special_cases = [to_fedavg("with λ = 0", models=("global",), lam=0)]
    has_personal = True
    personal_receives = False
    lam: float = Field(0.1, ge=0, le=1, description="λ: weight of the teacher in addition to the loss")
    teach: Literal["kd", "mmd"] = Field(
        "kd", description="knowledge that v_i teaches: its predictions, or its features"
    )
    horizon: float = Field(
        30.0, gt=0, description="qT: participations after which v_i keeps nine tenths of its value"
    )

    def server_state(self, ctx: Context) -> TensorDict:
        if self.teach == "kd" and self.lam > 0:
            classes_only(ctx, self.title)
        return super().server_state(ctx)

    def client_state(self, ctx: Context) -> TensorDict:
        return TensorDict({"v": ctx.init, "count": torch.zeros(())})

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        v, count = state["v"], state["count"]
        theta = client.fit(received, term=self.lesson(v))
        mu = (MOST * count / self.horizon).clamp(max=MOST)
        average = {n: mixed(mu, t, theta.get(n)) for n, t in tree.tensors(v).items()}
        return TensorDict({"v": TensorDict(average), "count": count + 1}), theta

    def lesson(self, v: TensorDict) -> tuple[Term, ...]:
        """Return the term λ (R − F), which added to the loss F makes (1 − λ) F + λ R; none if λ is 0."""
        if self.lam == 0:
            return ()
        of = predictions if self.teach == "kd" else features

        def taught(batch: Seen, v: TensorDict) -> Tensor:
            return self.lam * (of(batch, v) - batch.loss)

        return (Term(taught, given=(v,), mixes=self.teach == "mmd"),)

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        v: TensorDict = state["v"]
        return v

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        return TensorDict({"v": received, "count": state["count"]})


def mixed(mu: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Return μ old + (1 − μ) new; for integers, such as counters, the new ones."""
    return mu.to(old.dtype) * old + (1 - mu).to(old.dtype) * new if old.is_floating_point() else new


def predictions(batch: Seen, v: TensorDict) -> Tensor:
    """Return the mean cross entropy of the model's predictions and those of v at a temperature, 0-d."""
    teacher = (batch.of(v)[0] / TEMPERATURE).softmax(-1)
    return batch.mean(-(teacher * batch.outputs.log_softmax(-1)).sum(-1))


def features(batch: Seen, v: TensorDict) -> Tensor:
    """Return the MMD² of the features of the model and of v, 0-d."""
    return mmd_by_mean_distance(batch.features, batch.of(v)[1], batch.weight)
