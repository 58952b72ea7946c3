"""HypCluster (Mansour et al., 2020; the same alternation as IFCA, Ghosh et al., NeurIPS 2020).

    min over w_1..w_c:  Σ_i p_i min_j F_i(w_j)

    server sends w_1..w_c
    client i:  j* = argmin_j F_i(w_j) on its TRAINING data (the lowest index of equals)
               θ = LocalSGD(w_j*, E);   sends (j*, θ)
    server:    w_j = Σ over clients that chose j of a_i θ_i;   a cluster nobody chose stays as it is

| symbol | here |
|---|---|
| c | `clusters` |
| w_j | server state, entry j |
| a_i | shares of training samples within the cluster |
"""

from __future__ import annotations

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Broadcast, Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import exposure, to_fedavg
from tailorfl.training import tree


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
    clusters: int = Field(2, ge=1, description="c: number of global models")

    def server_state(self, ctx: Context) -> TensorDict:
        # Equal starts would all be chosen alike for ever; the first is the shared one, so that c = 1 is FedAvg.
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
