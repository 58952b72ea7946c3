"""FLoRA (Wang et al., NeurIPS 2024).

"FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations."

    every round trains new LoRA, with a rank r_i per client, and merges it into W: no error from averaging factors

    client i:  new A_i ~ U(−1/√in, 1/√in), B_i = 0;    (A_i, B_i) = LocalSGD on W_t + s B_i A_i       sends A_i, B_i
    server:    A = [p_1 A_1; …; p_m A_m] (rows),  B = [B_1 … B_m] (columns)        p_i = a_i, the run's weights
    all:       W_{t+1} = W_t + s B A = W_t + s Σ_S p_i B_i A_i

    server sends the stack (A, B) of the last round to clients with the W before it, W to those with an older one
    (late, or absent for a round), and neither to those with W_t: at first all have W_0, the model's own

So W_0 is never sent, the stack costs Σ_S r_i (in + out) per receiver, and every client that trained keeps a W. A reply
has the version of its W. B of the stack already includes s. All ranks share one s, as in the official code
(α_i = 2 r_i), which needs all clients in every round; here some are enough. All else that a model trains is averaged. A
deployed model is W_t, with factors that have B = 0. If client-level privacy hides that an update was not finite, its
client continues with the W it has. A model without LoRA has nothing to merge: the method is then FedAvg.

| symbol | here |
|---|---|
| W | server state `w` (with all else that is shared), client state `W` |
| t | `version` of server and client; that of each client's W: server state `has` |
| s Bᵀ [Σ r, out] and A [Σ r, in] of the stack | server state `stack`: `left`, `right` (swapped if W is transposed) |
| r_i | server state `ranks`, from `ranks` (paper: 64, 32, 16, 16, 8, 8, 4, 4, 4, 4) |
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import PerClient, Replies
from tailorfl.core.method import register
from tailorfl.methods.fedit import lora_pairs
from tailorfl.methods.lora_ranks import RankedLoRA, rest_of
from tailorfl.models.functional import Model
from tailorfl.models.lora import KEPT, Merge, check_merges, is_kept, merges
from tailorfl.models.split import Split
from tailorfl.training import tree


@register
class FLoRA(RankedLoRA):
    """LoRA with a rank per client that starts afresh in every round, stacked and merged into the weights."""

    name = "flora"
    title = "FLoRA"
    paper = "Wang et al., NeurIPS 2024"
    family = "one model"
    use = "LoRA with a rank per client, merged exactly, in few rounds"
    has_personal = False
    sends_updates = False

    def wrap(self, model: Model) -> Model:
        merged = merged_in(model)
        check_merges(model.module, merged)
        bases = {merge.base for merge in merged}
        return super().wrap(model.thawing(lambda name, *_: name in bases))

    def make_split(self, model: Model) -> Split:
        bases = {merge.base for merge in merged_in(model)}
        return model.split(is_kept, held=lambda name, *_: name in bases, allow_empty=True)

    def server_state(self, ctx: Context) -> TensorDict:
        state = super().server_state(ctx)
        if "ranks" not in list(state.keys()):
            return state
        w, stack = state["w"], {}
        for merge in merged_in(ctx.model):
            zeros, right = merge.sides(w[merge.a][:0], w[merge.b].T[:0])
            stack[merge.base] = rows_of(zeros, right, torch.ones(0, dtype=torch.bool))
        zero = torch.zeros((), dtype=torch.int64)
        more = {"stack": TensorDict(stack), "version": zero, "has": zero.expand(ctx.num_clients).clone()}
        return TensorDict({**dict(state.items()), **more}, batch_size=[])

    def client_state(self, ctx: Context) -> TensorDict:
        if not ctx.split.personal:
            return tree.empty()
        state = ctx.init.select(*ctx.split.held)
        return TensorDict({"W": state, "version": torch.zeros((), dtype=torch.int64)}, batch_size=[])

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict | PerClient:
        if "ranks" not in list(server.keys()):
            sent: TensorDict = server["w"]
            return sent
        version, has = int(server["version"]), server["has"].tolist()
        # A client that joins late has W_0.
        late = [min(version - (int(has[i]) if i < len(has) else 0), 2) for i in clients]
        kinds = list(zip(self.ranks_of(server, clients), late, strict=True))
        distinct = sorted(set(kinds))
        rows: Any = [self.news(server, rank, lag, set(late)) for rank, lag in distinct]
        table: Any = torch.stack(rows)
        return PerClient(table, torch.tensor([distinct.index(kind) for kind in kinds], dtype=torch.int64))

    def news(self, server: TensorDict, rank: int, lag: int, anyone: set[int]) -> TensorDict:
        """Return the message to a client of this rank whose W is `lag` rounds behind; 2 stands for 2 or more.

        `anyone` are the lags of all receivers: their messages have the same entries.
        """
        w = server["w"]
        pairs = lora_pairs(map(str, w.keys()))
        present = torch.arange(self.largest(server)) < rank
        names = list(map(str, server["stack"].keys()))
        other_tensors = w.exclude(*names, *(n for pair in pairs for n in pair))
        message: dict[str, Any] = {
            "lora": TensorDict({a: TensorDict({"present": present}) for a, _ in pairs}),
            "rest": other_tensors,
            "version": server["version"],
        }
        if 1 in anyone:
            stack = {
                n: rows if lag == 1 else rows.apply(torch.zeros_like) for n, rows in server["stack"].items()
            }
            message["stack"] = TensorDict(stack)
        if 2 in anyone:
            is_there = {n: torch.full((len(w[n]),), lag == 2) for n in names}
            message["base"] = TensorDict(
                {n: TensorDict({"W": w[n] * is_there[n][:, None], "present": is_there[n]}) for n in names}
            )
        return TensorDict(message, batch_size=[])

    def start(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        """Return the model with which a client begins a round: the current W, and newly drawn factors with B = 0."""
        model: dict[str, Any] = {**dict(rest_of(received).items()), **present_weights(state, received)}
        factors = {str(a): layer["present"] for a, layer in received["lora"].items()}
        pairs = lora_pairs(client.split.trainable)
        drawn = client.drawn(client.shapes([n for pair in pairs for n in pair]), "factors of LoRA")
        for a, b in pairs:
            mask = factors[a].to(drawn[a].dtype)
            model[a] = (2 * drawn[a] - 1) / drawn[a].shape[1] ** 0.5 * mask[:, None]
            model[b] = torch.zeros_like(drawn[b])
            model[b.removesuffix("weight") + KEPT] = mask
        return TensorDict(model, batch_size=[])

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        if not client.split.personal:
            return state, client.fit(received)
        start = self.start(client, state, received)
        trained, version = client.fit(start), received["version"]
        rank = next(iter(received["lora"].values()))["present"].sum()
        reply = self.reply(trained, received, rank)
        new = TensorDict({"W": start.select(*state["W"].keys()), "version": version}, batch_size=[])
        return new, TensorDict({**dict(reply.items()), "version": version}, batch_size=[])

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        if "ranks" not in list(server.keys()):
            return TensorDict({"w": replies.mean()}, batch_size=[])
        weights, sent = replies.weights(), replies.stack
        w: dict[str, Any] = {**dict(server["w"].items())}
        w |= dict(tree.weighted_mean(rest_of(sent), weights).items())
        stack = {}
        for merge in merged_in(replies.context.model):
            layer = sent["lora"].get(merge.a)
            a = layer["A"] * weights.to(layer["A"].dtype)[:, None, None]
            left, right = merge.sides(a.flatten(0, 1), layer["B"].flatten(0, 1))
            stack[merge.base] = rows_of(left, right, layer["present"].flatten())
            w[merge.base] = w[merge.base] + gained(stack[merge.base]).to(w[merge.base].dtype)
        has = server["has"].clone()
        has[list(replies.clients)] = sent["version"]
        new = {"w": TensorDict(w), "stack": TensorDict(stack), "version": server["version"] + 1, "has": has}
        return TensorDict({**dict(server.items()), **new}, batch_size=[])

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return self.start(client, state, received) if client.split.personal else received


def merged_in(model: Model) -> tuple[Merge, ...]:
    """Return the places where a model with LoRA merges factors that may change; () if it has none."""
    live = set(model.parameters)
    return tuple(merge for merge in merges(model.module) if {merge.a, merge.b} <= live)


def rows_of(left: Tensor, right: Tensor, present: Tensor) -> TensorDict:
    """Return rows of the stack, [rows, ...]."""
    return TensorDict({"left": left, "right": right, "present": present}, batch_size=[])


def gained(stack: TensorDict) -> Tensor:
    """Return the change of W by a stack, s B A in the orientation of W."""
    product: Tensor = stack["left"].T @ stack["right"]
    return product


def present_weights(state: TensorDict, received: TensorDict) -> dict[str, Tensor]:
    """Return the current W by name, from a client's W and the message it received."""
    found: dict[str, Tensor] = dict(state["W"].items())
    groups = list(received.keys())
    if "stack" in groups:
        next_one = received["version"] == state["version"] + 1
        for n, rows in received["stack"].items():
            step = gained(rows).to(found[str(n)].dtype)
            found[str(n)] = found[str(n)] + torch.where(next_one, step, torch.zeros_like(step))
    if "base" in groups:
        for n, given in received["base"].items():
            found[str(n)] = torch.where(given["present"][:, None], given["W"], found[str(n)])
    return found
