"""pFedGraph (Ye et al., "Personalized Federated Learning with Inferred Collaboration Graphs", ICML 2023).

    min over w_i and rows a_i of the simplex:  Σ_i F_i(w_i) − λ Σ_j a_ij cos(w_i, w_j) + α ‖a_i − p‖²

    server sends client i  u_i = Σ_j a_ij w_j   and   g_i = Σ_j a_ij w_j/‖w_j‖
    client i:  w_i = LocalSGD(u_i, E) along  ∇F_i(w) − λ ∇⟨g_i, w⟩/‖w‖ (no term before its first graph);   sends w_i
    server:    for i, j in S:  C_ij = cos(w_i − w⁰, w_j − w⁰), above 0.9 taken as 1;   p_j = weights within S
               a_i = projection of p + C_i/(2α) on the simplex                                    deployed: w_i

The official code solves that projection with a quadratic program. Its four ports ADD λ cos, which drives a model away
from those it is mixed with, against its own graph: `released=True` does that. Its variant `approximate` pulls along
cos(u_i, w), and only u_i is sent. The last w_i is deployed, not the best by validation. Cosines and the term are of
all trainable parameters, or with `measure=head` of the head. A client that was not in S keeps its last u_i and g_i; a
newcomer gets the mean of the last cohort's models.

| symbol | here |
|---|---|
| w_i | client state |
| u_i, g_i of all clients | server state `models` [N, ...], `pulls` [N, ...] |
| w⁰, mean of the last cohort's models | server state `origin`, `mean` |
| λ, α | `lam`, `alpha` |
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import PerClient, Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import to_local
from tailorfl.methods.bases import OwnModel
from tailorfl.methods.mixtures import copies, cosines, mixed, on_simplex, replaced
from tailorfl.training import tree
from tailorfl.training.gradients import Direction, Gradient

ALIKE = 0.9
"""A larger cosine counts as 1."""


@register
class PFedGraph(OwnModel):
    """Every client starts from a mixture of models with updates in similar directions, and is pulled to them."""

    fixed_clients = "its server keeps the model of every client"
    name = "pfedgraph"
    title = "pFedGraph"
    paper = "Ye et al., ICML 2023"
    family = "mixture"
    use = "a graph of who helps whom, learnt at the server"
    grid = {"alpha": (0.1, 0.4, 0.8, 1.6), "lam": (0.0, 0.001, 0.01, 0.1)}
    special_cases = [
        to_local("with a single round, before which there is no graph,", rounds=1),
        to_local("with λ = 0 and one client a round", lam=0, cohort=1, participation="sampled"),
    ]
    has_global = False
    personal_receives = False
    lam: float = Field(
        0.01, ge=0, description="λ: pull of a model's direction towards those it is mixed with"
    )
    alpha: float = Field(0.8, gt=0, description="α: pull of the graph towards the clients' weights")
    variant: Literal["exact", "approximate"] = Field(
        "exact", description="pull along g_i, or along the mixture itself, which saves sending g_i"
    )
    measure: Literal["all", "head"] = Field("all", description="the part that the cosines and the pull use")
    released: bool = Field(False, description="the sign of the official code, which pushes models apart")

    def server_state(self, ctx: Context) -> TensorDict:
        names = ctx.split.trainable if self.measure == "all" else ctx.model.split("head").personal
        origin = ctx.init.select(*(n for n in names if n in ctx.split.trainable))
        pulls, models = copies(origin * 0, ctx.num_clients), copies(ctx.init, ctx.num_clients)
        return TensorDict({"models": models, "pulls": pulls, "origin": origin, "mean": ctx.init})

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> PerClient:
        rows = torch.tensor(clients)
        payload = {"model": chosen(server["models"], rows)}
        if self.variant == "exact":
            payload["pull"] = chosen(server["pulls"], rows)
        return PerClient(TensorDict(payload, batch_size=[len(clients)]))

    def welcome(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        payload = {"model": server["mean"]}
        if self.variant == "exact":
            payload["pull"] = server["origin"] * 0.0
        return TensorDict(payload)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        u = received["model"]
        if self.lam == 0 or client.round == 0:
            w = client.fit(u)
        elif self.variant == "exact":
            w = client.fit(u, direction=self.pulled(), given=(received["pull"],))
        else:
            part = client.parameters(u)
            if self.measure == "head":
                part = part.select(*(n for n in client.select("head") if n in tree.tensors(part)))
            w = client.fit(u, direction=self.pulled(), given=(part / tree.norm(part),))
        return w, TensorDict({"model": w})

    def pulled(self) -> Direction:
        """Return the direction ∇F(w) − λ ∇⟨g, w⟩/‖w‖, or with the sign of the official code."""
        step = -self.lam if self.released else self.lam

        def direction(w: TensorDict, grad: Gradient, g: TensorDict) -> TensorDict:
            slope = grad(w)
            names = tuple(tree.tensors(g))
            return tree.merge(slope, slope.select(*names) - turn(w.select(*names), g) * step)

        return direction

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        stack, rows = TensorDict(tree.tensors(replies.stack["model"])), torch.tensor(replies.clients)
        measured = stack.select(*server["origin"].keys())
        moved = {n: t - server["origin"][n] for n, t in tree.tensors(measured).items()}
        everyone = torch.arange(len(rows))
        graph = collaboration(cosines(TensorDict(moved), everyone), replies.weights(), self.alpha)
        squares = [t.double().square().reshape(len(rows), -1).sum(1) for t in tree.tensors(measured).values()]
        size = torch.stack(squares).sum(0).sqrt()
        mixtures = {"models": mixed(stack, graph), "pulls": mixed(measured, graph / size.clamp(min=1e-12))}
        new = {part: replaced(server[part], rows, stack) for part, stack in mixtures.items()}
        mean = tree.weighted_mean(stack, torch.full((len(rows),), 1 / len(rows), dtype=torch.float64))
        return TensorDict({**dict(server.items()), **new, "mean": mean})

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        return received.select("model")

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        model: TensorDict = received["model"]
        return model


def collaboration(cosine: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Return the graph a [m, m] float64 from cosines of updates [m, m] and p [m]; rows are on the simplex."""
    near = torch.where(cosine > ALIKE, 1.0, cosine)
    return torch.stack([on_simplex(weights + row / (2 * alpha)) for row in near])


def turn(w: TensorDict, g: TensorDict) -> TensorDict:
    """Return ∇_w ⟨g, w⟩/‖w‖, which is orthogonal to w."""
    size = tree.norm(w)
    return g / size - w * (tree.dot(g, w) / size**3)


def chosen(table: TensorDict, rows: Tensor) -> TensorDict:
    """Return rows of a table."""
    return TensorDict({n: t[rows] for n, t in tree.tensors(table).items()}, batch_size=[len(rows)])
