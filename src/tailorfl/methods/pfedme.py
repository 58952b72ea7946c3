"""pFedMe (T. Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020).

    min over w:  (1/N) Σ_i min over θ_i [ F_i(θ_i) + (λ/2)‖θ_i − w‖² ]

    server sends w
    client i:  w_i = w;  θ = w;   R times: draw ONE batch; K steps on it: θ = θ − η_p (∇F_i(θ) + λ(θ − w_i));
                                           w_i = w_i − η λ (w_i − θ)
               keeps θ as its personal model, sends w_i
    server:    w = (1 − β) w + β Σ_S a_i w_i

θ is warm-started across the R repetitions, as in the official code. The run's optimizer takes its steps, and starts
afresh on every batch. That code evaluates as the personal model not θ but w_i after the last repetition: `keep: w`.

With `personal_epochs` (or `personal_steps`) a client instead trains its θ of the previous round for that long with
the same penalty and then takes one step of w, like the baseline of the same name in FedOA (2025), whose step
φ − 2λη(φ − φ_e) is `lr` = 2η. The released code of that baseline has a pull without gradient, which is `lam` = 0.

The official code's settings are `{lam: 15, local_rounds: 20, lr: 0.005, personal_lr: 0.09}`; they need η_p λ < 2, which
a learning rate of 0.2 violates, and 100 gradients a round. The defaults here are stable up to a rate of 1 and take 25.

| symbol | here |
|---|---|
| λ | `lam` |
| K, R | `inner_steps`, `local_rounds` |
| η, η_p | `lr`, `personal_lr` (default: the run's learning rate), times the factor of `train.round_schedule` |
| β | `beta` |
| θ_i, or w_i with `keep: w` | client state |
"""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import Reduction, RunSetup, as_settings
from tailorfl.methods.bases import TwoModels
from tailorfl.training import tree
from tailorfl.training.plan import Length
from tailorfl.training.update import PLAIN, Optimizer


@register
class PFedMe(TwoModels):
    """Personal models as proximal points of a global model."""

    name = "pfedme"
    title = "pFedMe"
    paper = "T. Dinh et al., NeurIPS 2020"
    family = "two models"
    use = "a personal model near a shared one, with several inner steps"
    grid = {"lam": (0.1, 1.0, 15.0), "lr": (0.005, 0.05, 0.5), "inner_steps": (3, 5)}
    models_trained = 2
    lam: float = Field(
        1.0, ge=0, description="λ: pull of the personal model towards the local copy of the global one"
    )
    inner_steps: int = Field(5, ge=1, description="K: steps on each batch")
    local_rounds: int = Field(5, ge=1, description="R: batches per round")
    lr: float = Field(0.5, gt=0, description="η: step of the local copy of the global model")
    personal_lr: float | None = Field(
        None, gt=0, description="η_p: step of the personal model; default the run's lr"
    )
    inner_wd: float = Field(
        0.0,
        ge=0,
        description="shrinkage of θ in the inner step, in addition to weight decay (the official code uses 1e-3)",
    )
    personal_epochs: int | None = Field(
        None, ge=1, description="epochs of training θ before one step of w, instead of K and R"
    )
    personal_steps: int | None = Field(None, ge=1, description="steps instead of personal_epochs")
    beta: float = Field(1.0, ge=0, le=2, description="β: server step")
    keep: Literal["theta", "w"] = Field(
        "theta",
        description="the personal model: θ_i, as in the paper, or w_i, as the official code evaluates it",
    )

    @model_validator(mode="after")
    def _theta_goes_on(self) -> Self:
        if self.keep == "w" and self.trains_on:
            raise ValueError(
                "keep = w needs inner steps; with personal_epochs or personal_steps, θ continues from the last round"
            )
        return self

    @property
    def trains_on(self) -> bool:
        """Return whether θ continues from the last round, for `personal_epochs` or `personal_steps`."""
        return self.personal_epochs is not None or self.personal_steps is not None

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        w = theta = received
        decay = client.config.weight_decay + self.inner_wd
        if self.trains_on:
            theta = client.fit(
                state,
                prox=(self.lam, w),
                length=self.length("personal"),
                optimizer=Optimizer(lr=client.rate(self.personal_lr), weight_decay=decay),
            )
            return theta, self._stepped(client, w, theta)
        for r in range(self.local_rounds):
            theta = client.fit(
                theta,
                prox=(self.lam, w),
                length=Length(steps=1, repeat=self.inner_steps, first=r),
                optimizer=Optimizer(lr=client.rate(self.personal_lr), weight_decay=decay),
            )
            w = self._stepped(client, w, theta)
        return (w if self.keep == "w" else theta), w

    def _stepped(self, client: Client, w: TensorDict, theta: TensorDict) -> TensorDict:
        """Return w after its step towards θ, with the running statistics of θ."""
        pulled = w - (w - theta) * (self.lr * client.config.decay * self.lam)
        return tree.merge(theta, client.parameters(pulled))

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return replies.towards(server, self.beta)

    def reductions(self, run: RunSetup) -> tuple[Reduction, ...]:
        if self.beta == 0:
            return (Reduction("with β = 0", "global"),)
        if self.lam == 0:
            return (Reduction("with λ = 0", "global"),)
        if not math.isclose(self.lr * self.lam, 1.0) or run.train.round_schedule.kind != "constant":
            return ()
        if self.trains_on:
            return self._as_fedclup(run)
        if self.inner_steps > 1:
            remark = "deploys what clients send: after each of its batches w_i is θ"
            return (Reduction("with ηλ = 1", "personal", remark=remark),)
        if run.train.optimizer != "sgd":
            return (
                Reduction(
                    "with ηλ = 1 and K = 1", remark="is FedAvg with an optimizer that forgets each step"
                ),
            )
        options = {"weights": self.weights, "server": {"lr": self.beta}}
        train = {**PLAIN, **as_settings(Length(steps=self.local_rounds)), **self._rate(run)}
        return (Reduction("with ηλ = 1 and K = 1", "global", "fedavg", "global", options, train),)

    def _as_fedclup(self, run: RunSetup) -> tuple[Reduction, ...]:
        """Return the reduction with ηλ = 1 where clients send a θ that trains on, as FedCLUP does with γ = 1/λ."""
        if self.beta != 1:
            return ()
        options = {"lam": self.lam, "weights": self.weights}
        train = {**as_settings(self.length("personal")), **self._rate(run)}
        return (Reduction("with ηλ = 1", "personal", "fedclup", "personal", options, train),)

    def _rate(self, run: RunSetup) -> dict[str, Any]:
        rate = {} if self.personal_lr is None else {"lr": self.personal_lr}
        return {**rate, "weight_decay": run.train.weight_decay + self.inner_wd}
