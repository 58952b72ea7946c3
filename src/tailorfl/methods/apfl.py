"""APFL (Deng et al., "Adaptive Personalized Federated Learning", 2020).

    personal model  v̄_i = α_i v_i + (1 − α_i) w_i

    server sends w;  w_i = w
    client i, for every batch:   w_i = w_i − η ∇F(w_i);   v_i = v_i − η α_i ∇F(v̄_i)   with the new w_i in v̄_i
    once a round, if adaptive:   α_i = clip(α_i − η ⟨∇F(v̄_i), v_i − w_i⟩, 0, 1)     before the first step
    client sends w_i             server:  w = mean_S w_i

w_i and v_i train together, each with its own optimizer: momentum, weight decay, AdamW, a schedule and `train.clip` act
on each model separately, and the new w_i is the one after its optimizer's step. The step of α_i is plain, at the run's
rate. The official code updates w_i first, as above; the paper's algorithm takes both gradients at the models before the
step (`mixture: old`).

Parameters are mixed, as in the paper; one reference implementation mixes logits instead. A client deploys v̄_i with the
w_i of its last training, or with the global w that it receives now (`personal_w: global`).

| symbol | here |
|---|---|
| v_i, α_i, last w_i | client state `v`, `alpha`, `w` |
| α | `alpha` (start value) |
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
from tailorfl.core.reduction import comparable, to_local
from tailorfl.methods.bases import ServerModel
from tailorfl.methods.mixtures import mix
from tailorfl.training import tree
from tailorfl.training.gradients import Directions, Gradient


@register
class APFL(ServerModel):
    """A mixture of a global and a local model, mixed in parameter space."""

    name = "apfl"
    title = "APFL"
    paper = "Deng et al., 2020"
    family = "two models"
    use = "a mix of local and global model with a learnt weight"
    grid = {"alpha": (0.1, 0.3, 0.5, 0.7)}
    special_cases = [
        to_local("with α = 1", adaptive=False, alpha=1),
        comparable("with α = 0", "personal", "deploys copies of FedAvg's clients", adaptive=False, alpha=0),
    ]
    models_trained = 2
    alpha: float = Field(0.5, ge=0, le=1, description="α: share of the local model in the mixture")
    adaptive: bool = Field(False, description="learn α_i on each client")
    mixture: Literal["new", "old"] = Field("new", description="w_i in v̄_i: after its step, or before (paper)")
    personal_w: Literal["local", "global"] = Field(
        "local", description="w in the deployed mixture: the client's from its last training, or the server's"
    )

    def client_state(self, ctx: Context) -> TensorDict:
        return TensorDict({"v": ctx.init, "w": ctx.init, "alpha": torch.tensor(self.alpha, dtype=ctx.dtype)})

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        v, w, alpha = state["v"], received, state["alpha"]
        if self.adaptive:
            v_p, w_p = client.parameters(v), client.parameters(w)
            g, gap = client.gradient(tree.merge(v, mix(alpha, v_p, w_p))), v_p - w_p
            alpha = (alpha - client.config.lr * tree.dot(g, gap)).clamp(0.0, 1.0)
        directions: Directions = {"w": of_global, "v": of_mixture} if self.mixture == "new" else of_both
        trained = client.fit({"w": w, "v": v}, direction=directions, given=(alpha,))
        v, w = trained["v"], trained["w"]
        return TensorDict({"v": v, "w": w, "alpha": alpha}), w

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        v, w = state["v"], received if self.personal_w == "global" else state["w"]
        return tree.merge(v, mix(state["alpha"], client.parameters(v), client.parameters(w)))

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        return TensorDict({"v": received, "w": received, "alpha": state["alpha"]})


def of_global(state: TensorDict, grad: Gradient, alpha: Tensor) -> TensorDict:
    """Return ∇F(w)."""
    return grad(state["w"], of="w")


def of_mixture(state: TensorDict, grad: Gradient, alpha: Tensor) -> TensorDict:
    """Return α∇F at the mixture."""
    return grad(mix(alpha, state["v"], state["w"]), of="v") * alpha


def of_both(state: TensorDict, grad: Gradient, alpha: Tensor) -> TensorDict:
    """Return the direction of (w, v), both at the models before the step."""
    return TensorDict({"w": of_global(state, grad, alpha), "v": of_mixture(state, grad, alpha)})
