"""CFL (Sattler et al., IEEE TNNLS 2020).

"Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under Privacy Constraints."

    one model per group of clients with similar updates; a group splits if FedAvg has converged but its clients have not

    server sends client i  w_c, the model of its cluster c
    client i:  θ = LocalSGD(w_c, E);   sends θ,   Δ_i = θ − w_c
    server:    each cluster of more than two, all of whose members were sampled, after round t_0:
                   if ‖mean Δ‖ < ε_1 and max ‖Δ_i‖ > ε_2:  split in two by complete linkage on −cos(Δ_i, Δ_j)
               every cluster, the new ones too:  w_c = mean of its members' θ                       deployed: w_c

The paper also requires distant parts, √((1 − largest cosine between them)/2) > γ; the code does not: `gamma`, off at 0.
The official code takes positions inside a cluster for clients' ids, which is right only for the first split; here they
are mapped back. Means use the run's weights, which are equal in the paper. If only some clients take part, the first
cluster splits only in a round that has all of them. A newcomer gets the oldest cluster's model: walking down the tree
of splits, as in the paper, needs the updates of the clients that were split.

| symbol | here |
|---|---|
| w_c | server state `models` [clusters, ...] |
| the cluster of every client | server state `member` [N] |
| ε_1, ε_2, t_0, γ | `eps1`, `eps2`, `first_split`, `gamma` |
"""

from __future__ import annotations

import numpy as np
import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import PerClient, Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import Reduction, RunSetup
from tailorfl.training import tree


@register
class CFL(Method):
    """FedAvg in clusters, which split in two when their clients' updates diverge."""

    fixed_clients = "its server remembers the cluster of every client"
    name = "cfl"
    title = "CFL"
    paper = "Sattler et al., IEEE TNNLS 2020"
    family = "mixture"
    use = "groups of clients that emerge during training"
    grid = {"eps1": (0.1, 0.2, 0.4, 0.8), "eps2": (0.8, 1.6, 3.2), "first_split": (5, 10, 20)}
    has_global = False
    eps1: float = Field(0.4, ge=0, description="ε_1: a cluster splits if its mean update is shorter")
    eps2: float = Field(1.6, ge=0, description="ε_2: and its longest update is longer")
    first_split: int = Field(20, ge=0, description="t_0: rounds before the first split")
    gamma: float = Field(0.0, ge=0, le=1, description="γ: required distance of the two parts; 0: none")

    def server_state(self, ctx: Context) -> TensorDict:
        models = TensorDict({n: t[None].clone() for n, t in tree.tensors(ctx.init).items()})
        return TensorDict({"models": models, "member": torch.where(ctx.members, 0, -1)})

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> PerClient:
        member = server["member"].tolist()
        return self.sent(server, torch.tensor([member[i] if i < len(member) else 0 for i in clients]))

    def welcome(self, server: TensorDict, clients: tuple[int, ...]) -> PerClient:
        return self.sent(server, torch.zeros(len(clients), dtype=torch.int64))

    def sent(self, server: TensorDict, clusters: Tensor) -> PerClient:
        models = tree.tensors(server["models"])
        count = len(next(iter(models.values())))
        return PerClient(TensorDict(models, batch_size=[count]), clusters)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        return state, client.fit(received)

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        ids, weights = torch.tensor(replies.clients), replies.weights()
        old, member = tree.tensors(server["models"]), server["member"].clone()
        names = [n for n in replies.context.split.trainable if n in old]
        moved = [replies.stack[n] - old[n][member[ids]] for n in names]
        updates = torch.cat([t.double().reshape(len(ids), -1) for t in moved], 1)
        count = int(member.max()) + 1
        for c in range(count):
            at = (member[ids] == c).nonzero()[:, 0]
            all_there = len(at) == int((member == c).sum())
            if all_there and replies.round >= self.first_split and self.stands(updates[at], weights[at]):
                second = self.parts(updates[at])
                if bool(second.any()):
                    member[ids[at[second]]] = int(member.max()) + 1
        models = []
        for c in range(int(member.max()) + 1):
            at = (member[ids] == c).nonzero()[:, 0]
            if len(at):
                models.append(mean_of(replies.stack[at], weights[at] / weights[at].sum()))
            else:
                models.append(TensorDict({n: t[c] for n, t in old.items()}))
        new = {n: torch.stack([model[n] for model in models]) for n in old}
        return TensorDict({"models": TensorDict(new), "member": member})

    def stands(self, updates: Tensor, weights: Tensor) -> bool:
        """Return whether a cluster with updates [members, scalars] has converged while its clients have not."""
        mean = (weights / weights.sum()) @ updates
        return (
            len(updates) > 2 and bool(mean.norm() < self.eps1) and bool(updates.norm(dim=1).max() > self.eps2)
        )

    def parts(self, updates: Tensor) -> Tensor:
        """Return which members leave the first one's part, [members] bool; none if the parts are too close."""
        from scipy.cluster.hierarchy import fcluster, linkage
        from scipy.spatial.distance import squareform

        size = updates.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
        cosine = (updates @ updates.T / (size[:, None] * size[None, :])).clamp(-1.0, 1.0)
        distances = (1 - cosine).numpy()
        np.fill_diagonal(distances, 0.0)
        label = fcluster(linkage(squareform(distances, checks=False), "complete"), 2, "maxclust")
        second = torch.from_numpy(label != label[0])
        if self.gamma > 0 and bool(second.any()):
            nearest = cosine[second][:, ~second].max()
            second = second & bool(((1 - nearest) / 2).sqrt() > self.gamma)
        return second

    def reductions(self, run: RunSetup) -> tuple[Reduction, ...]:
        if run.rounds > self.first_split and run.clients > 2:
            return ()
        because = "before its first split" if run.clients > 2 else "with at most two clients"
        return (Reduction(because, "personal", "fedavg", "global", {"weights": self.weights}),)


def mean_of(stack: TensorDict, share: Tensor) -> TensorDict:
    """Return the mean of models [members, ...]; for counters the largest, which does not depend on the order."""
    mean = tree.tensors(tree.weighted_mean(stack, share))
    return TensorDict({n: t if t.is_floating_point() else stack[n].amax(0) for n, t in mean.items()})
