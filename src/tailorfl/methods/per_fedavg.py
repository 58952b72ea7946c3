"""Per-FedAvg (Fallah et al., NeurIPS 2020).

"Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach." A model from
which one step of a client leads to a good personal one.

    min over w:  (1/N) Σ_i F_i(w − α ∇F_i(w))

    server sends w
    client i, K steps, each on independent batches B1, B2, B3:
               w̃ = w − α ∇F(w; B1);   g = ∇F(w̃; B2)
        FO:    w = w − β g
        HF:    w = w − β (g − α Hg),   Hg = (∇F(w + δg; B3) − ∇F(w − δg; B3)) / (2δ)
    server:    w = mean_S w_i

FO omits the Hessian, so its fixed point is where Σ ∇F_i(w − α∇F_i(w)) = 0 instead of at a minimum. A client deploys
w after A steps of size α on batches of its own TRAINING data (one re-implementation adapts on test labels).

An epoch is a pass over a client's data: as each step takes two or three batches, it has half or a third of the
steps that FedAvg would take. Sample-level privacy adds noise to every gradient; in HF the noise of the two in Hg is
multiplied by α/(2δ), so δ should then be larger than the default.

| symbol | here |
|---|---|
| α, δ | `alpha`, `delta` |
| β, K | the run's learning rate and steps (or epochs) |
| A | `adapt_steps` |
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.method import register
from tailorfl.core.reduction import becomes, comparable, options_but
from tailorfl.methods.bases import ServerModel
from tailorfl.training.gradients import Gradient
from tailorfl.training.plan import Length
from tailorfl.training.update import Optimizer


@register
class PerFedAvg(ServerModel):
    """A global model that is trained for its loss after a step of adaptation."""

    name = "per_fedavg"
    title = "Per-FedAvg"
    paper = "Fallah et al., NeurIPS 2020"
    family = "tuned"
    use = "an initial model that one step personalizes"
    grid = {"alpha": (0.01, 0.03, 0.1)}
    special_cases = [
        comparable(
            "with α = 0",
            "global",
            "is FedAvg whose steps see the second of every two or three batches",
            alpha=0,
        ),
        becomes("without adaptation steps", "per_fedavg", options_but(), models=("personal",), adapt_steps=0),
    ]
    alpha: float = Field(0.1, ge=0, description="α: step of the adaptation")
    variant: Literal["FO", "HF"] = Field(
        "FO", description="first order, or with the Hessian term by differences"
    )
    delta: float = Field(1e-3, gt=0, description="δ: step of the differences (HF)")
    adapt_steps: int = Field(1, ge=0, description="A: steps of adaptation before a model is used")

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        batches = 2 if self.variant == "FO" else 3
        return state, client.fit(received, direction=self.direction, length=Length(batches=batches))

    def direction(self, w: TensorDict, grad: Gradient) -> TensorDict:
        """Return the gradient of F(w − α∇F(w)), in FO without its Hessian term."""
        g = grad(w - grad(w, batch=0) * self.alpha, batch=1)
        if self.variant == "FO":
            return g
        forward, backward = grad(w + g * self.delta, batch=2), grad(w - g * self.delta, batch=2)
        return g - (forward - backward) * (self.alpha / (2 * self.delta))

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return client.fit(
            received,
            length=Length(steps=self.adapt_steps),
            optimizer=Optimizer.plain(lr=self.alpha),  # α is in the objective, so it does not decay by round
            purpose="finetune",
        )
