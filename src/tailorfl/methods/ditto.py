"""Ditto (Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021).

    min over v_i:  F_i(v_i) + (λ/2)‖v_i − w*‖²,   w* the FedAvg solution, independent of the personal models

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
| E_p | `personal_epochs`, or in steps `personal_steps` (default: E) |

With `dynamic_lam` every client tries several λ each round and keeps the personal model with the lowest validation loss.
The official code chooses at every step, `dynamic_every = step`: each λ takes one step of plain SGD from v_i (no
momentum, weight decay or schedule), and the next step starts from the best of them. That evaluates the validation part
at every step, which is too often for a small one; the default is once per round.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, model_validator
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.method import register
from tailorfl.core.reduction import exposure, several, to_local
from tailorfl.methods.bases import PersonalLength, SendsChange, TwoModels
from tailorfl.methods.mixtures import best_of
from tailorfl.training.plan import Length
from tailorfl.training.update import PLAIN, Optimizer


@register
class Ditto(SendsChange, TwoModels, PersonalLength):
    """FedAvg and, on each client, a personal model that is pulled towards FedAvg's."""

    name = "ditto"
    title = "Ditto"
    paper = "Li et al., ICML 2021"
    family = "two models"
    use = "a personal model next to FedAvg's, for any kind of difference"
    grid = {"lam": (0.1, 0.75, 1.0, 2.0)}
    special_cases = [*PersonalLength.special_cases, to_local("with λ = 0", lambdas=lambda l: not any(l))]
    exposures = [exposure("the validation losses that choose λ (dynamic_lam)", "sample", lambdas=several)]
    models_trained = 2
    lam: float = Field(1.0, ge=0, description="λ: pull of the personal model towards the received global one")
    dynamic_lam: tuple[NonNegativeFloat, ...] = Field(
        (), description="λ to choose among by validation loss; empty: lam"
    )
    dynamic_every: Literal["round", "step"] = Field(
        "round", description="how often λ is chosen; step: by SGD"
    )

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        v, w = state, received
        theta = client.fit(w)
        if self.dynamic_every == "step":
            return self.stepwise(client, v, w), theta - w
        models = [client.fit(v, prox=(lam, w), length=self.length("personal")) for lam in self.lambdas]
        return best_of(client, models), theta - w

    @property
    def lambdas(self) -> tuple[float, ...]:
        """Every λ that a client tries."""
        return self.dynamic_lam or (self.lam,)

    @property
    def personal_training(self) -> dict[str, Any]:
        return {**super().personal_training, **(PLAIN if self.dynamic_every == "step" else {})}

    def stepwise(self, client: Client, v: TensorDict, w: TensorDict) -> TensorDict:
        """Return v_i after all steps of its training, each with the λ whose step has the lowest validation loss."""
        whole, metrics = self.length("personal"), dict(client.metrics)
        for number in range(client.most_steps(whole)):
            step, sgd = Length(steps=number < client.steps(whole), first=number), Optimizer.plain()
            models = [client.fit(v, prox=(lam, w), length=step, optimizer=sgd) for lam in self.lambdas]
            v = best_of(client, models)  # of steps on the same batch; a client that has finished takes none
        client.metrics = metrics  # the loss of one step is not a training loss
        return v

    @model_validator(mode="after")
    def _has_a_choice(self) -> Self:
        if self.dynamic_every == "step" and not self.dynamic_lam:
            raise ValueError("dynamic_every = step chooses from dynamic_lam, which is empty; try [0.1, 1, 2]")
        return self
