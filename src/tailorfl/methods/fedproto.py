"""Clients that share the mean features of classes: FedProto averages these prototypes, FedTGP trains them to be apart.

FedProto: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022.
FedTGP: Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data
and Model Heterogeneity in Federated Learning", AAAI 2024.

    min over θ_i:  F_i(θ_i) + λ · MSE(z, P̄_y),   z the features of a sample, y its class: no weights are sent

    server sends P̄
    client i:  θ_i = LocalSGD(θ_i, E) on  CE + λ/(B d_z) Σ_b ‖z_b − P̄_{y_b}‖²
               P_{i,c} = mean of z over its samples of class c              sends P_{i,c} of the classes it has
    server:    P̄_c = Σ a_i P_{i,c} / Σ a_i  over the clients that sent class c;  without any: as before

    FedTGP: FedProto with prototypes P̂ instead of P̄, which the server trains to be apart from each other

    server:    Q_c = Σ a_i P_{i,c} / Σ a_i over the clients that sent class c
               gap_c = min_{c' ≠ c} ‖Q_c − Q_c'‖, for a class that was not sent the smallest;  δ = min(max_c gap_c, τ)
               S epochs of SGD over the pairs (P_{i,c}, c) on  CE( −(‖P − P̂_k‖ + δ 1[k = c])_k , c )
               P̂_c = L₂ relu(L₁ e_c)                       learned: e_c, L₁, L₂ (with biases)
                                                           deployed: argmin_c ‖z − P̂_c‖

FedProto: Samples of a class without P̄ add nothing to the sum but count in B, so clients train alone in the first round.
With uniform weights P̄ is the official code's plain mean; the paper's equation weights by samples and divides by the
number of clients again. The code averages features seen during the last epoch, while the weights change; here they are
computed after it, in evaluation mode. A client deploys its network with the head it trained; or, with `predict` =
prototype, it answers by the nearest P̄_c among the classes that it has samples of: argmin ‖z − P̄_c‖² =
argmax 2⟨P̄_c, z⟩ − ‖P̄_c‖², which is also a linear head.

FedTGP: P̂ has all classes. It exists after the first round; until then clients train without it and answer by the head
that they train. The server's optimizer starts afresh in every round. If there is only one class, δ = τ. Only δ depends
on the run's a_i; the official code weights clients equally in Q_c: `weights` = uniform. A distance is at least 1e-6,
where the official code's is NaN.

Clients may have networks of different architectures, as long as their features have the same width.

| symbol | here |
|---|---|
| θ_i, of the client's own architecture | client state |
| P̄ or P̂ [C, d_z], which classes have one | server state `prototypes`, `present`: only these rows are sent |
| λ | `lam` |
| e, L₁, L₂ of FedTGP | server state `made_from` |
| τ | `tau` |
| S, its rate and batch | `server_passes`, `server_lr`, `server_batch` |
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import PRESENT, Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import exposure, to_local
from tailorfl.methods.class_features import class_means, near, nearest_head, no_prototypes, shared_prototypes
from tailorfl.training.keys import generator, torch_seed
from tailorfl.training.objective import Term

NEAREST = 1e-12
"""Squared distances are taken to be at least this, so that their root has a gradient."""


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
        to_local("with a single round, before which there are no prototypes,", predict="head", rounds=1),
    ]
    exposures = [
        exposure("the class means of features, and which classes a client has, which it sends as they are")
    ]
    has_global = False
    heterogeneous = True
    lam: float = Field(1.0, ge=0, description="λ: pull of the features towards the prototype of their class")
    predict: Literal["head", "prototype"] = Field(
        "head", description="prototype: predict by the nearest prototype of the client's own classes"
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
        # Before there are prototypes, it is the trained head.
        return nearest_head(client, state, received["prototypes"], among)


@register
class FedTGP(FedProto):
    """FedProto with prototypes that the server trains to be apart from each other."""

    name = "fedtgp"
    title = "FedTGP"
    paper = "Zhang et al., AAAI 2024"
    use = "different networks: prototypes kept apart at the server"
    grid = {"lam": (0.1, 1.0, 10.0), "server_passes": (10, 100), "server_lr": (0.01, 0.1)}
    lam: float = Field(10.0, ge=0, description="λ: pull of the features towards the prototype of their class")
    predict: Literal["head", "prototype"] = Field(
        "prototype", description="predict by the nearest prototype of all classes, or by the client's head"
    )
    tau: float = Field(100.0, ge=0, description="τ: largest margin δ between classes")
    server_passes: int = Field(100, ge=0, description="S: the server's passes over a round's class means")
    server_lr: float = Field(0.01, gt=0, description="rate of the server's SGD")
    server_batch: int = Field(10, ge=1, description="class means per step of the server")

    def server_state(self, ctx: Context) -> TensorDict:
        start = super().server_state(ctx)
        return TensorDict({**dict(start.items()), "made_from": TensorDict(drawn(ctx, start["prototypes"]))})

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return server.select("prototypes", PRESENT)

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        means, present = replies.stack["prototypes"], replies.stack[PRESENT]
        weights = replies.weights().to(means.dtype)[:, None] * present
        margin = self.margin(shared_prototypes(server, means, weights)["prototypes"][present.any(0)])
        labels = present.nonzero()[:, 1]
        network = {n: t.clone().requires_grad_() for n, t in server["made_from"].items()}
        optimizer = torch.optim.SGD(network.values(), self.server_lr)
        for batch in self.batches(len(labels), replies):
            loss = apart(means[present][batch], labels[batch], made(network), margin)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        network = {n: t.detach() for n, t in network.items()}
        prototypes = {"prototypes": made(network), PRESENT: torch.ones_like(server[PRESENT])}
        return TensorDict({**prototypes, "made_from": TensorDict(network)})

    def margin(self, prototypes: Tensor) -> float:
        """Return δ, from the mean prototypes [classes that were sent, d_z]."""
        distances = torch.cdist(prototypes, prototypes).fill_diagonal_(torch.inf)
        gaps = distances.amin(1) if len(prototypes) > 1 else distances.new_tensor([torch.inf])
        return min(float(gaps.max()), self.tau)

    def batches(self, pairs: int, replies: Replies) -> list[Tensor]:
        """Return the pairs of each step of the server: S passes, each in a new random order."""
        rng = generator(replies.context.seed, "prototypes", replies.round)
        orders = [
            torch.from_numpy(rng.permutation(pairs).astype(np.int64)) for _ in range(self.server_passes)
        ]
        return [batch for order in orders for batch in torch.split(order, self.server_batch) if len(batch)]

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        if self.predict == "head":
            return state
        return nearest_head(client, state, received["prototypes"], received[PRESENT])


def drawn(ctx: Context, like: Tensor) -> dict[str, Tensor]:
    """Return embeddings and two layers as torch draws them from a run's seed, for prototypes `like` [C, d_z]."""
    classes, width = like.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(ctx.seed, "trainable prototypes"))
        layers = {
            "embedding": nn.Embedding(classes, width),
            "first": nn.Linear(width, width),
            "second": nn.Linear(width, width),
        }
    return {
        name if part == "weight" else f"{name}_{part}": tensor.detach().to(like)
        for name, layer in layers.items()
        for part, tensor in layer.named_parameters()
    }


def made(network: dict[str, Tensor]) -> Tensor:
    """Return P̂ [C, d_z] = L₂ relu(L₁ e)."""
    hidden = nn.functional.linear(network["embedding"], network["first"], network["first_bias"]).relu()
    return nn.functional.linear(hidden, network["second"], network["second_bias"])


def apart(means: Tensor, labels: Tensor, prototypes: Tensor, margin: float) -> Tensor:
    """Return the mean cross entropy of negative distances, with `margin` added to that of a mean's own class, 0-d."""
    square = (means[:, None] - prototypes[None]).square().sum(-1)
    own_distance = nn.functional.one_hot(labels, len(prototypes)) * margin
    return nn.functional.cross_entropy(-(square.clamp(min=NEAREST).sqrt() + own_distance), labels)
