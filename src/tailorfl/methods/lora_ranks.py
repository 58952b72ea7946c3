"""LoRA with a rank per client: FlexLoRA averages and truncates products, HetLoRA averages factors and prunes them.

FlexLoRA: Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources",
NeurIPS 2024.
HetLoRA: Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", EMNLP 2024.

    FlexLoRA: clients have LoRA of ranks r_i; the server averages what they add to the weights and truncates it

    server sends client i the r_i largest singular values of ΔW:   B = U_{:r_i} Σ_{:r_i} / s_i,   A = V_{:r_i}ᵀ
    client i:  (A_i, B_i) = LocalSGD((A, B), E)            with the scale s_i = α / r_i       sends A_i, B_i
    server:    ΔW = Σ_S a_i s_i B_i A_i = U Σ Vᵀ           by layer, from the factors: ΔW is never computed

    HetLoRA: clients have LoRA of ranks r_i, which they may prune; factors are padded with zeros and averaged

    server sends client i the first r_i rows of A and columns of B
    client i:  (A_i, B_i) = LocalSGD on F_i + λ R,   R = Σ_layers ‖B[:, ⌊γ r_i⌋:]‖ ‖A[⌊γ r_i⌋:, :]‖   (Frobenius)
               if training has reduced R:  r_i = max(r_min, ⌊γ r_i⌋)                      sends the first r_i ranks
    server:    A = Σ_S S_i A_i / Σ_S S_i,  B likewise,   S_i = ‖B_i A_i‖ over all layers

The model has the largest rank r. A client of rank r_i has the first r_i rows of A and columns of B; a vector in the
model (`models/lora.py`) sets the others to 0, so tensors of all clients have one shape and train together in every
engine, and privacy noise in a row that is cut off changes nothing. The first r_i rows of a message are `present`, and
only these are counted. All else that a model trains is averaged. A client deploys its own ranks, the global model has
all ranks, and a newcomer the rank of its place in `ranks`. A model without LoRA has nothing to cut: both methods are
then FedAvg.

FlexLoRA: Before the first round ΔW = 0, and A has its initial values. The server keeps the r largest singular values.
The official code averages factors if all ranks are equal; here products are averaged then, too.

HetLoRA: All ranks share one scale s, since cutting would otherwise rescale. Zeros dilute rows that few clients have:
that is part of the method. If all S_i are 0, factors have the run's weights, as all else that a model trains always
has. The authors have published no code; r_min is never more than a client's rank.

| symbol | here |
|---|---|
| B, A of rank r, at the model's scale s = α/r | server state `w` |
| r_i | server state `ranks`, at first from `ranks` |
| s_i / s of FlexLoRA | `kept` of the model of client i |
| λ, γ, r_min of HetLoRA | `lam`, `prune`, `least` (paper: 5e-4 to 5e-2, 0.99, 5) |
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import PerClient, Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import exposure, to_fedavg
from tailorfl.errors import ConfigError
from tailorfl.methods.fedit import lora_pairs, svd_of_products
from tailorfl.models.functional import Model
from tailorfl.models.lora import KEPT, add_ranks, is_kept
from tailorfl.models.split import Split
from tailorfl.training import tree
from tailorfl.training.objective import Seen, Term


class RankedLoRA(Method):
    """One set of LoRA on the server, of which every client has the first ranks."""

    fixed_clients = "ranks are assigned by the numbers of the clients"
    special_cases = [to_fedavg("on a model without LoRA", all_shared=True)]
    exposures = [
        exposure(
            "the rank of a client's adapter, which the length of its reply shows (ranks)",
            "client",
            ranks=lambda ranks: len(set(ranks)) > 1,
        )
    ]
    of_adapters = True
    ranks: tuple[int, ...] = Field(
        (), description="ranks of the clients in turn, at most the model's (lora); empty: all the model's"
    )

    def ratio(self, rank: Tensor, largest: int) -> Tensor:
        """Return the scale s_i of a client of that rank in units of the model's."""
        return torch.ones_like(rank)

    def wrap(self, model: Model) -> Model:
        return model.changed(add_ranks) if lora_pairs(model.parameters) else model

    def make_split(self, model: Model) -> Split:
        return model.split(is_kept, allow_empty=True)

    def server_state(self, ctx: Context) -> TensorDict:
        state: dict[str, Any] = {"w": ctx.split.select_shared(ctx.init)}
        pairs = lora_pairs(ctx.split.trainable)
        if pairs:
            largest = min(len(ctx.init.get(a)) for a, _ in pairs)
            if self.ranks and not 1 <= min(self.ranks) <= max(self.ranks) <= largest:
                raise ConfigError(
                    f"ranks = {list(self.ranks)}: ranks must be from 1 to that of the model's LoRA, {largest}; set "
                    "model.lora to the largest rank"
                )
            state["kept"] = ctx.split.select_personal(ctx.init)
            state["ranks"] = torch.tensor(
                [float(self.first_rank(i, largest)) for i in range(ctx.num_clients)]
            )
        return TensorDict(state, batch_size=[])

    def first_rank(self, client: int, largest: int) -> int:
        """Return the rank that a client begins with."""
        return self.ranks[client % len(self.ranks)] if self.ranks else largest

    def shared(self, server: TensorDict) -> TensorDict:
        w: TensorDict = server["w"]
        return tree.merge(w, server["kept"]) if "kept" in list(server.keys()) else w

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict | PerClient:
        w = server["w"]
        if not lora_pairs(map(str, w.keys())):
            return w  # type: ignore[no-any-return]
        ranks = self.ranks_of(server, clients)
        distinct = sorted(set(ranks))
        rows: Any = [self.message(w, torch.tensor(float(rank))) for rank in distinct]
        table: Any = torch.stack(rows)
        return PerClient(table, torch.tensor([distinct.index(rank) for rank in ranks]))

    def ranks_of(self, server: TensorDict, clients: tuple[int, ...]) -> list[int]:
        """Return the rank that each of these clients has."""
        ranks, largest = server["ranks"].tolist(), self.largest(server)
        return [int(ranks[i]) if i < len(ranks) else self.first_rank(i, largest) for i in clients]

    def largest(self, server: TensorDict) -> int:
        """Return the rank r of the model."""
        w = server["w"]
        return len(w[lora_pairs(map(str, w.keys()))[0][0]])

    def message(self, w: TensorDict, rank: Tensor) -> TensorDict:
        """Return the first ranks of every pair of factors, with all else that is shared."""
        pairs = lora_pairs(map(str, w.keys()))
        layers = {}
        for a, b in pairs:
            present = torch.arange(len(w[a]), device=w[a].device) < rank
            up = w[b].T / self.ratio(rank, len(w[a]))
            layers[a] = cut(w[a], up, present)
        other_tensors = w.exclude(*(n for pair in pairs for n in pair))
        return TensorDict({"lora": TensorDict(layers), "rest": other_tensors}, batch_size=[])

    def whole(self, received: TensorDict) -> TensorDict:
        """Return the model of a client, from the message it received."""
        model: dict[str, Any] = dict(rest_of(received).items())
        for a, layer in received["lora"].items():
            present = layer["present"]
            mask = present.to(layer["A"].dtype)
            b = str(a).replace("lora_A", "lora_B")
            model |= {str(a): layer["A"], b: layer["B"].T}
            model[b.removesuffix("weight") + KEPT] = mask * self.ratio(mask.sum(), len(mask))
        return TensorDict(model, batch_size=[])

    def reply(self, trained: TensorDict, received: TensorDict, rank: Tensor) -> TensorDict:
        """Return the reply: the first ranks of the trained factors, and all else that is shared."""
        layers = {}
        for a, layer in received["lora"].items():
            present = layer["present"] & (torch.arange(len(layer["present"]), device=rank.device) < rank)
            layers[str(a)] = cut(trained[str(a)], trained[str(a).replace("lora_A", "lora_B")].T, present)
        other_tensors = trained.select(*rest_of(received).keys())
        return TensorDict({"lora": TensorDict(layers), "rest": other_tensors}, batch_size=[])

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return self.whole(received) if client.split.personal else received


def cut(a: Tensor, b: Tensor, present: Tensor) -> TensorDict:
    """Return rows of A [r, in] and of Bᵀ [r, out], 0 where they are not present."""
    mask = present.to(a.dtype)[:, None]
    return TensorDict({"A": a * mask, "B": b * mask, "present": present}, batch_size=[])


def rest_of(message: TensorDict) -> TensorDict:
    """Return the part of a message without the factors of LoRA; an empty part is not sent."""
    other_tensors: TensorDict = message["rest"] if "rest" in list(message.keys()) else tree.empty()
    return other_tensors


def own_rank(received: TensorDict) -> Tensor:
    """Return a client's rank, 0-d: that of its layers."""
    layer = next(iter(received["lora"].values()))
    rank: Tensor = layer["present"].to(layer["A"].dtype).sum()
    return rank


@register
class FlexLoRA(RankedLoRA):
    """LoRA with a rank per client, whose products are averaged and truncated by their singular values."""

    name = "flexlora"
    title = "FlexLoRA"
    paper = "Bai et al., NeurIPS 2024"
    family = "one model"
    use = "LoRA with a rank per client, averaged as products"

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


@register
class HetLoRA(RankedLoRA):
    """LoRA with a rank per client, averaged factor by factor, whose last ranks are pruned if they shrink."""

    name = "hetlora"
    title = "HetLoRA"
    paper = "Cho et al., EMNLP 2024"
    family = "one model"
    use = "LoRA with a rank per client, pruned during training"
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
    """Return R: Σ over layers of ‖B‖ ‖A‖ of the ranks where `last` [r] is 1, 0-d; its gradient at 0 is 0."""
    norm = torch.linalg.vector_norm
    return torch.stack([norm(state[b] * last) * norm(state[a] * last[:, None]) for a, b in pairs]).sum()


def product_square(layer: TensorDict) -> Tensor:
    """Return ‖B_i A_i‖² of every client, [clients] float64, from A [clients, r, in] and Bᵀ [clients, r, out]."""
    a, b = layer["A"].double(), layer["B"].double()
    square: Tensor = ((a @ a.transpose(1, 2)) * (b @ b.transpose(1, 2))).sum((1, 2))
    return square
