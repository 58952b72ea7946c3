"""FedDyn (Acar et al., ICLR 2021).

"Federated Learning Based on Dynamic Regularization." A global model without client drift. Local stationary points are
made to agree with the global one.

    server sends w
    client i:  θ = LocalSGD from w on F_i(θ) − ⟨g_i, θ⟩ + (α/2)‖θ − w‖²;   g_i = g_i − α (θ − w);   sends θ
    server:    h = h − α Σ_S p_i (θ − w);   w = mean_S θ − h/α

`train.clip` bounds the gradient of all three terms together, as in the official code: the new g_i depends only on the
stationary point of the local objective, however the client reaches it.

p_i is the weight of client i among ALL clients: n_i/Σn, or the paper's 1/N with `weights: uniform`. At any
participation h = Σ_i p_i g_i. The method reaches the minimum of Σ_i p_i F_i with K > 1 steps and partial participation,
where FedAvg is biased.

With `scale_alpha` client i takes α_i = α n̄/n_i instead of α, as the official code does if sizes differ; the
server's step is the one of equal weights, which this option uses unless `weights` is set. That code stores
q_i = −g_i/α_i and mean_i q_i = −h/α, so h = mean_i (α/α_i) g_i = Σ_i n_i/Σn g_i: at a fixed point the
sample-weighted mean of the F_i is at its optimum. α n̄ is sent with w.

| symbol | here |
|---|---|
| w, h | server state `w`, `correction` |
| g_i | client state |
| α | `alpha` |
| α n̄ | server state `scaled` (with `scale_alpha`) |
"""

from __future__ import annotations

import torch
from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.methods.bases import Corrected
from tailorfl.settings.experiment import Weights
from tailorfl.training import tree
from tailorfl.training.gradients import Gradient


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
        """Return equal weights with `scale_alpha`, whose α_i already account for the numbers of samples."""
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


def tilted(theta: TensorDict, grad: Gradient, g_i: TensorDict) -> TensorDict:
    """Return ∇F(θ) − g_i; the quadratic term is the fit's proximal pull."""
    return grad(theta) - g_i
