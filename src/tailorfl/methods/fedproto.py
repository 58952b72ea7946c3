"""FedProto (Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022).

    min over θ_i:  F_i(θ_i) + λ · MSE(z, P̄_y),   z the features of a sample, y its class: no weights travel

    server sends P̄
    client i:  θ_i = LocalSGD(θ_i, E) on  CE + λ/(B d_z) Σ_b ‖z_b − P̄_{y_b}‖²
               P_{i,c} = mean of z over its samples of class c              sends P_{i,c} of the classes it has
    server:    P̄_c = Σ a_i P_{i,c} / Σ a_i  over the clients that sent class c;  of no client: as before

Samples of a class without P̄ add nothing to the sum and count in B, so the first round trains alone. With uniform
weights P̄ is the official code's plain mean; the paper's equation weighs by samples and divides by the number of clients
again. The code averages features seen during the last epoch, while the weights move; here they are taken after it, in
evaluation mode. Clients may have networks of several architectures, as long as their features are equally wide.

A client deploys its network with the head it trained; or, with `predict` = prototype, it answers by the nearest P̄_c
among the classes that it has samples of: argmin ‖z − P̄_c‖² = argmax 2⟨P̄_c, z⟩ − ‖P̄_c‖², which is a linear head too.

| symbol | here |
|---|---|
| θ_i, of the client's own architecture | client state |
| P̄ [C, d_z], which classes have one | server state `prototypes`, `present`: only these rows travel |
| λ | `lam` |
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import exposure, to_local
from tailorfl.methods.class_features import (
    class_means,
    near,
    nearest_head,
    no_prototypes,
    shared_prototypes,
)
from tailorfl.training.objective import Term


@register
class FedProto(Method):
    """Clients agree on the mean features of classes and on nothing else."""

    name = "fedproto"
    title = "FedProto"
    paper = "Tan et al., AAAI 2022"
    family = "knowledge"
    use = "different networks, very few bytes"
    grid = {"lam": (0.1, 0.5, 1.0, 2.0)}
    special_cases = [
        to_local("with λ = 0", predict="head", lam=0),
        to_local("in its only round, before which there are no prototypes,", predict="head", rounds=1),
    ]
    exposures = [
        exposure("the class means of features, and which classes a client has, which it sends as they are"),
    ]
    has_global = False
    heterogeneous = True
    lam: float = Field(1.0, ge=0, description="λ: pull of the features towards the prototype of their class")
    predict: Literal["head", "prototype"] = Field(
        "head", description="prototype: answer by the nearest prototype of the client's own classes"
    )

    def server_state(self, ctx: Context) -> TensorDict:
        return TensorDict(no_prototypes(ctx, self.title, bias=self.predict == "prototype"))

    def client_state(self, ctx: Context) -> TensorDict:
        return ctx.init

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return server

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        term: tuple[Term, ...] = ()
        if self.lam > 0 and client.round > 0:
            term = (near(self.lam, received["prototypes"], received["present"]),)
        theta = client.fit(state, term=term)
        means, counts, _ = class_means(client, theta)
        return theta, TensorDict({"prototypes": means, "present": counts > 0})

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        means = replies.stack["prototypes"]
        weights = replies.weights().to(means.dtype)[:, None] * replies.stack["present"]
        return TensorDict(shared_prototypes(server, means, weights))

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        if self.predict == "head":
            return state
        among = received["present"] & (client.class_counts() > 0)
        # Before any has come, the head that was trained.
        return nearest_head(client, state, received["prototypes"], among)
