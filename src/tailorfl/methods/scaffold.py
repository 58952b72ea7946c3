"""SCAFFOLD, option II (Karimireddy et al., ICML 2020).

"SCAFFOLD: Stochastic Controlled Averaging for Federated Learning." A global model without client drift, which is
measured and subtracted.

    server sends (w, c)
    client i:  y = w;  K steps  y = y − η (∇F_i(y) − c_i + c);   c_i⁺ = c_i − c + (w − y)/(K η)
               sends y − w and c_i⁺ − c_i;   c_i = c_i⁺
    server:    w = w + η_g mean_S (y − w);   c = c + Σ_S p_i (c_i⁺ − c_i)

`train.clip` bounds ∇F_i(y), not the step: so (w − y)/(Kη) is still mean ∇F_i − c_i + c, and c_i⁺ is the mean of the
clipped gradients that were followed. If steps were clipped, the clipped part would count as a gradient.

p_i is the weight of client i among ALL clients: n_i/Σn, or the paper's 1/N with `weights: uniform`. At any
participation c = Σ_i p_i c_i. The method reaches the minimum of Σ_i p_i F_i with K > 1 steps and partial participation,
where FedAvg is biased.

| symbol | here |
|---|---|
| w, c | server state `w`, `correction` |
| c_i | client state |
| η_g | `global_lr` |
| K | the steps a client really takes; without any (one sample, with batch norm) c_i stays |
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import becomes
from tailorfl.methods.bases import Corrected
from tailorfl.training import tree
from tailorfl.training.gradients import Gradient
from tailorfl.training.update import PLAIN, Optimizer


@register
class Scaffold(Corrected):
    """FedAvg with control variates."""

    name = "scaffold"
    title = "SCAFFOLD"
    paper = "Karimireddy et al., ICML 2020"
    family = "one model"
    use = "one model under drift, for twice the bytes"
    grid = {}
    special_cases = [
        becomes(
            "with a single round, whose control variates are zero,",
            "fedavg",
            "as_fedavg",
            train=PLAIN,
            rounds=1,
        ),
        becomes(
            "with one step a round of all clients, over whom the corrections cancel,",
            "fedavg",
            "as_fedavg",
            train=PLAIN,
            one_step=True,
            everyone=True,
        ),
    ]
    global_lr: float = Field(1.0, gt=0, description="η_g: server step")

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return server

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        return TensorDict({"y": server["w"]})

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        w, c, c_i = received["w"], received["correction"], state
        # With momentum, weight decay, AdamW or a decaying rate (w − y)/(Kη) would not be a mean gradient.
        y = client.fit(w, direction=corrected, given=(c_i, c), optimizer=Optimizer.plain(clip_each=True))
        moved = client.parameters(w) - client.parameters(y)
        k = client.steps()
        c_new = c_i - c * k.clamp(max=1.0) + moved / (k.clamp(min=1.0) * client.config.lr)
        return c_new, TensorDict({"y": y, "change": c_new - c_i})

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        w, c, mean = server["w"], server["correction"], replies.mean()
        old, new = replies.of_parameters(w), replies.of_parameters(mean["y"])
        w = tree.merge(mean["y"], old + (new - old) * self.global_lr)
        return TensorDict({"w": w, "correction": c + mean["change"] * replies.share})

    @property
    def as_fedavg(self) -> dict[str, Any]:
        """FedAvg's options for the same server step."""
        return {"weights": self.weights, "server": {"lr": self.global_lr}}


def corrected(y: TensorDict, grad: Gradient, c_i: TensorDict, c: TensorDict) -> TensorDict:
    """Return ∇F(y) − c_i + c."""
    return grad(y) - c_i + c
