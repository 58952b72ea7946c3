"""HetLoRA (Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", EMNLP 2024).

    clients have LoRA of ranks r_i of their own, which they may prune; factors are averaged with zeros beneath

    server sends client i the first r_i rows of A and columns of B
    client i:  (A_i, B_i) = LocalSGD on F_i + λ R,   R = Σ_layers ‖B[:, ⌊γ r_i⌋:]‖ ‖A[⌊γ r_i⌋:, :]‖   (Frobenius)
               if R has fallen in the training:  r_i = max(r_min, ⌊γ r_i⌋)                sends the first r_i ranks
    server:    A = Σ_S S_i A_i / Σ_S S_i,  B likewise,   S_i = ‖B_i A_i‖ over all layers

One scale s serves all ranks, else cutting would rescale. Zeros dilute rows that few clients have: that is the method.
Where all S_i are 0 clients count as the run says, and so does what else a model trains. There is no code of the
authors; r_min is never more than a client has. A client deploys its own cut, the global model has all ranks, a newcomer
the rank of its place in `ranks`. A model without LoRA has nothing to cut: there it is FedAvg.

| symbol | here |
|---|---|
| A, B | server state `w` |
| r_i | server state `ranks`, at first from `ranks` |
| λ, γ, r_min | `lam`, `prune`, `least` (paper: 5e-4 to 5e-2, 0.99, 5) |
"""

from __future__ import annotations

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import exposure
from tailorfl.methods.fedit import lora_pairs
from tailorfl.methods.ranks import RankedLoRA, own_rank, rest_of
from tailorfl.training import tree
from tailorfl.training.objective import Seen, Term


@register
class HetLoRA(RankedLoRA):
    """LoRA of a rank by client, averaged factor by factor, whose last ranks are pruned where they fade."""

    name = "hetlora"
    title = "HetLoRA"
    paper = "Cho et al., EMNLP 2024"
    family = "one model"
    use = "LoRA of a rank by client that prunes itself"
    grid = {"lam": (0.0, 0.0005, 0.005, 0.05)}
    exposures = [
        exposure(
            "the rank of a client's adapter, which the length of its reply shows (prune)",
            "client",
            prune__not=1,
        ),
        *RankedLoRA.exposures,
    ]
    lam: float = Field(0.0005, ge=0, description="λ: penalty of the last ranks")
    prune: float = Field(
        0.99, gt=0, le=1, description="γ: share of its ranks that a client keeps when it prunes"
    )
    least: int = Field(1, ge=1, description="r_min: ranks that are never pruned (paper: 5)")

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        if not client.split.personal:
            return state, client.fit(received)
        start, rank = self.whole(received), own_rank(received)
        shorter = (self.prune * rank).floor()
        pairs = lora_pairs(client.split.trainable)
        largest = len(received["lora"].get(pairs[0][0])["A"])
        positions = torch.arange(largest, device=rank.device)
        last = ((positions >= shorter) & (positions < rank)).to(rank.dtype)

        def fading(batch: Seen, last: Tensor) -> Tensor:
            return self.lam * size_of(dict(batch.state), pairs, last)

        trained = client.fit(start, term=Term(fading, given=(last,)) if self.lam > 0 else ())
        fallen = size_of(trained, pairs, last) < size_of(start, pairs, last)
        pruned = torch.minimum(rank, shorter.clamp(min=self.least))
        return state, self.reply(trained, received, torch.where(fallen, pruned, rank))

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        if "ranks" not in list(server.keys()):
            return TensorDict({"w": replies.mean()}, batch_size=[])
        weights, layers = replies.weights(), replies.stack["lora"]
        pairs = lora_pairs(replies.context.split.trainable)
        size = torch.stack([product_square(layers.get(a)) for a, _ in pairs]).sum(0).clamp(min=0).sqrt()
        share = size / size.sum() if float(size.sum()) > 0 else weights
        new = dict(tree.weighted_mean(rest_of(replies.stack), weights).items())
        for a, b in pairs:
            mean = tree.weighted_mean(layers.get(a).select("A", "B"), share)
            new[a], new[b] = mean["A"], mean["B"].T
        ranks = server["ranks"].clone()
        present = layers.get(pairs[0][0])["present"]
        ranks[list(replies.clients)] = present.sum(1).to(ranks)
        w = TensorDict({n: new[n] for n in map(str, server["w"].keys())}, batch_size=[])
        return TensorDict({**dict(server.items()), "w": w, "ranks": ranks}, batch_size=[])


def size_of(
    state: TensorDict | dict[str, Tensor], pairs: tuple[tuple[str, str], ...], last: Tensor
) -> Tensor:
    """Return R: Σ over layers of ‖B‖ ‖A‖ of the ranks where `last` [r] is 1, 0-d; its slope at 0 is 0."""
    norm = torch.linalg.vector_norm
    return torch.stack([norm(state[b] * last) * norm(state[a] * last[:, None]) for a, b in pairs]).sum()


def product_square(layer: TensorDict) -> Tensor:
    """Return ‖B_i A_i‖² of every client, [clients] float64, from A [clients, r, in] and Bᵀ [clients, r, out]."""
    a, b = layer["A"].double(), layer["B"].double()
    square: Tensor = ((a @ a.transpose(1, 2)) * (b @ b.transpose(1, 2))).sum((1, 2))
    return square
