"""What methods share whose clients have LoRA of different ranks: who has which, what is cut, what travels.

The model has the largest rank r. A client of rank r_i has the first r_i rows of A and columns of B; the others are 0 to
it, by a vector in the model (`models/ranked_lora.py`), so tensors of all clients have one shape, train side by side in
every engine, and privacy noise in a row that is cut off changes nothing. Of a message the first r_i rows are `present`,
and these alone are counted.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import PerClient
from tailorfl.core.method import Method
from tailorfl.core.reduction import exposure, to_fedavg
from tailorfl.errors import ConfigError
from tailorfl.methods.fedit import lora_pairs
from tailorfl.models.functional import Model
from tailorfl.models.ranked_lora import KEPT, add_ranks, is_kept
from tailorfl.models.split import Split
from tailorfl.training import tree


class RankedLoRA(Method):
    """One set of LoRA on the server, of which every client has the first ranks."""

    fixed_clients = "ranks are given to clients by their numbers among all"
    special_cases = [to_fedavg("on a model without LoRA", all_shared=True)]
    exposures = [
        exposure(
            "the rank of a client's adapter, which the length of its reply shows (ranks)",
            "client",
            ranks=lambda ranks: len(set(ranks)) > 1,
        ),
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
                    f"ranks = {list(self.ranks)}: ranks of clients are from 1 to that of the model's LoRA, {largest}; "
                    "set model.lora to the largest of them"
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
        """Return the model of a client, from what it received."""
        model: dict[str, Any] = dict(rest_of(received).items())
        for a, layer in received["lora"].items():
            present = layer["present"]
            mask = present.to(layer["A"].dtype)
            b = str(a).replace("lora_A", "lora_B")
            model |= {str(a): layer["A"], b: layer["B"].T}
            model[b.removesuffix("weight") + KEPT] = mask * self.ratio(mask.sum(), len(mask))
        return TensorDict(model, batch_size=[])

    def reply(self, trained: TensorDict, received: TensorDict, rank: Tensor) -> TensorDict:
        """Return what goes up: the first ranks of the trained factors, and all else that is shared."""
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
    """Return what a message has beside the factors of LoRA; an empty part does not travel."""
    other_tensors: TensorDict = message["rest"] if "rest" in list(message.keys()) else tree.empty()
    return other_tensors


def own_rank(received: TensorDict) -> Tensor:
    """Return a client's rank, 0-d: that of its layers."""
    layer = next(iter(received["lora"].values()))
    rank: Tensor = layer["present"].to(layer["A"].dtype).sum()
    return rank
