"""Ditto (Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021).

    min over v_i:  F_i(v_i) + (λ/2)‖v_i − w*‖²,   w* the FedAvg solution, blind to the personal models

    server sends w
    client i:  θ = LocalSGD(w, E);   v_i = LocalSGD(v_i, E_p, prox (λ, w));   sends θ − w
    server:    w = w + mean_S (θ − w)

The anchor is the RECEIVED w. The official code interleaves one θ step and one v step on the same batch; both
trainings here see the same batches, and as they do not interact the result is the same.

| symbol | here |
|---|---|
| v_i | client state |
| w | server state |
| λ | `lam` |
| E_p | `personal_epochs` (default: E) |

With `dynamic_lam` every client tries several λ each round and keeps the personal model with the lowest validation loss.
The official code chooses at every step; a round is the unit here, since the choice must not see test data and the
validation part of a client is small.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from tensordict import TensorDict

from tailorfl.core import tree
from tailorfl.core.client import Client
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.privacy import Level
from tailorfl.methods.bases import TwoModels


@register
class Ditto(TwoModels):
    """FedAvg and, beside it, a personal model on each client that is pulled towards it."""

    name: ClassVar[str] = "ditto"
    title: ClassVar[str] = "Ditto"
    paper: ClassVar[str] = "Li et al., ICML 2021"
    models_trained: ClassVar[int] = 2
    lam: float = Field(
        1.0, ge=0, description="λ: pull of the personal model towards the received global model"
    )
    dynamic_lam: tuple[float, ...] = Field(
        (),
        description="choose λ among these by validation loss, on every client in every round; empty: use lam",
    )
    personal_epochs: int | None = Field(
        None, ge=0, description="epochs of personal training; default as local training"
    )

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        v, w = state, received
        theta = client.fit(w)
        candidates = [
            client.fit(v, prox=(lam, w), epochs=self.personal_epochs)
            for lam in self.dynamic_lam or (self.lam,)
        ]
        return best_of(client, candidates), theta - w

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        return tree.empty()

    def unprotected(self, level: Level) -> str:
        looks = level == "sample" and len(self.dynamic_lam) > 1
        return "the validation losses by which a client chooses λ (dynamic_lam)" if looks else ""

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return server + replies.mean()


def best_of(client: Client, models: list[TensorDict]) -> TensorDict:
    """Returns the model with the lowest loss on the client's validation part, the first of equals."""
    best, lowest = models[0], None
    for model in models[1:]:
        lowest = client.loss(best, "val") if lowest is None else lowest
        loss = client.loss(model, "val")
        better = loss < lowest
        kept = {n: torch.where(better, t, best.get(n)) for n, t in tree.tensors(model).items()}
        best = TensorDict(kept, batch_size=[])
        lowest = torch.minimum(loss, lowest)
    return best
