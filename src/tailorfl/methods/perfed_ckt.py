"""PerFed-CKT (Cho et al., arXiv 2109.08119, 2021).

"Personalized Federated Learning for Heterogeneous Clients with Clustered Knowledge Transfer." Clients of any
architecture exchange class probabilities on a public set P, never weights.

    min over w_k:  F_k(w_k) + (λ/|P|) Σ_{x in P} ‖s̄_k(x) − s(w_k, x)‖²,    s(w, x) = softmax of the model's outputs

    server sends the centroids of the last round, c of them, each |P|×C
    client k:  s_k = s(w_k, P);   s̄_k = the centroid nearest to s_k (squared Frobenius norm)
               w_k = LocalSGD(w_k, E), each step on a private batch and a public one of b' samples:
                     w ← w − η (∇F + (2λ/b') Σ_x Jᵀ(s − s̄_k));   sends the new s_k
    server:    k-means on the |P|·C numbers of each s_k;   a centroid is the mean of its members

The paper calls s "logits", but defines it on the simplex, so here s are probabilities. Its run begins with an upload of
m clients' initial predictions. Here clients first train alone for a round and then upload: T + 1 rounds send as much as
that upload and T rounds. `first_round` = upload is the paper's order: in the first of T + 1 rounds the sampled clients
upload and do not train, so that all training is with distillation. Models that have learned little predict alike, and
the first centroids pull all clients there: in `warm_rounds` before this, clients train alone and send nothing.

Settings of the paper that belong to the run: `train.lr=0.001`, `train.batch_size=64`, `train.steps=50` (τ), 2000 public
samples, and clients sampled without replacement with probabilities p_k = n_k / Σ n (`sampling=proportional`).

k-means: k-means++, ten restarts, an emptied cluster is moved to the farthest point; there are at most as many clusters
as distinct predictions. So clients that all have the same start (`own_init=false`) have one centroid at first.

| symbol | here |
|---|---|
| w_k | client state, of the client's own architecture |
| s̄, c | server state `centroids`, `clusters` |
| λ, b' | `lam`, `public_batch` |
| rounds before the first upload | `warm_rounds` |
| τ or E, η, b | the run's training settings |
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import Reduction, RunSetup
from tailorfl.errors import ConfigError
from tailorfl.methods.bases import OwnModel
from tailorfl.training import tree
from tailorfl.training.keys import torch_seed
from tailorfl.training.objective import Seen, Term

RESTARTS = 10


@register
class PerFedCKT(OwnModel):
    """Personal models of any architecture, each distilled towards the mean predictions of similar clients."""

    name = "perfed_ckt"
    title = "PerFed-CKT"
    paper = "Cho et al., 2021"
    family = "knowledge"
    use = "different networks: predictions on public data, in groups"
    grid = {"lam": (0.05, 0.1, 0.5, 1.0, 2.0, 4.0), "clusters": (1, 2, 3, 4)}
    has_global = False
    personal_receives = False
    heterogeneous = True
    clusters: int = Field(2, ge=1, description="c: centroids a round, at most as many as clients are sampled")
    lam: float = Field(2.0, ge=0, description="λ: strength of the pull towards the nearest centroid")
    public_batch: int = Field(128, ge=1, description="b': public samples a step")
    own_init: bool = Field(True, description="every client draws its own initial model")
    first_round: Literal["train", "upload"] = Field(
        "train", description="clients train alone in it before they upload, or only upload, as in the paper"
    )
    warm_rounds: int = Field(
        0, ge=0, description="rounds before the first one, in which clients train alone and send nothing"
    )

    @property
    def needs_public(self) -> bool:
        return True

    @property
    def individual_start(self) -> bool:
        return self.own_init

    def server_state(self, ctx: Context) -> TensorDict:
        if ctx.task != "classification":
            raise ConfigError(
                f"{self.title} exchanges probabilities of two or more classes (a softmax), which a task of {ctx.task} "
                "does not have"
            )
        assert ctx.public is not None  # `needs_public` ensures it
        outputs = ctx.model(ctx.init, ctx.public.take(torch.zeros(1, dtype=torch.int64)))
        return TensorDict({"centroids": torch.zeros(0, len(ctx.public), outputs.shape[-1])})

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return server

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        if client.round < self.warm_rounds:
            return client.fit(state), tree.empty()
        centroids = received["centroids"]
        public: tuple[Term, ...] = ()
        if len(centroids):
            targets = nearest(centroids, predictions(client, state))
            public = towards(self.lam, targets, self.public_batch)
        if client.round > self.warm_rounds or self.first_round == "train":
            state = client.fit(state, term=public)
        return state, TensorDict({"predictions": predictions(client, state)})

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        if replies.round < self.warm_rounds:
            return server
        s = replies.stack["predictions"]
        seed = torch_seed(replies.context.seed, "k-means", replies.round)
        centroids = cluster(s.flatten(1), replies.weights(), self.clusters, seed)[1]
        return TensorDict({"centroids": centroids.reshape(-1, *s.shape[1:])})

    def reductions(self, run: RunSetup) -> tuple[Reduction, ...]:
        first = self.warm_rounds + 1
        uploads = self.first_round == "upload" and run.rounds >= first
        if uploads and run.rounds == 1:
            return (Reduction("with a single round, in which clients only upload,", "personal"),)
        if self.lam == 0 or run.rounds <= first:
            because = "with λ = 0" if self.lam == 0 else _before_any_pull(run.rounds, self.warm_rounds)
            if not uploads:
                return (
                    replace(Reduction.local(because), options={"own_init": True} if self.own_init else {}),
                )
            start = " from initial models of the clients' own" if self.own_init else ""
            trains = f"in all rounds but round {first}" if self.warm_rounds else "from the second round on"
            remark = f"is LocalTrain{start} {trains}"
        elif self.clusters == 1:
            because, remark = "with c = 1", "distils towards the mean of all clients, without clusters"
        elif self.clusters >= run.cohort:
            because = f"with c = {self.clusters} and {run.cohort} clients a round"
            remark = "has every client of a round as a cluster of its own"
        else:
            return ()
        return (Reduction(because, "personal", remark=remark),)


def _before_any_pull(rounds: int, warm: int) -> str:
    """Return why nothing pulls in a run of this many rounds, all before there are centroids."""
    if rounds == 1:
        return "with a single round, before which nobody has uploaded,"
    return f"in {rounds} rounds, of which the first {warm} are warm ones,"


def predictions(client: Client, state: TensorDict) -> Tensor:
    """Return the class probabilities s of a model on the public set, [P, C]."""
    return client.predict_public(state).softmax(-1)


def towards(lam: float, targets: Tensor, batch: int) -> tuple[Term, ...]:
    """Return the term λ · the mean of ‖s(w, x) − target(x)‖² over `batch` public samples a step; none for λ = 0.

    `targets` [P, C]: class probabilities of every public sample.
    """

    def pull(batch: Seen, targets: Tensor) -> Tensor:
        predictions, target = batch.outputs.softmax(-1), targets[batch.rows]
        return lam * (predictions - target).square().sum(-1).mean()

    return (Term(pull, given=(targets,), public=batch),) if lam > 0 else ()


def nearest(centroids: Tensor, s: Tensor) -> Tensor:
    """Return the one of `centroids` [c, P, C] that is nearest to `s` [P, C], the first of equals."""
    best = (centroids - s).square().sum((1, 2)).argmin()
    return centroids.index_select(0, best[None])[0]


def cluster(vectors: Tensor, weights: Tensor, clusters: int, seed: int) -> tuple[NDArray[Any], Tensor]:
    """Return (the cluster of every client, int [clients]; centroids [c', numbers]) by k-means.

    There are fewer than `clusters` if there are fewer distinct vectors; no cluster is empty.

    Args:
        vectors: [clients, numbers].
        weights: [clients] positive weights in the k-means objective and in the centroids.
        clusters: c.
        seed: seed of the k-means++ starts.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    points = vectors.double().numpy()
    distinct = len({row.tobytes() for row in points})
    kmeans = KMeans(min(clusters, distinct), n_init=RESTARTS, random_state=seed % 2**32)
    with warnings.catch_warnings():
        # Vectors that differ by less than rounding end in one cluster: fewer centroids, as for equal ones.
        warnings.simplefilter("ignore", ConvergenceWarning)
        assigned = kmeans.fit_predict(points, sample_weight=weights.numpy() * len(weights))
    labels = np.unique(assigned, return_inverse=True)[1]
    # Means of the members, not the centres at which k-means stopped, which differ from them by its tolerance.
    member = torch.nn.functional.one_hot(torch.from_numpy(labels)).double() * weights[:, None]
    return labels, ((member / member.sum(0)).T @ vectors.double()).to(vectors.dtype)
