"""GPFL (Zhang et al., ICCV 2023).

"GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized Federated Learning."

    shared class embeddings guide one copy of the features; the personal task uses another copy
    cov(z, u) = relu(z ⊙ (1 + γ(u)) + β(u)),   V = (γ, β), each Linear, ReLU, LayerNorm

    server sends φ, E, V;   E⁰ is the E that was received
    client i:  g = mean_c E⁰_c,   q_i = Σ_c π_{i,c} E⁰_c                          fixed in the round
               (φ, h_i, E, V) by SGD on
                   CE(h_i(cov(z, q_i)), y) + CE(cos(cov(z, g), E), y) + λ ‖Z_g − E⁰_y‖_F + (μ/2) (‖E‖² + ‖V‖²)
               Z_g the rows cov(z, g) of the batch, E⁰_y those of its classes      keeps h_i, sends φ, E, V
    server:    the mean of each           deployed: h_i(cov(z, q_i)), q_i from the last mean of E

The norm is not squared and covers the whole batch, as in the official code, so it depends on the batch size and
combines samples: sample-level privacy refuses it. Cosines have no temperature. μ is the official code's weight decay of
only E and V, in addition to `train.weight_decay` of everything; as a part of the loss it is clipped with it. That code
takes g and q_i of the client's OWN trained E, since it reads E before it copies the received one; they are 0 before a
client has trained: `conditions` = released. A newcomer has the initial h and the q of its own classes.

| symbol | here |
|---|---|
| φ, E, V | server state; in the head `embeddings`, `conditioning` |
| h_i | client state `head` (and, released, the E it trained last: `embeddings`) |
| q_i | `condition` of the head, computed from π_i and E whenever it is needed |
| λ, μ | `lam`, `mu` (official code: 0.01 and 0.1 for a small CNN, 1e-4 and 0 for a ResNet-18) |
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.method import register
from tailorfl.core.reduction import exposure
from tailorfl.methods.bases import ServerModel
from tailorfl.methods.class_features import classes_only, trained_head
from tailorfl.models.functional import Model
from tailorfl.models.layers import replace_head
from tailorfl.models.split import Split
from tailorfl.training import tree
from tailorfl.training.objective import Seen, Term

OWN = ("weight", "bias", "condition")
"""Names of the head's own tensors: W, c and u."""


@register
class GPFL(ServerModel):
    """Shared class embeddings guide the body; the personal head sees features conditioned on the client's classes."""

    name = "gpfl"
    title = "GPFL"
    paper = "Zhang et al., ICCV 2023"
    family = "parts"
    use = "label skew: personal and shared features, guided by class embeddings"
    grid = {"lam": (0.0001, 0.01, 0.1), "mu": (0.0, 0.1, 0.3, 1.0)}
    exposures = [exposure("the share of each class among a client's samples", "sample")]
    has_global = False
    lam: float = Field(0.01, ge=0, description="λ: pull of guided features to the embeddings of their class")
    mu: float = Field(
        0.3, ge=0, description="μ: weight decay of embeddings and conditioning (official code: 0.1 or 0)"
    )
    conditions: Literal["received", "released"] = Field(
        "received",
        description="embeddings that the conditions are made from; released: the client's last ones, as in the code",
    )

    def wrap(self, model: Model) -> Model:
        return model.changed(add_condition)

    def make_split(self, model: Model) -> Split:
        return model.split(is_own)

    def server_state(self, ctx: Context) -> TensorDict:
        classes_only(ctx, self.title)
        trained_head(ctx, self.title)
        return ctx.split.select_shared(ctx.init)

    def client_state(self, ctx: Context) -> TensorDict:
        personal = ctx.split.select_personal(ctx.init)
        head = personal.select(*(n for n in ctx.split.personal if n in ctx.split.trainable))
        if self.conditions == "received":
            return TensorDict({"head": head})
        shared = ctx.split.select_shared(ctx.init)
        return TensorDict({"head": head, "embeddings": shared[embeddings_of(shared)] * 0.0})

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        name = embeddings_of(received)
        g = self.embeddings(state, received).mean(0)
        guide = partial(guided, name=name, lam=self.lam, mu=self.mu)
        term = Term(guide, given=(g, received[name]), mixes=True)
        trained = client.fit(self.personal(client, state, received), term=term)
        new = {"head": trained.select(*state["head"].keys())}
        if self.conditions == "released":
            new["embeddings"] = trained[name]
        return TensorDict(new), trained.select(*received.keys())

    def embeddings(self, state: TensorDict, received: TensorDict) -> Tensor:
        """Return the embeddings from which conditions are computed, [C, d_z]."""
        of_client = self.conditions == "released"
        embeddings: Tensor = state["embeddings"] if of_client else received[embeddings_of(received)]
        return embeddings

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        counts, embeddings = client.class_counts(), self.embeddings(state, received)
        share = counts / counts.sum().clamp(min=1)
        condition = embeddings_of(received).removesuffix("embeddings") + "condition"
        return tree.merge(tree.merge(received, state["head"]), TensorDict({condition: share @ embeddings}))


def guided(batch: Seen, g: Tensor, received: Tensor, name: str, lam: float, mu: float) -> Tensor:
    """Return CE(cos(cov(z, g), E), y) + λ ‖Z_g − E⁰_y‖_F + (μ/2) (‖E‖² + ‖V‖²); `name` is that of E."""
    embeddings, layer = batch.state[name], name.removesuffix("embeddings") + "conditioning"
    z = batch.through(layer, batch.features, g)
    cosines = normalize(z, dim=1) @ normalize(embeddings, dim=1).T
    gap = z - received[batch.y]
    if batch.weight is not None:
        gap = gap * batch.weight.to(gap.dtype)[:, None]
    decayed = [t for n, t in batch.state.items() if n == name or n.startswith(f"{layer}.")]
    decay = torch.stack([t.square().sum() for t in decayed]).sum()
    classes = batch.mean(cross_entropy(cosines, batch.y, reduction="none"))
    # The gradient of this norm is 0 at 0.
    gap_norm: Tensor = torch.linalg.vector_norm(gap)
    return classes + lam * gap_norm + mu / 2 * decay


def embeddings_of(shared: TensorDict) -> str:
    """Return the name of E among the shared tensors."""
    (name,) = [n for n in map(str, shared.keys()) if n.rpartition(".")[2] == "embeddings"]
    return name


class Conditioning(nn.Module):
    """Features changed by a vector: relu(z ⊙ (1 + γ(u)) + β(u)), γ and β each Linear, ReLU, LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))
        self.shift = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        """Features [..., width] and a vector [width] -> features [..., width]."""
        row = u[None]
        return torch.relu(z * (1 + self.scale(row)[0]) + self.shift(row)[0])


class ConditionalHead(nn.Module):
    """A linear head on features that its vector `condition` changes first; it also has a vector for every class.

    y = W relu(z ⊙ (1 + γ(u)) + β(u)) + c
    """

    condition: Tensor

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self.conditioning = Conditioning(head.in_features)
        self.embeddings = nn.Parameter(torch.randn_like(head.weight))
        self.register_buffer("condition", torch.zeros_like(head.weight[0]).detach())

    def forward(self, z: Tensor) -> Tensor:
        """Features [..., width] -> outputs [..., classes]."""
        return linear(self.conditioning(z, self.condition), self.weight, self.bias)


def add_condition(module: nn.Module) -> None:
    """Turn the head of a network into a `ConditionalHead` with its weights and u = 0; in place.

    Raises:
        ModelError: the head is not an ordinary linear layer inside a network.
    """
    replace_head(module, ConditionalHead, "conditioning needs")


def is_own(name: str, tensor: Tensor, module: nn.Module) -> bool:
    """Whether a tensor is the weight, the bias or the vector of such a head; a selector."""
    return isinstance(module, ConditionalHead) and name.rpartition(".")[2] in OWN
