"""FedBABU: only the body is trained and shared, under a head that keeps its initial values.

FedBABU: Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.

    state (u, h): body u, averaged by the server; head h, initially the same on all clients, never sent
    server sends u
    client i:  u_i = E epochs on u alone, sends u_i
    server:    u = Σ_S a_i u_i,   a_i uniform in the paper
    deployed:  (u, h) after E_ft epochs on the whole model, its head or its body

| symbol | here |
|---|---|
| u, h | server state |
| E_ft | `ft_epochs`, `ft_steps` |
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import becomes, options_but, to_fedavg, untrained
from tailorfl.methods.partial import SplitMethod
from tailorfl.training import tree


@register
class FedBABU(SplitMethod):
    """Only the body is trained and shared, under a head that keeps its initial values; deployment tunes a copy."""

    name = "fedbabu"
    title = "FedBABU"
    paper = "Oh et al., ICLR 2022"
    family = "parts"
    use = "a body trained for all, heads tuned at the end"
    grid = {"ft_epochs": (1, 5, 10), "ft_scope": ("head", "body", "full")}
    special_cases = [
        untrained(
            "with all of this model in its frozen head ('{self.personal_part}')", "global", all_personal=True
        ),
        becomes("without epochs of tuning", "fedbabu", options_but(), models=("personal",), ft_length=0),
        to_fedavg(
            SplitMethod.nothing_personal,
            "fedavg_ft",
            keep=("ft_epochs", "ft_steps"),
            models=("personal",),
            other_model="personal",
            all_shared=True,
            ft_scope="full",
            ft_length__not=0,
        ),
    ]
    has_global = True
    ft_epochs: int = Field(
        10, ge=0, description="E_ft: epochs of tuning before a model is used (the paper: 5)"
    )
    ft_steps: int | None = Field(None, ge=0, description="steps instead of ft_epochs")
    ft_scope: Literal["head", "body", "full"] = Field("full", description="what deployment tunes")

    def server_state(self, ctx: Context) -> TensorDict:
        u, head = ctx.split.select_shared(ctx.init), ctx.split.select_personal(ctx.init)
        return TensorDict({"u": u, "head": head})

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        u: TensorDict = server["u"]
        return u

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return TensorDict({"u": replies.mean(), "head": server["head"]})

    def shared(self, server: TensorDict) -> TensorDict:
        return tree.merge(server["u"], server["head"])

    def train(self, client: Client, model: TensorDict) -> TensorDict:
        return client.fit(model, train=client.split.shared)

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        scopes = {"head": client.split.personal, "body": client.split.shared, "full": None}
        return client.fit(
            tree.merge(received, state),
            train=scopes[self.ft_scope],
            length=self.length("ft"),
            purpose="finetune",
        )
