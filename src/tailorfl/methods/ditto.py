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
| E_p | `personal_epochs`, or so many steps: `personal_steps` (default: E) |

With `dynamic_lam` every client tries several λ each round and keeps the personal model with the lowest validation loss.
The official code chooses at every step, `dynamic_every = step`: each λ takes one step of plain SGD from v_i (no
momentum, weight decay or schedule), and the best of them is where the next step starts. That looks at the validation
part as often as there are steps, which a small one does not stand; the default is once a round.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import Facts, Reduction, length, none, to_local, untrained
from tailorfl.methods.bases import TwoModels
from tailorfl.settings.privacy import PrivacyLevel
from tailorfl.training import tree
from tailorfl.training.plan import Length
from tailorfl.training.update import PLAIN, Optimizer


@register
class Ditto(TwoModels):
    """FedAvg and, beside it, a personal model on each client that is pulled towards it."""

    name = "ditto"
    title = "Ditto"
    paper = "Li et al., ICML 2021"
    family = "two models"
    use = "own model beside FedAvg's, any kind of difference"
    grid = {"lam": (0.1, 0.75, 1.0, 2.0)}
    models_trained = 2
    lam: float = Field(
        1.0, ge=0, description="λ: pull of the personal model towards the received global model"
    )
    dynamic_lam: tuple[float, ...] = Field(
        (),
        description="choose λ among these by validation loss, on every client in every round; empty: use lam",
    )
    dynamic_every: Literal["round", "step"] = Field(
        "round", description="how often λ is chosen; step is the official code's, with plain SGD"
    )
    personal_epochs: int | None = Field(
        None, ge=0, description="epochs of personal training; default as local training"
    )
    personal_steps: int | None = Field(None, ge=0, description="steps in place of personal_epochs")

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        v, w = state, received
        theta = client.fit(w)
        if self.dynamic_every == "step":
            return self.stepwise(client, v, w), theta - w
        candidates = [
            client.fit(
                v, prox=(lam, w), length=Length(epochs=self.personal_epochs, steps=self.personal_steps)
            )
            for lam in self.dynamic_lam or (self.lam,)
        ]
        return best_of(client, candidates), theta - w

    def stepwise(self, client: Client, v: TensorDict, w: TensorDict) -> TensorDict:
        """Returns v_i after as many steps as its training has, each with the λ whose step validates best."""
        whole = Length(self.personal_epochs, self.personal_steps)
        own, reported = client.steps(whole), dict(client.metrics)
        for number in range(client.most_steps(whole)):
            # The batch of this number, whichever λ: what the whole training would take.
            moved = [
                client.fit(v, prox=(c, w), length=Length(steps=1, first=number), optimizer=Optimizer.plain())
                for c in self.dynamic_lam
            ]
            best, goes_on = best_of(client, moved), number < own
            kept = {n: torch.where(goes_on, best.get(n), t) for n, t in tree.tensors(v).items()}
            v = TensorDict(kept)
        client.metrics = reported  # the loss of one step is not the loss of a training
        return v

    @model_validator(mode="after")
    def _something_to_choose_from(self) -> Self:
        if self.dynamic_every == "step" and not self.dynamic_lam:
            raise ValueError(
                "dynamic_every = step chooses among dynamic_lam, which is empty; such as [0.1, 1, 2]"
            )
        return self

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        return tree.empty()

    def unprotected(self, level: PrivacyLevel) -> str:
        looks = level == "sample" and len(self.dynamic_lam) > 1
        return "the validation losses by which a client chooses λ (dynamic_lam)" if looks else ""

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return server + replies.mean()

    def reductions(self, facts: Facts) -> tuple[Reduction, ...]:
        if none(self.personal_epochs, self.personal_steps):
            return (untrained("without personal epochs", "personal"),)
        if any(self.dynamic_lam or (self.lam,)):
            return ()
        train = {
            **length(self.personal_epochs, self.personal_steps),
            **(dict(PLAIN) if self.dynamic_every == "step" else {}),
        }
        return (to_local("with λ = 0", **train),)


def best_of(client: Client, models: list[TensorDict]) -> TensorDict:
    """Returns the model with the lowest loss on the client's validation part, the first of equals."""
    best, lowest = models[0], None
    for model in models[1:]:
        lowest = client.loss(best, "val") if lowest is None else lowest
        loss = client.loss(model, "val")
        better = loss < lowest
        kept = {n: torch.where(better, t, best.get(n)) for n, t in tree.tensors(model).items()}
        best = TensorDict(kept)
        lowest = torch.minimum(loss, lowest)
    return best
