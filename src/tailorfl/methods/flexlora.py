"""FlexLoRA (Bai et al., NeurIPS 2024).

"Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources."

    clients have LoRA of ranks r_i of their own; the server averages what they add to the weights and cuts it anew

    server sends client i the r_i largest singular values of ΔW:   B = U_{:r_i} Σ_{:r_i} / s_i,   A = V_{:r_i}ᵀ
    client i:  (A_i, B_i) = LocalSGD((A, B), E)            with the scale s_i = α / r_i       sends A_i, B_i
    server:    ΔW = Σ_S a_i s_i B_i A_i = U Σ Vᵀ           by layer, from the factors: ΔW is never made

Before the first round ΔW = 0, and A is as it was drawn. The server keeps the r largest singular values, r the rank of
the model's LoRA, which no client exceeds; the global model has them all. What else a model trains is averaged. A
client deploys its own cut. The official code averages factors where all ranks are equal; here that is no exception. A
newcomer has the rank of its place in `ranks`. A model without LoRA has nothing to cut: there it is FedAvg.

| symbol | here |
|---|---|
| B, A of rank r, at the model's scale s = α/r | server state `w` |
| r_i | server state `ranks`, from `ranks` |
| s_i / s | `kept` of the model of client i |
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.methods.fedit import lora_pairs, svd_of_products
from tailorfl.methods.ranks import RankedLoRA, own_rank, rest_of
from tailorfl.training import tree


@register
class FlexLoRA(RankedLoRA):
    """LoRA of a rank by client, of which the products are averaged and cut by their singular values."""

    name = "flexlora"
    title = "FlexLoRA"
    paper = "Bai et al., NeurIPS 2024"
    family = "one model"
    use = "LoRA of a rank by client, averaged as products"
    grid = {}

    def ratio(self, rank: Tensor, largest: int) -> Tensor:
        return largest / rank.clamp(min=1)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        if not client.split.personal:
            return state, client.fit(received)
        trained = client.fit(self.whole(received))
        return state, self.reply(trained, received, own_rank(received))

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        if "ranks" not in list(server.keys()):
            return TensorDict({"w": replies.mean()}, batch_size=[])
        weights, sent = replies.weights(), replies.stack
        new = dict(tree.weighted_mean(rest_of(sent), weights).items())
        for a, b in lora_pairs(replies.context.split.trainable):
            layer = sent["lora"].get(a)
            rank = layer["present"].sum(1)
            scaled = layer["B"] * self.ratio(rank, layer["A"].shape[1])[:, None, None]
            us, v = svd_of_products(layer["A"], scaled.transpose(1, 2), weights)
            new[a], new[b] = torch.zeros_like(layer["A"][0]), torch.zeros_like(layer["B"][0].T)
            new[a][: len(v)], new[b][:, : len(v)] = v.to(new[a].dtype), us.to(new[b].dtype)
        w = TensorDict({n: new[n] for n in map(str, server["w"].keys())}, batch_size=[])
        return TensorDict({**dict(server.items()), "w": w}, batch_size=[])
