"""IFCA and HypCluster: several global models, of which every client takes the one that fits its training data best.

HypCluster: Mansour et al., "Three Approaches for Personalization with Applications to Federated Learning", 2020.
IFCA: Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020.

    min over w_1..w_c:  Σ_i p_i min_j F_i(w_j)

    server sends w_1..w_c
    client i:  j* = argmin_j F_i(w_j) on its TRAINING data (the lowest index of equals)
               models:     θ = LocalSGD(w_j*, E);                sends (j*, θ)
               gradients:  θ = w_j* − η ∇F_i(w_j*), all its data;   sends (j*, θ)
    server:    models:     w_j = Σ over the clients that chose j of a_i θ_i / Σ of their a_i
               gradients:  w_j = w_j + Σ over the clients that chose j of a_i (θ_i − w_j),   Σ_S a_i = 1
               a cluster that no client chose does not change                 deployed: the current w_j*

HypCluster sends models. IFCA is its alternation with the additions of IFCA's code: steps that are divided by all
participants, and a start in which every model is trained on a random equal share of the clients. All models are then
the same at first, and a client receives only the model of its share; after `warm_rounds` of that it chooses. The code
weights the clients of a cluster equally (`weights: uniform`), and by samples in its experiments built on LEAF. Its test
clients of MNIST and CIFAR choose by the loss on their test labels; here every client, including a newcomer, chooses by
its training loss. A common body with heads by cluster, which is only in the paper, is not implemented here.

| symbol | here |
|---|---|
| c | `clusters` |
| w_j | server state, entry j |
| a_i | shares of training samples within the cluster |
| models or gradients | `send` |
| rounds on random shares, the share of each client, the rounds left | `warm_rounds`, server state `member`, `warm` |
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Broadcast, PerClient, Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import exposure, to_fedavg
from tailorfl.training import tree
from tailorfl.training.keys import generator
from tailorfl.training.plan import Length
from tailorfl.training.update import PLAIN, Optimizer


@register
class HypCluster(Method):
    """Several global models; every client uses the one that fits its training data best."""

    name = "hypcluster"
    title = "HypCluster"
    paper = "Mansour et al., 2020"
    family = "mixture"
    use = "a known number of groups"
    grid = {"clusters": (2, 3, 5, 6)}
    special_cases = [to_fedavg("with c = 1", clusters=1)]
    exposures = [
        exposure("the number of the cluster that a client chose, which noise cannot cover", "client"),
        exposure("the training losses of all cluster models, by which a client chooses one", "sample"),
    ]
    has_global = False
    sends_updates = False
    clusters: int = Field(2, ge=1, description="c: number of global models")

    def server_state(self, ctx: Context) -> TensorDict:
        # With equal starts all clients would always choose the first; it is the shared one, so that c = 1 is FedAvg.
        starts = {str(j): ctx.init if j == 0 else ctx.fresh(j) for j in range(self.clusters)}
        return TensorDict(starts)

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> Broadcast:
        return server

    def choose(self, client: Client, received: TensorDict) -> tuple[Tensor, TensorDict]:
        """Return (j*, w_j*), the first 0-d int64."""
        models = [received[str(j)] for j in range(self.clusters)]
        best = torch.stack([client.loss(model) for model in models]).argmin()
        stacked = {n: torch.stack([model.get(n) for model in models]) for n in models[0].keys()}  # noqa: SIM118
        return best, TensorDict({n: t[best] for n, t in stacked.items()})

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        best, w = self.choose(client, received)
        return state, TensorDict({"cluster": best, "theta": client.fit(w)})

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        weights, chosen = replies.weights(), replies.stack["cluster"]
        models = {}
        for j in range(self.clusters):
            members = (chosen == j).nonzero()[:, 0]
            if len(members):
                share = weights[members] / weights[members].sum()
                models[str(j)] = tree.weighted_mean(replies.stack["theta"][members], share)
            else:
                models[str(j)] = server[str(j)]
        return TensorDict(models)

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return self.choose(client, received)[1]


ONE_STEP = {"steps": 1, "epochs": None, "batch_size": 0}


@register
class IFCA(HypCluster):
    """Several global models, each averaged or stepped by the clients that it fits best."""

    fixed_clients = "its warm_rounds deal all clients to clusters before the first"
    fixed_when = {"warm_rounds__not": 0}
    name = "ifca"
    title = "IFCA"
    paper = "Ghosh et al., NeurIPS 2020"
    family = "mixture"
    use = "a known number of groups, started apart"
    grid = {"clusters": (2, 3, 4, 6), "warm_rounds": (0, 5, 20)}
    special_cases = [
        to_fedavg("with c = 1", clusters=1, send="models"),
        to_fedavg("with c = 1", train={**ONE_STEP, **PLAIN}, clusters=1, send="gradients"),
    ]
    clusters: int = Field(4, ge=1, description="c: number of global models")
    send: Literal["models", "gradients"] = Field(
        "models", description="local models, or one full-batch gradient divided by all participants"
    )
    warm_rounds: int = Field(
        0, ge=0, description="first rounds, on random equal shares of the clients from one common start"
    )

    def server_state(self, ctx: Context) -> TensorDict:
        if not self.warm_rounds:
            return super().server_state(ctx)
        share = generator(ctx.seed, "shares of clusters").permutation(ctx.num_clients) % self.clusters
        models = {str(j): ctx.init for j in range(self.clusters)}
        return TensorDict(
            {**models, "member": torch.from_numpy(share), "warm": torch.tensor(self.warm_rounds)}
        )

    def models(self, server: TensorDict) -> TensorDict:
        """Return w_1..w_c of the server's state."""
        return server.select(*map(str, range(self.clusters)))

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> Broadcast:
        if not self.warm_rounds or int(server["warm"]) == 0:
            return self.models(server)
        models = [tree.tensors(server[str(j)]) for j in range(self.clusters)]
        table = {n: torch.stack([model[n] for model in models]) for n in models[0]}
        table["cluster"] = torch.arange(self.clusters)
        return PerClient(TensorDict(table, batch_size=[self.clusters]), server["member"][list(clients)])

    def welcome(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return self.models(server)

    def choose(self, client: Client, received: TensorDict) -> tuple[Tensor, TensorDict]:
        """Return (j*, w_j*), the first 0-d int64; if a single model was received, that one."""
        if "cluster" in received:
            return received["cluster"], received.exclude("cluster")
        return super().choose(client, received)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        if self.send == "models":
            return super().local(client, state, received)
        best, w = self.choose(client, received)
        theta = client.fit(w, length=Length(steps=1, batch_size=0), optimizer=Optimizer.plain())
        return state, TensorDict({"cluster": best, "theta": theta})

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        new = super().aggregate(self.models(server), replies)
        if self.send == "gradients":
            weights, chosen = replies.weights(), replies.stack["cluster"]
            for j in range(self.clusters):
                old, mean = replies.of_parameters(server[str(j)]), replies.of_parameters(new[str(j)])
                share = float(weights[chosen == j].sum())  # Σ a_i (θ_i − w) = share · (mean of θ − w)
                new[str(j)] = tree.merge(new[str(j)], old + (mean - old) * share)
        if not self.warm_rounds:
            return new
        warm = (server["warm"] - 1).clamp(min=0)
        return TensorDict({**dict(new.items()), "member": server["member"], "warm": warm})
