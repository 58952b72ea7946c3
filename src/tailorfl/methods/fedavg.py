"""FedAvg and its nearest relatives.

FedAvg: McMahan et al., AISTATS 2017; server optimizers: Reddi et al., ICLR 2021. FedProx: Li et al., MLSys
2020.

    server sends w
    client i:  θ_i = LocalSGD(w, E)                    FedProx adds (μ/2)‖θ − w‖² to the local loss
                                                       FedSAM takes each gradient at θ + ρ g/‖g‖
    server:    Δ = Σ_S a_i (θ_i − w),   w = server_optimizer(w, Δ)       (plain FedAvg: w = w + η_s Δ)

FedAvg+FT: FedAvg; a client deploys a copy of w, tuned for E_ft epochs on its own data, which is not kept for
later rounds.

| symbol | here |
|---|---|
| w | server state `w` |
| E, η | the run's training settings |
| η_s and moments | `server` |
| μ | `mu` |
| ρ | `rho` |
| E_ft | `ft_epochs`, or in steps `ft_steps` |
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import Family, Method, register
from tailorfl.core.reduction import becomes, to_fedavg
from tailorfl.core.server_training import ServerOptimizer
from tailorfl.training import tree
from tailorfl.training.ascent import sam


@register
class FedAvg(Method):
    """One global model: the weighted mean of locally trained copies."""

    name = "fedavg"
    title = "FedAvg"
    paper = "McMahan et al., AISTATS 2017"
    family: ClassVar[Family] = "one model"
    use = "similar clients; the reference for one model"
    special_cases = [
        becomes("with a single client", "centralized", server__is_plain_average=True, clients=1),
        *(
            becomes(
                "with one client after another",
                "cyclic",
                {"order": order},
                server__is_plain_average=True,
                sampling=sampling,
            )
            for order, sampling in (("drawn", "cyclic"), ("fixed", "cyclic_fixed"))
        ),
    ]
    has_personal = False
    server: ServerOptimizer = Field(
        ServerOptimizer(), description="server optimizer: kind, lr, momentum, beta2, eps, initial"
    )

    @property
    def averages_replies(self) -> bool:
        return True

    def server_state(self, ctx: Context) -> TensorDict:
        parameters = ctx.init.select(*ctx.model.parameters)
        return TensorDict({"w": ctx.init, "optimizer": self.server.start(parameters)})

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return self.shared(server)

    def shared(self, server: TensorDict) -> TensorDict:
        w: TensorDict = server["w"]
        return w

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        return state, client.fit(received)

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        w, mean, optimizer = server["w"], replies.mean(), server["optimizer"]
        old = replies.of_parameters(w)
        new, optimizer = self.server.step(old, replies.of_parameters(mean) - old, optimizer)
        w = mean if self.server.is_plain_average else tree.merge(mean, new)
        return TensorDict({"w": w, "optimizer": optimizer})


@register
class FedProx(FedAvg):
    """FedAvg whose local training is kept close to the received model."""

    name = "fedprox"
    title = "FedProx"
    paper = "Li et al., MLSys 2020"
    family = "one model"
    use = "one model despite drift of the clients, by a small change of FedAvg"
    grid = {"mu": (0.001, 0.01, 0.1, 1.0)}
    special_cases = [
        to_fedavg("with μ = 0", mu=0),
        to_fedavg("with one step per round, at whose start the pull is zero,", one_step=True),
    ]
    mu: float = Field(0.01, ge=0, description="μ of the penalty (μ/2)‖θ − w‖²")

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        return state, client.fit(received, prox=(self.mu, received) if self.mu > 0 else None)


@register
class FedAvgFT(FedAvg):
    """FedAvg, then every client tunes its own copy."""

    name = "fedavg_ft"
    title = "FedAvg+FT"
    paper = "FedAvg with local fine-tuning, as in PerAda (CVPR 2024)"
    family = "tuned"
    use = "personal models without extra traffic; try it first"
    grid = {"ft_epochs": (1, 5, 10)}
    special_cases = [to_fedavg("without epochs of tuning", ft_length=0)]
    has_personal = True
    ft_epochs: int = Field(1, ge=0, description="epochs of tuning on the client's own data")
    ft_steps: int | None = Field(None, ge=0, description="steps instead of ft_epochs")
    ft_scope: Literal["all", "head"] = Field("all", description="tune the whole model or its head")

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        scope = None if self.ft_scope == "all" else client.select("head")
        return client.fit(received, length=self.length("ft"), train=scope, purpose="finetune")


@register
class FedSAM(FedAvg):
    """FedAvg with sharpness-aware local training."""

    name = "fedsam"
    title = "FedSAM"
    paper = "Qu et al., ICML 2022"
    family = "one model"
    use = "a flatter global model"
    grid = {"rho": (0.01, 0.05, 0.1, 0.5)}
    special_cases = [to_fedavg("with ρ = 0", rho=0)]
    rho: float = Field(0.05, ge=0, description="ρ: radius of the ascent")

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        return state, client.fit(received, direction=sam(self.rho) if self.rho > 0 else None)
