"""FedFomo (Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021).

    server sends client i  M models uploaded in the last round, never its own: with probability 1 − ε_t the M of largest
                           affinity A_in (equal ones at random), else M at random;  ε_t = max(0, ε_0 − 0.05 t)
    client i:  candidates θ_n: its own θ_i and the received ones
               Δ_n = (F_i^val(θ_i^prev) − F_i^val(θ_n)) / (‖θ_n − θ_i^prev‖ + 10⁻⁵);   r_n = max(Δ_n, 0) / Σ max(Δ, 0)
               θ_i = θ_i^prev + Σ_n r_n (θ_n − θ_i^prev) = Σ_n r_n θ_n;   if no Δ_n is positive θ_i stays as it is
               θ_i^prev = θ_i;   θ_i = LocalSGD(θ_i, E);   sends θ_i and the Δ_n
    server:    A_in = A_in + Δ_n

The baseline θ_i^prev is the model BEFORE the last local training, so a client's own model competes like any other.
The released code returns to the baseline if nothing improves, which discards the local training
(`fallback=baseline`), and takes the 1-norm (`norm=l1`); the default is the paper's Euclidean norm, over the parameters.
Running statistics are mixed with the same weights r_n.

In the first round there are no uploads yet, and clients train alone. All clients get the same number of models: M, or
all uploads but one if there are fewer. A client without validation samples cannot compare models: it trains alone.

The server does not know the mixture from which a client trains. Client-level privacy therefore bounds θ_i minus the
mean of the last uploads, in the first round minus the initial model.

| symbol | here |
|---|---|
| θ_i, θ_i^prev | client state `theta`, `previous` |
| last uploads (first the initial model) and their owners, A | server state `pool`, `owner`, `affinity` [N, N] |
| M, ε_0 | `downloads`, `explore`; 0.05 is `explore_decay` |
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import PerClient, Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import exposure, to_local
from tailorfl.training import tree
from tailorfl.training.keys import generator

_TINY = 1e-5


@register
class FedFomo(Method):
    """Every client mixes the models of others that do well on its validation data."""

    fixed_clients = "its server keeps the model of every client and its weight for each of the others"
    name = "fedfomo"
    title = "FedFomo"
    paper = "Zhang et al., ICLR 2021"
    family = "mixture"
    use = "choosing useful peers by the client's validation data"
    grid = {"downloads": (3, 5, 10)}
    special_cases = [
        to_local("with M = 0", downloads=0),
        to_local("with one client a round, so nobody else's model to download,", cohort=1),
        to_local("with a single round, before which nobody has uploaded,", rounds=1),
        to_local("without validation samples, by which clients compare models,", validation=False),
    ]
    exposures = [exposure("the validation losses of received models, by which a client mixes them", "sample")]
    has_global = False
    personal_receives = False
    downloads: int = Field(5, ge=0, description="M: models that a client receives in a round")
    explore: float = Field(
        0.3, ge=0, le=1, description="ε_0: probability of random models in the first round"
    )
    explore_decay: float = Field(0.05, ge=0, description="decrease of that probability per round")
    fallback: Literal["own", "baseline"] = Field(
        "own",
        description="the model of a client that no candidate improves: its own, or the one before training",
    )

    norm: Literal["l2", "l1"] = Field("l2", description="norm in Δ_n: the paper's, or the released code's")

    def server_state(self, ctx: Context) -> TensorDict:
        start = {n: t[None] for n, t in tree.tensors(ctx.init).items()}
        state = {
            "pool": TensorDict(start),  # nobody's model, from which the first updates are counted
            "owner": torch.zeros(0, dtype=torch.int64),
            "affinity": torch.zeros(ctx.num_clients, ctx.num_clients),
            "round": torch.tensor(0),
            "seed": torch.tensor(ctx.seed),
        }
        return TensorDict(state)

    def client_state(self, ctx: Context) -> TensorDict:
        return TensorDict({"theta": ctx.init, "previous": ctx.init})

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict | PerClient:
        uploads = len(server["owner"])
        if min(self.downloads, uploads - 1) < 1:
            return tree.empty()
        pool = TensorDict(tree.tensors(server["pool"]), batch_size=[uploads])
        table = TensorDict({"model": pool, "owner": server["owner"]}, batch_size=[uploads])
        return PerClient(table, torch.tensor(np.stack([self.choose(server, i) for i in clients])))

    def choose(self, server: TensorDict, client: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the rows of the pool that a client gets, [M]; a function of seed, round and client."""
        owner, affinity, round = server["owner"].numpy(), server["affinity"], int(server["round"])
        rng = generator(int(server["seed"]), "models to download", round, client)
        rows = rng.permutation(np.flatnonzero(owner != client))
        random = rng.random() < self.explore - self.explore_decay * round
        if not random and client < len(affinity):  # a client that joined later has no affinities yet
            liked = affinity[client].numpy()[owner[rows]]
            rows = rows[np.argsort(-liked, kind="stable")]
        return rows[: min(self.downloads, len(owner) - 1)].astype(np.int64)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        start, learned = state["theta"], {}
        if "owner" in received.keys():  # noqa: SIM118
            start, delta = self.mixed(client, state, received)
            learned = {_place(len(delta)): TensorDict({"delta": delta, "owner": received["owner"]})}
        theta = client.fit(start)
        reply = TensorDict({"theta": theta, **learned})
        return TensorDict({"theta": theta, "previous": start}), reply

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        count = len(next(iter(tree.tensors(server["pool"]).values())))
        origins = {"theta": tree.weighted_mean(server["pool"], torch.full((count,), 1 / count))}
        if "owner" in received.keys():  # noqa: SIM118
            origins[_place(received["owner"].shape[-1])] = received.select("owner")
        return TensorDict(origins)

    def mixed(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, Tensor]:
        """Return (Σ_n r_n θ_n, Δ_n of the received models [M])."""
        trained, previous, models = state["theta"], state["previous"], received["model"]
        names = [n for n in tree.tensors(trained) if n not in client.split.frozen]
        downloaded = [
            TensorDict({n: t[k] for n, t in tree.tensors(models).items()})
            for k in range(len(received["owner"]))
        ]
        baseline = client.loss(previous, "val")
        delta = torch.stack(
            [self.gain(client, previous, baseline, model) for model in (trained, *downloaded)]
        )
        if self.fallback == "baseline":
            # Without validation samples the loss is 0, too: nothing can be better, and nothing is discarded.
            revert = (delta <= 0).all() & (baseline != 0)
            trained = tree.choose(revert, previous, trained)
        stack = {n: torch.stack([model.get(n) for model in (trained, *downloaded)]) for n in names}
        mean = tree.weighted_mean(TensorDict(stack), mixing(delta))
        return tree.merge(trained, mean), delta[1:]

    def gain(self, client: Client, previous: TensorDict, baseline: Tensor, model: TensorDict) -> Tensor:
        """Return Δ of a model, a 0-d tensor; 0 for a model whose loss is not finite."""
        change = client.parameters(model) - client.parameters(previous)
        moved = tree.norm(change) if self.norm == "l2" else tree.dot(change, change.sign())
        delta = (baseline - client.loss(model, "val")) / (moved + _TINY)
        return torch.where(delta.isfinite(), delta, torch.zeros_like(delta))

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        affinity, stack = server["affinity"].clone(), replies.stack
        owner = torch.tensor(replies.clients)
        for learned in (stack[name] for name in stack.keys() if name != "theta"):  # noqa: SIM118
            affinity[owner[:, None], learned["owner"]] += learned["delta"]
        state = {
            "pool": TensorDict(tree.tensors(stack["theta"])),
            "owner": owner,
            "affinity": affinity,
            "round": torch.tensor(replies.round + 1),
            "seed": server["seed"],
        }
        return TensorDict(state)

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        theta: TensorDict = state["theta"]
        return theta

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        """Return a start from the mean of the models that a late client receives, the best guess without its data."""
        if "owner" not in received.keys():  # noqa: SIM118
            return state
        count = len(received["owner"])
        mean = tree.weighted_mean(received["model"], torch.full((count,), 1 / count))
        return TensorDict({"theta": mean, "previous": mean})


def _place(models: int) -> str:
    """Return the entry of a reply with Δ of this many models: fewer if a client had no update in the last round."""
    return f"of {models}"


def mixing(delta: Tensor) -> Tensor:
    """Return r_n for the Δ of (own, received...), [1 + M]: never negative, with sum 1.

    All weight is on the own model if no Δ is positive.
    """
    better = delta.clamp(min=0.0)
    top = better.max()
    better = better / torch.where(top > 0, top, torch.ones_like(top))  # now the sum cannot overflow
    weights = better / better.sum().clamp(min=1.0)
    keep = (top <= 0).to(delta.dtype)
    return torch.cat([(weights[0] + keep)[None], weights[1:]])
