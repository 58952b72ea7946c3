"""Global models without client drift: what local training adds in the wrong direction is measured and subtracted.

SCAFFOLD, option II (Karimireddy et al., ICML 2020)

    server sends (w, c)
    client i:  y = w;  K steps  y = y − η (∇F_i(y) − c_i + c);   c_i⁺ = c_i − c + (w − y)/(K η)
               sends y − w and c_i⁺ − c_i;   c_i = c_i⁺
    server:    w = w + η_g mean_S (y − w);   c = c + Σ_S p_i (c_i⁺ − c_i)

`train.clip` bounds ∇F_i(y), not the step: so (w − y)/(Kη) = mean ∇F_i − c_i + c still, and c_i⁺ is the mean of the
clipped gradients that were followed. Of a clipped step, what clipping took away would count as a gradient.

FedDyn (Acar et al., ICLR 2021)

    server sends w
    client i:  θ = LocalSGD from w on F_i(θ) − ⟨g_i, θ⟩ + (α/2)‖θ − w‖²;   g_i = g_i − α (θ − w);   sends θ
    server:    h = h − α Σ_S p_i (θ − w);   w = mean_S θ − h/α

`train.clip` bounds the gradient of all three terms together, as in the official code: g_i⁺ is what the stationary point
of the local objective makes it, however the client gets there.

p_i is the weight of client i among ALL clients: n_i/Σn, or the papers' 1/N with `weights: uniform`. Invariants at any
participation: c = Σ_i p_i c_i, h = Σ_i p_i g_i. Both reach the minimum of Σ_i p_i F_i with K > 1 steps and partial
participation, where FedAvg is biased.

With `scale_alpha` client i takes α_i = α n̄/n_i in place of α, as the official code does where sizes differ; the
server's step is the one of equal weights, so that is what this option uses unless told otherwise. That code stores
q_i = −g_i/α_i and mean_i q_i = −h/α, so h = mean_i (α/α_i) g_i = Σ_i n_i/Σn g_i: where it stands still, the
sample-weighted mean of the F_i is at its optimum. α n̄ goes down with w.

| symbol | here |
|---|---|
| w, c, h | server state |
| c_i, g_i | client state |
| η_g | `global_lr` |
| α | `alpha` |
| α n̄ | server state `scaled` (with `scale_alpha`) |
| K | the steps a client really takes |
"""

from __future__ import annotations

import torch
from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import Facts, Reduction
from tailorfl.settings.experiment import Weights
from tailorfl.training import tree
from tailorfl.training.gradients import Gradient
from tailorfl.training.update import PLAIN, Optimizer


class Corrected(Method):
    """A server model beside a correction on the server and one on every client, all starting at zero."""

    has_personal = False

    @property
    def averages_replies(self) -> bool:
        return True

    def server_state(self, ctx: Context) -> TensorDict:
        return TensorDict({"w": ctx.init, "correction": zeros(ctx)})

    def client_state(self, ctx: Context) -> TensorDict:
        return zeros(ctx)

    def shared(self, server: TensorDict) -> TensorDict:
        w: TensorDict = server["w"]
        return w

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        w: TensorDict = received["w"]
        return w


@register
class Scaffold(Corrected):
    """FedAvg with control variates."""

    name = "scaffold"
    title = "SCAFFOLD"
    paper = "Karimireddy et al., ICML 2020"
    family = "one model"
    use = "one model under drift, for twice the bytes"
    grid = {}
    global_lr: float = Field(1.0, gt=0, description="η_g: server step")

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return server

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        return TensorDict({"y": server["w"]})

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        w, c, c_i = received["w"], received["correction"], state
        # Momentum, weight decay, AdamW or a decaying rate would make (w − y)/(Kη) another thing than a mean gradient.
        y = client.fit(w, direction=corrected, given=(c_i, c), optimizer=Optimizer.plain(clip_each=True))
        moved = client.parameters(w) - client.parameters(y)
        c_new = c_i - c + moved / (client.steps().clamp(min=1.0) * client.config.lr)
        return c_new, TensorDict({"y": y, "change": c_new - c_i})

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        w, c, mean = server["w"], server["correction"], replies.mean()
        old, new = replies.of_parameters(w), replies.of_parameters(mean["y"])
        w = tree.merge(mean["y"], old + (new - old) * self.global_lr)
        return TensorDict({"w": w, "correction": c + mean["change"] * replies.share})

    def reductions(self, facts: Facts) -> tuple[Reduction, ...]:
        if facts.rounds == 1:
            because = "in its only round, whose control variates are zero,"
        elif facts.one_step and facts.everyone:
            because = "with one step a round of all clients, over whom the corrections cancel,"
        else:
            return ()
        options = {"weights": self.weights, "server": {"lr": self.global_lr}}
        return (Reduction(because, "global", "fedavg", "global", options, dict(PLAIN)),)


@register
class FedDyn(Corrected):
    """Dynamic regularisation: local stationary points are made to agree with the global one."""

    name = "feddyn"
    title = "FedDyn"
    paper = "Acar et al., ICLR 2021"
    family = "one model"
    use = "one model under label skew with many local steps"
    grid = {"alpha": (0.001, 0.01, 0.1)}
    alpha: float = Field(0.01, gt=0, description="α of the dynamic regulariser")
    scale_alpha: bool = Field(
        False, description="α·n̄/n_i on client i (official code): the optimum is then weighted by samples"
    )

    def weighting(self, run: Weights) -> Weights:
        """Equal weights with `scale_alpha`, whose α_i count samples already."""
        return self.weights or ("uniform" if self.scale_alpha else run)

    def server_state(self, ctx: Context) -> TensorDict:
        state = super().server_state(ctx)
        if self.scale_alpha:
            state["scaled"] = torch.tensor(self.alpha * ctx.samples)
        return state

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return server.select("w", "scaled") if self.scale_alpha else self.shared(server)

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        return self.shared(server)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        w, g_i = self.personal(client, state, received), state
        alpha = received["scaled"] / client.samples.clamp(min=1.0) if self.scale_alpha else self.alpha
        theta = client.fit(w, direction=tilted, given=(g_i,), prox=(alpha, w))
        return g_i - (client.parameters(theta) - client.parameters(w)) * alpha, theta

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        w, h, mean = server["w"], server["correction"], replies.mean()
        theta = replies.of_parameters(mean)
        h = h - (theta - replies.of_parameters(w)) * (self.alpha * replies.share)
        new = {"w": tree.merge(mean, theta - h / self.alpha), "correction": h}
        return TensorDict({**dict(server.items()), **new})

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return super().personal(client, state, received) if self.scale_alpha else received


def corrected(y: TensorDict, grad: Gradient, c_i: TensorDict, c: TensorDict) -> TensorDict:
    """∇F(y) − c_i + c."""
    return grad(y) - c_i + c


def tilted(theta: TensorDict, grad: Gradient, g_i: TensorDict) -> TensorDict:
    """∇F(θ) − g_i; the quadratic term is the fit's proximal pull."""
    return grad(theta) - g_i


def zeros(ctx: Context) -> TensorDict:
    """Returns zeros of the shape of the trainable parameters."""
    names = ctx.split.trainable
    return TensorDict({n: torch.zeros_like(ctx.init.get(n)) for n in names})
