"""Cyclic weight transfer (Chang et al., JAMIA 2018; "Cyclic" of FLamby, Ogier du Terrail et al., NeurIPS 2022).

"Distributed Deep Learning Networks Among Institutions for Medical Imaging."

    min over w:  Σ_i p_i F_i(w),   one client after another

    round t:   server sends w to ONE client i, the next in the order;   every client once in N rounds
    client i:  θ = LocalSGD(w, K steps);   sends θ
    server:    w = θ                                                    deployed: w

T rounds are T visits, so T/N cycles; FLamby has K = 100 steps per visit (`train: {steps: 100}`). A new order is drawn
for each cycle, or with `order` = fixed it is that of the clients' numbers. The method has its own sampling and ignores
the run's `fraction` and `sampling`. FLamby keeps a client's optimizer and sequence of batches from visit to visit; here
both start afresh. A model goes from client to client, which is one transfer per visit; the traffic counted is d down
and d up, as through a server.

FLamby's code gives every client a deep copy of the model and transfers nothing (since May 2022); it evaluates the model
of client 0, trained alone in its own turns. `transfer` = false does the same, for comparisons with its published rows
(without client 0, which `data.excluded_clients` may leave out, with the first that takes part).

| symbol | here |
|---|---|
| w | server state |
| v_i, without transfer | client state |
| order of the clients in a cycle | `order` |
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import becomes
from tailorfl.methods.bases import ServerModel
from tailorfl.settings.experiment import Sampling
from tailorfl.training import tree


@register
class Cyclic(ServerModel):
    """One model that visits one client after another."""

    name = "cyclic"
    title = "Cyclic"
    paper = "Chang et al., JAMIA 2018"
    family = "one model"
    use = "few sites that train in turn, without an averaging server"
    special_cases = [becomes("with a single client", "centralized", clients=1)]
    has_personal = False
    order: Literal["drawn", "fixed"] = Field(
        "drawn", description="order of the clients: drawn again for each cycle, or by number"
    )
    transfer: bool = Field(
        True,
        description="pass the model on; if false, clients train alone in turn and the first's model is evaluated",
    )

    def sampled(self, run: Sampling) -> Sampling:
        return "cyclic" if self.order == "drawn" else "cyclic_fixed"

    def client_state(self, ctx: Context) -> TensorDict:
        return tree.empty() if self.transfer else ctx.init

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return server if self.transfer else tree.empty()

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        theta = client.fit(received if self.transfer else state)
        return state if self.transfer else theta, theta

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        return server

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        first = int(replies.context.members.nonzero()[0])
        return replies.mean() if self.transfer or first in replies.clients else server
