"""MyMethod (whose paper?): one line on what it does.

    server sends w
    client i:  θ = LocalSGD(w, E);   v_i = LocalSGD(v_i, E, prox (λ, w));   sends θ
    server:    w = mean_S θ                                               deployed: v_i

| symbol | here |
|---|---|
| w | server state |
| v_i | client state |
| λ | `lam` |
"""

from __future__ import annotations

from pydantic import Field
from tensordict import TensorDict

from tailorfl import Client, Context, Method, Replies
from tailorfl.core.reduction import to_local


class MyMethod(Method):
    """FedAvg, and a personal model on each client that is pulled towards it."""

    name = "my_method"
    title = "MyMethod"
    paper = "you, this year"
    family = "two models"
    use = "a start for a method of your own"
    grid = {"lam": (0.1, 1.0)}
    special_cases = [to_local("with λ = 0", lam=0)]
    models_trained = 2
    lam: float = Field(1.0, ge=0, description="λ: pull of the personal model towards the global one")

    def server_state(self, ctx: Context) -> TensorDict:
        return ctx.init

    def client_state(self, ctx: Context) -> TensorDict:
        return ctx.init

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return server

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        v, w = state, received
        theta = client.fit(w)
        return client.fit(v, prox=(self.lam, w)), theta

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return replies.mean()

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return state

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        return received
