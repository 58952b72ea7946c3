"""The two extremes of personalization: no collaboration, and all data in one place.

LocalTrain:   v_i = LocalSGD(v_i, E) on every client alone; nothing is sent.
Centralized:  w = LocalSGD(w, E) on the union of all training data; not federated, a reference.

Clients start from one initial model; with `own_init` each draws its own, as in methods that exchange no weights.

| symbol | here |
|---|---|
| v_i | client state |
| w | server state |
"""

from __future__ import annotations

from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.methods.bases import OwnModel, ServerModel
from tailorfl.training import tree


class Alone(OwnModel):
    """Every client trains its own model, alone."""

    @property
    def averages_replies(self) -> bool:
        return True

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        return client.fit(state), tree.empty()


@register
class LocalTrain(Alone):
    """Every client trains alone."""

    name = "local"
    title = "LocalTrain"
    paper = "baseline (Standalone)"
    family = "baseline"
    use = "the result of a client without the others"
    has_global = False
    heterogeneous = True
    own_init: bool = Field(False, description="every client draws its own initial model")

    @property
    def individual_start(self) -> bool:
        return self.own_init


@register
class LocalAverage(Alone):
    """LocalTrain, and the mean of a round's local models as a global one ("Local" in FedCLUP's code)."""

    name = "local_average"
    title = "LocalTrain, averaged"
    paper = "baseline (averaged once, never sent back)"
    family = "baseline"
    use = "the mean of independently trained models"

    def server_state(self, ctx: Context) -> TensorDict:
        return ctx.init

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        v = client.fit(state)
        return v, v

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        return server

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return replies.mean()


@register
class Centralized(ServerModel):
    """Ordinary training on pooled data."""

    name = "centralized"
    title = "Centralized"
    paper = "baseline (pooled data)"
    family = "baseline"
    use = "the result of pooling all data"
    has_personal = False
    pooled = True

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        return state, client.fit(received)
