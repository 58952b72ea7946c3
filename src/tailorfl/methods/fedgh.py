"""FedGH (Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM MM 2023).

    clients train their own networks under one head h, which the server learns from the class means of all clients

    server sends h
    client i:  (φ_i, h_i) = LocalSGD((φ_i, h), E);      R_{i,c} = mean of f(x; φ_i) over its samples of class c
               sends R_{i,c} of the classes it has
    server:    for each client, for each of its classes:    h = h − η_s clip(∇ CE(h(R_{i,c}), c))
                                                                    deployed: (φ_i, h_i), or with `deploy` (φ_i, h)

Clients may have networks of different architectures, as long as their features have the same width. In the official
code the server's step is one of a client's optimizer, which does not hold h, so h keeps its initial values: that is
`server_lr` = 0. Its means are of batch means, in training mode; here they are of all samples, after training, in
evaluation mode. Clients are visited in the order of their ids. A newcomer has its initial φ_i, and h.

| symbol | here |
|---|---|
| h | server state `weight` [C, d_z], `bias` [C] |
| φ_i, of the client's own architecture; h_i | client state; in it `own` |
| R_{i,c}, which classes a client has | reply `means`, `present`: only these rows are sent |
| η_s, the norm at which a step is clipped | `server_lr`, 50 |
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import exposure, to_local
from tailorfl.methods.class_features import HEAD, class_means, common_head, linear_head, with_head
from tailorfl.training import tree

CLIP = 50.0
"""Largest norm of the gradient of a step of the server."""
OWN = "own"
"""Entry of a client's state with its head, next to the tensors of its body."""


@register
class FedGH(Method):
    """Clients of any architecture under one head, which the server trains on their class means."""

    name = "fedgh"
    title = "FedGH"
    paper = "Yi et al., ACM MM 2023"
    family = "knowledge"
    use = "different networks, few bytes: a head of class means"
    grid = {"server_lr": (0.001, 0.01, 0.1, 1.0)}
    special_cases = [
        to_local(
            "with a single round, before which the head is as drawn,",
            rounds=1,
            deploy="trained",
            architectures=1,
        )
    ]
    exposures = [
        exposure("the class means of features, and which classes a client has, which it sends as they are")
    ]
    has_global = False
    heterogeneous = True
    server_lr: float = Field(
        0.01,
        ge=0,
        description="η_s: learning rate of the server's head; 0: it stays as initialised, as in the official code",
    )
    deploy: Literal["trained", "received"] = Field(
        "trained", description="the head of the deployed model: the client's last, or the server's"
    )

    def server_state(self, ctx: Context) -> TensorDict:
        return TensorDict(common_head(ctx, self.title))

    def client_state(self, ctx: Context) -> TensorDict:
        names = linear_head(ctx, self.title)
        head = {kind: ctx.init[n] for kind, n in zip(HEAD, names, strict=False)}
        return TensorDict({**dict(ctx.init.exclude(*names).items()), OWN: TensorDict(head)})

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return server

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        theta = client.fit(with_head(client, state.exclude(OWN), received))
        means, counts, _ = class_means(client, theta)
        names = client.select("head")
        head = TensorDict({kind: theta[n] for kind, n in zip(HEAD, names, strict=False)})
        new = TensorDict({**dict(theta.exclude(*names).items()), OWN: head})
        return new, TensorDict({"means": means, "present": counts > 0})

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        head = tree.tensors(server)
        for means, present in zip(replies.stack["means"], replies.stack["present"], strict=True):
            for c in present.nonzero().flatten().tolist():
                head = stepped(head, means[c], c, self.server_lr)
        return TensorDict(head)

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return with_head(client, state.exclude(OWN), state[OWN] if self.deploy == "trained" else received)

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        return TensorDict({**dict(state.items()), OWN: received})


def stepped(head: dict[str, Tensor], z: Tensor, label: int, lr: float) -> dict[str, Tensor]:
    """Return a linear head after one step on the cross entropy of one sample of features `z` [d_z]."""
    z = z.to(head["weight"].dtype)
    slope = (head["weight"] @ z + head.get("bias", 0.0)).softmax(0)
    slope[label] -= 1.0
    gradient = {"weight": slope[:, None] * z, "bias": slope}
    norm = torch.cat([gradient[n].flatten() for n in head]).norm()
    scale = (CLIP / (norm + 1e-6)).clamp(max=1.0)
    return {n: t - lr * scale * gradient[n] for n, t in head.items()}
