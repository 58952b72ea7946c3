"""Cyclic weight transfer (Chang et al., JAMIA 2018; "Cyclic" of FLamby, Ogier du Terrail et al., NeurIPS 2022).

"Distributed Deep Learning Networks Among Institutions for Medical Imaging."

    min over w:  Σ_i p_i F_i(w),   one client after another

    round t:   server sends w to ONE client i, the next in the order;   every client once in N rounds
    client i:  θ = LocalSGD(w, K steps);   sends θ
    server:    w = θ                                                    deployed: w

T rounds are T visits, so T/N cycles; FLamby has K = 100 steps a visit (`train: {steps: 100}`). The order is drawn anew
for each cycle, or with `order` = fixed is that of the clients' numbers. It is the method's own sampling: the run's
`fraction` and `sampling` do not matter to it. FLamby keeps the optimizer and the sequence of batches of a client from
visit to visit; here both begin anew. A model goes from client to client, so it costs a hop each; counted are d down and
d up, as through a server.

FLamby's code gives every client a deep copy of the model and transfers nothing (since May 2022); what it evaluates is
client 0's, trained alone in its own turns. `transfer` = false does that, so that its published rows can be compared.

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

SHOWN = 0
"""The client whose model stands for all where nothing is transferred."""


@register
class Cyclic(ServerModel):
    """One model that visits one client after another."""

    name = "cyclic"
    title = "Cyclic"
    paper = "Chang et al., JAMIA 2018"
    family = "one model"
    use = "few sites in turns; no server that averages"
    special_cases = [becomes("with a single client", "centralized", clients=1)]
    has_personal = False
    order: Literal["drawn", "fixed"] = Field(
        "drawn", description="of the clients: drawn anew for each cycle, or by their numbers"
    )
    transfer: bool = Field(
        True,
        description="hand the model on; if not, clients train alone in their turns and client 0's is evaluated",
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
        return replies.mean() if self.transfer or SHOWN in replies.clients else server
