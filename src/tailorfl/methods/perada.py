"""PerAda: parameter-efficient federated learning personalization (Xie et al., CVPR 2024).

    f(u, ·): a frozen pretrained backbone u and a small adapter set; v_m, w and θ_m are adapter sets only
    min over v_m:  F_m(u, v_m) + (λ/2)‖v_m − w‖²
    min over w:    Σ_{x in P} KL( σ(mean_m f(u, θ_m; x)) ‖ σ(f(u, w; x)) ),   θ_m locally trained copies of w

    server sends w
    client m:  θ_m = LocalSGD(w, E, η);   v_m = LocalSGD(v_m, S, η_p, prox (λ, w));   sends θ_m
    server:    w = mean_S θ_m;   then R steps of Adam on the second objective, with the θ_m as teachers

The model defines the backbone (`model.trainable`, such as adapter+head): PerAda trains, sends and keeps all that is
not frozen. With R = 0 ("w/o KD") it is Ditto on that part, and needs no public set.

The paper and its released code differ. The default is the paper's; `variant` = released takes the code's penalty
λ‖·‖², which is twice as strong, and distils in the first 30 rounds only (5 for multilabel tasks). The code keeps the
best of the distilled models on labelled validation samples of the server, or the average if none is better: `distil:
{select: best}`. Its teachers are in training mode, and distillation overwrites their running statistics; here they
are fixed models. It distils multilabel tasks by a softmax over the labels, which is also the default here; `distil:
{link: sigmoid}` treats each label separately.

| symbol | here |
|---|---|
| w | server state |
| v_m | client state |
| λ | `lam` |
| S, η_p | `personal_epochs` or, counted in steps, `personal_steps`; `personal_lr` (default: the run's E, η) |
| R, Adam's rate, ... | `distil` |
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import becomes, to_local
from tailorfl.core.server_training import ServerDistillation
from tailorfl.methods.bases import Distilled, PersonalLength, TwoModels
from tailorfl.training.update import Optimizer


@register
class PerAda(Distilled, TwoModels, PersonalLength):
    """Personal adapters pulled to a global one, which the server distils from the clients' on public data."""

    name = "perada"
    title = "PerAda"
    paper = "Xie et al., CVPR 2024"
    family = "two models"
    use = "personal adapters on a frozen network, public data at the server"
    grid = {"lam": (0.1, 1.0), "distil.lr": (1e-5, 1e-4, 1e-3, 1e-2)}
    special_cases = [
        *PersonalLength.special_cases,
        becomes(
            "without distillation", "ditto", "ditto", other_model="same", distil__off=True, personal_lr=None
        ),
        to_local("with λ = 0", lam=0),
    ]
    models_trained = 2
    lam: float = Field(1.0, ge=0, description="λ: pull of the personal model towards the received global one")
    personal_lr: float | None = Field(None, gt=0, description="η_p: rate of personal training; default: lr")
    variant: Literal["paper", "released"] = Field(
        "paper", description="released: 2λ, and distillation in the first rounds"
    )

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        v, w, own_rate = state, received, Optimizer(lr=client.rate(self.personal_lr))
        theta = client.fit(w)
        return client.fit(v, prox=(self.pull, w), length=self.length("personal"), optimizer=own_rate), theta

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        mean, context, distil = replies.mean(), replies.context, self._distillation(replies.context.task)
        if context.public is None or not distil.active(replies.round):
            return mean
        teacher = distil.teacher([(context.model, replies.stack)], context.public)
        return distil.distil(mean, teacher, context, replies.round)

    @property
    def pull(self) -> float:
        """λ of the penalty (λ/2)‖v_m − w‖²."""
        return 2 * self.lam if self.variant == "released" else self.lam

    def _distillation(self, task: str) -> ServerDistillation:
        if self.variant == "paper" or self.distil.rounds is not None:
            return self.distil
        return self.distil.model_copy(update={"rounds": 5 if task == "multilabel" else 30})

    @property
    def personal_training(self) -> dict[str, Any]:
        return {**super().personal_training, **({"lr": self.personal_lr} if self.personal_lr else {})}

    @property
    def ditto(self) -> dict[str, Any]:
        """Ditto's options for the same personal models."""
        return {"lam": self.pull, **self.model_dump(include={"weights", "personal_epochs", "personal_steps"})}
