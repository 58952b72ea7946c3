"""MR-MTL: mean-regularised multi-task learning, our reading of the baseline "MTL" in PerAda (CVPR 2024).

    min  Σ_i p_i ( F_i(v_i) + (λ/2)‖v_i − v̄‖² ),   v̄ = Σ_j p_j v_j over ALL clients

    server sends v̄
    client i:  v_i⁺ = LocalSGD(v_i, E, prox (λ, v̄));   sends v_i⁺ − v_i
    server:    v̄ = v̄ + Σ_S p_i (v_i⁺ − v_i)

Sending the change keeps v̄ the exact mean of all clients' latest models without storing them on the server. With `mean`
= sampled, the variant "L2SGD" in Ditto's code, clients send v_i⁺ − v̄ and the server steps towards the mean of only
the sampled ones, which is different if not all take part:

    server:    v̄ = v̄ + (m/N) mean_S (v_i⁺ − v̄)

| symbol | here |
|---|---|
| v_i | client state |
| v̄ | server state |
| λ | `lam` |
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import to_local
from tailorfl.methods.bases import SendsChange, TwoModels
from tailorfl.training import tree


@register
class MRMTL(SendsChange, TwoModels):
    """Personal models pulled towards their mean."""

    fixed_clients = "a reply is weighted by its share of all clients' samples"
    name = "mr_mtl"
    title = "MR-MTL"
    paper = "mean-regularised MTL (Evgeniou and Pontil, KDD 2004), as MTL in PerAda"
    family = "two models"
    use = "a personal model near the mean; private samples"
    grid = {"lam": (0.01, 0.1, 1.0)}
    special_cases = [to_local("with λ = 0", lam=0)]
    has_global = False
    lam: float = Field(0.1, ge=0, description="λ: pull towards the mean of all personal models")
    mean: Literal["all", "sampled"] = Field(
        "all",
        description="v̄: exact mean of all clients' latest models, or a step m/N to that of the sampled ones (L2SGD)",
    )

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        v = client.fit(state, prox=(self.lam, received))
        return v, v - (state if self.mean == "all" else received)

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        change, share = replies.mean(), replies.share
        moved = {n: t * share if t.is_floating_point() else t for n, t in tree.tensors(change).items()}
        return server + TensorDict(moved)
