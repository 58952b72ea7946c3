"""FedNova (Wang et al., NeurIPS 2020).

"Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization."

    min over w:  Σ_i p_i F_i(w), without the bias of clients with unequal numbers of steps

    server sends w
    client i:  θ = τ_i steps from w;   d_i = (w − θ)/a_i;   sends d_i and a_i
               a_i = τ_i                                       plain SGD
                   = (τ_i − ρ(1 − ρ^τ_i)/(1 − ρ))/(1 − ρ)      momentum ρ
                   = (1 − (1 − ημ)^τ_i)/(ημ)                   proximal term (μ/2)‖θ − w‖²
    server:    Δ = −τ_eff Σ_S p_i d_i,   τ_eff = Σ_S p_i a_i, with a proximal term Σ_S p_i τ_i
               w = server_optimizer(w, Δ)                      (plain: w + Δ)

The official code counts each step once too often if momentum and the proximal term are combined; the pair is refused.
τ_eff with a proximal term is that of the official code. a_i assumes SGD at a constant rate, so a fit here uses that
whatever the run's settings, with the run's momentum and weight decay. p_i are shares of the cohort; running statistics
are averaged.

| symbol | here |
|---|---|
| w | server state `w` |
| ρ | the run's momentum |
| μ | `mu` |
| p_i | the run's weights; samples in the paper |
| momentum of the server | `server` |
"""

from __future__ import annotations

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import exposure, to_fedavg
from tailorfl.errors import ConfigError
from tailorfl.methods.bases import SendsChange
from tailorfl.methods.fedavg import FedAvg
from tailorfl.training import tree
from tailorfl.training.update import Optimizer

SGD = {"optimizer": "sgd", "schedule": "constant"}
"""FedNova's training settings, whatever the run's."""


@register
class FedNova(SendsChange, FedAvg):
    """FedAvg of updates per step, so that clients with more steps do not count more."""

    name = "fednova"
    title = "FedNova"
    paper = "Wang et al., NeurIPS 2020"
    family = "one model"
    use = "clients with unequal numbers of steps"
    grid = {}
    special_cases = [
        to_fedavg("with one client a round", train=SGD, mu=0, cohort=1),
        to_fedavg("with equally many steps on every client", train=SGD, mu=0, counted_in_steps=True),
    ]
    exposures = [exposure("the number of a client's steps, by which updates are scaled", "client")]
    mu: float = Field(0.0, ge=0, description="μ of a proximal term (μ/2)‖θ − w‖², not with momentum")

    @property
    def averages_replies(self) -> bool:
        return False  # a product of two means

    def server_state(self, ctx: Context) -> TensorDict:
        if self.mu > 0 and ctx.train.momentum > 0:
            raise ConfigError(
                f"FedNova supports momentum or a proximal term, not both, but train.momentum = {ctx.train.momentum:g} "
                f"and mu = {self.mu:g}; set one of them to 0"
            )
        return super().server_state(ctx)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        config, w = client.config, client.parameters(received)
        prox = (self.mu, received) if self.mu > 0 else None
        rule = Optimizer(kind="sgd", schedule="constant")
        theta = client.fit(received, prox=prox, optimizer=rule)
        dtype = next(iter(tree.tensors(w).values())).dtype
        tau = client.steps().double()
        a = accumulated(tau, config.momentum, config.lr * self.mu).to(dtype)
        change = (w - client.parameters(theta)) / torch.where(a > 0, a, 1.0)
        length = {"steps": tau.to(dtype) if self.mu > 0 else a}
        return state, TensorDict({"each": change, **length, "rest": theta.exclude(*w.keys())})

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        w, mean = server["w"], replies.mean()
        update = mean["each"] * -mean["steps"]
        new, optimizer = self.server.step(w.select(*update.keys()), update, server["optimizer"])
        w = tree.merge(w, mean.get("rest", tree.empty()), new)
        return TensorDict({"w": w, "optimizer": optimizer})


def accumulated(tau: Tensor, momentum: float, pull: float) -> Tensor:
    """Return a_i: the number of plain steps that τ_i steps are worth with momentum ρ or a proximal term of ημ."""
    if pull > 0:
        return (1 - (1 - pull) ** tau) / pull
    return (tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum)
