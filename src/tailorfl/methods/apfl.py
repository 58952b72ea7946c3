"""APFL (Deng et al., "Adaptive Personalized Federated Learning", 2020).

    personal model  v̄_i = α_i v_i + (1 − α_i) w_i

    server sends w;  w_i = w
    client i, for every batch:   w_i = w_i − η ∇F(w_i);   v_i = v_i − η α_i ∇F(v̄_i)   with the new w_i in v̄_i
    once a round, if adaptive:   α_i = clip(α_i − η ⟨∇F(v̄_i), v_i − w_i⟩, 0, 1)     before the first step
    client sends w_i             server:  w = mean_S w_i

Parameters are mixed, as in the paper; one reference implementation mixes logits instead.

| symbol | here |
|---|---|
| v_i, α_i, last w_i | client state `v`, `alpha`, `w` |
| α | `alpha` (start value) |
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.gradients import Direction, Gradient
from tailorfl.core.method import register
from tailorfl.methods.bases import ServerModel


@register
class APFL(ServerModel):
    """A mixture of a global and a local model, mixed in parameter space."""

    name: ClassVar[str] = "apfl"
    title: ClassVar[str] = "APFL"
    paper: ClassVar[str] = "Deng et al., 2020"
    models_trained: ClassVar[int] = 2
    alpha: float = Field(0.5, ge=0, le=1, description="α: share of the local model in the mixture")
    adaptive: bool = Field(False, description="learn α_i on each client")

    def client_state(self, ctx: Context) -> TensorDict:
        alpha = torch.tensor(self.alpha, dtype=ctx.dtype)
        return TensorDict({"v": ctx.init, "w": ctx.init, "alpha": alpha}, batch_size=[])

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        v, w, alpha = state["v"], received, state["alpha"]
        if self.adaptive:
            v_p, w_p = client.parameters(v), client.parameters(w)
            g, gap = client.gradient(tree.merge(v, mix(alpha, v_p, w_p))), v_p - w_p
            alpha = (alpha - client.config.lr * tree.dot(g, gap)).clamp(0.0, 1.0)
        trained = client.fit({"w": w, "v": v}, direction=both(client.config.lr), given=(alpha,))
        v, w = trained["v"], trained["w"]
        return TensorDict({"v": v, "w": w, "alpha": alpha}, batch_size=[]), w

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        v, w = state["v"], state["w"]
        return tree.merge(v, mix(state["alpha"], client.parameters(v), client.parameters(w)))

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        return TensorDict({"v": received, "w": received, "alpha": state["alpha"]}, batch_size=[])


def mix(alpha: Tensor, v: TensorDict, w: TensorDict) -> TensorDict:
    """Returns α v + (1 − α) w for two sets of parameters."""
    return v * alpha + w * (1 - alpha)


def both(lr: float) -> Direction:
    """The direction of (w, v): ∇F(w), then α∇F at the mixture built with the w of AFTER its step."""

    def direction(state: TensorDict, grad: Gradient, alpha: Tensor) -> TensorDict:
        w, v = state["w"], state["v"]
        g_w = grad(w, of="w")
        g_mix = grad(mix(alpha, v, w - g_w * lr), of="v")
        return TensorDict({"w": g_w, "v": g_mix * alpha}, batch_size=[])

    return direction
