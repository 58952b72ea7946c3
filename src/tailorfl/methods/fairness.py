"""Global models that do not leave the clients with the largest losses behind.

q-FedAvg (Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020)

    min over w:  Σ_k p_k F_k(w)^{q+1} / (q+1)

    server sends w
    client k:  F_k = loss of the received w on all its training data (+ 10⁻¹⁰);   θ = LocalSGD(w, E);   G = (w − θ)/η
               sends Δ_k = F_k^q G   and   h_k = q F_k^{q−1} ‖G‖² + F_k^q / η
    server:    w = w − Σ_S a_k Δ_k / Σ_S a_k h_k

Steps are plain SGD, since η must be their length. The official code samples clients by their samples and adds
without weights: `sampling=proportional` with `weights=uniform`. Otherwise a_k are the run's weights. F_k is each
client's own loss of the received model, while ports use one loss for all or the running loss of the training.

AFL (Mohri et al., "Agnostic Federated Learning", ICML 2019)

    min over w  max over λ in the simplex:  Σ_i λ_i F_i(w)

    server sends w
    client i:  θ_i = w − η ∇F_i(w), on one batch;   sends θ_i and F_i(w), on all its training data
    server:    w = Σ_i λ_i θ_i;   λ = projection of λ + γ F on the simplex;   w̄ = mean of all w so far
                                                                                               deployed: w̄

λ starts at 1/N. If only some clients take part, their λ_i (θ_i − w) and F_i are scaled by N/m, the unbiased
estimates of the paper's stochastic form; with all clients this is the above. A newcomer gets w̄. λ replaces the run's
weights, but for running statistics: such an estimate of a variance may be negative.

| symbol | here |
|---|---|
| w, w̄, λ | server state (q-FedAvg), `w`, `mean`, `mixture` [N] (AFL) |
| q, γ | `q`, `gamma` |
| η | the run's learning rate |
"""

from __future__ import annotations

import torch
from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import exposure, to_fedavg
from tailorfl.errors import ConfigError
from tailorfl.methods.bases import SendsChange, ServerModel
from tailorfl.methods.mixtures import on_simplex
from tailorfl.training import tree
from tailorfl.training.plan import Length
from tailorfl.training.update import PLAIN, Optimizer

_TINY = 1e-10


@register
class QFedAvg(SendsChange, ServerModel):
    """FedAvg that gives clients more weight the larger their loss is."""

    name = "qfedavg"
    title = "q-FedAvg"
    paper = "Li et al., ICLR 2020"
    family = "one model"
    use = "one model that lifts clients with a large loss"
    has_personal = False
    grid = {"q": (0.001, 0.1, 1.0, 2.0, 5.0)}
    special_cases = [to_fedavg("with q = 0", train=PLAIN, q=0)]
    exposures = [exposure("the training loss of the received model, by which each update is scaled")]
    q: float = Field(0.1, ge=0, description="q: how much more a larger loss counts; 0: FedAvg")

    @property
    def averages_replies(self) -> bool:
        return False  # a quotient of two means

    def server_state(self, ctx: Context) -> TensorDict:
        if ctx.task == "counts" and self.q > 0:
            raise ConfigError(
                "q-FedAvg takes powers of losses, but the loss of a counts task, without log y!, may be negative; use "
                "another method, or q = 0"
            )
        return super().server_state(ctx)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        w, eta = client.parameters(received), client.config.lr
        loss = client.loss(received) + _TINY
        theta = client.fit(received, optimizer=Optimizer.plain())
        moved = (w - client.parameters(theta)) / eta
        grown = loss**self.q
        h = self.q * loss ** (self.q - 1) * tree.dot(moved, moved) + grown / eta
        return state, TensorDict({"change": moved * grown, "h": h, "rest": theta.exclude(*w.keys())})

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        mean = replies.mean()
        change = mean["change"]
        moved = server.select(*change.keys()) - change / mean["h"]
        return tree.merge(server, mean.get("rest", tree.empty()), moved)


@register
class AFL(Method):
    """A global model for the worst mixture of clients."""

    fixed_clients = "its server keeps a weight of every client, and these sum to 1"
    name = "afl"
    title = "AFL"
    paper = "Mohri et al., ICML 2019"
    family = "one model"
    use = "the worst-off of few clients"
    has_personal = False
    grid = {"gamma": (0.001, 0.01, 0.1, 1.0)}
    exposures = [exposure("the training losses of clients, by which the server weighs them")]
    gamma: float = Field(
        0.01, ge=0, description="γ: step of the mixture λ towards clients with larger losses"
    )

    def server_state(self, ctx: Context) -> TensorDict:
        mixture = ctx.members.double() / ctx.members.sum()
        return TensorDict({"w": ctx.init, "mean": ctx.init, "mixture": mixture, "iterates": torch.tensor(0)})

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        w: TensorDict = server["w"]
        return w

    def welcome(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return self.shared(server)

    def shared(self, server: TensorDict) -> TensorDict:
        mean: TensorDict = server["mean"]
        return mean

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        theta = client.fit(received, length=Length(steps=1), optimizer=Optimizer.plain())
        return state, TensorDict({"theta": theta, "loss": client.loss(received)})

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        return TensorDict({"theta": received})

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        rows, mixture = torch.tensor(replies.clients), server["mixture"].clone()
        drawn = int(replies.context.members.sum()) / len(rows)
        theta = tree.weighted_mean(replies.stack["theta"], mixture[rows] * drawn)
        # These weights sum to 1 if all take part: nothing of w remains
        remaining = 1 - drawn * float(mixture[rows].sum())
        w = tree.merge(replies.mean()["theta"], replies.of_parameters(added(theta, server["w"], remaining)))
        slope = torch.zeros_like(mixture)
        slope[rows] = replies.stack["loss"].double() * drawn
        count = server["iterates"] + 1
        mean = added(w, added(server["mean"], w, -1.0), 1 - 1 / float(count))
        members = replies.context.members  # a client that was left out keeps a weight of 0
        mixture[members] = on_simplex((mixture + self.gamma * slope)[members])
        return TensorDict({"w": w, "mean": mean, "mixture": mixture, "iterates": count})


def added(model: TensorDict, other: TensorDict, factor: float) -> TensorDict:
    """Return model + factor · other; counters are the model's."""
    found = tree.tensors(model)
    return TensorDict({n: t + other[n] * factor if t.is_floating_point() else t for n, t in found.items()})
