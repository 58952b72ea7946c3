"""PLGU: personalize locally, generalize universally (Qu et al., CVPR 2023).

"How To Prevent the Poor Performance Clients for Personalized Federated Learning?" Layer-wise sharpness-aware
minimisation, see `tailorfl.training.ascent`.

PLGU-LF, layer freezing:

    server sends w
    client i:  ξ from (θ_i, w);   Per = the D layers with the largest ξ (of equals the deeper), Uni = the rest
               θ = (θ_i on Per, w on Uni);   ω = w
               for every batch:  g = ∇F(θ);  ε = ρ ξ_l g_l/‖g‖;  g̃ = ∇F(ω + ε);  θ = θ − η g;  ω = ω − η g̃
               θ_i = θ;  sends ω − w
    server:    w = w + mean_S (ω − w)

"Freeze" means that w does not overwrite the D personal layers; all layers of θ and ω are trained. The subscript of the
paper's g̃ means the derivative at w + ε, while its argument is F(θ + ε): the former is `grad_at = global`. The g of ε is
θ's, which saves a gradient; `eps_from = global` takes a third one at ω, so that ω ascends along its own gradient.
ε is written for p = 2; `p` is the general one of `tailorfl.training.ascent`, p = inf ascends by the sign of each entry.

PLGU-GRep, on FedRep:

    client i:  K epochs h = h − η ∇_h F(h, φ)
               then on one batch:  g = ∇_φ F(h, φ);  φ' = φ − η g;  ξ_l ∝ ‖φ'_l − φ_l‖/dim_l;  g' = ∇_φ F(h, φ')
                                   ε = ρ ξ_l g'_l/‖g'‖;  g̃ = ∇_φ F(h, φ' + ε);  φ_i = φ' − η g̃
               sends φ_i
    server:    φ = mean_S φ_i

The last line of the paper's update prints the plain gradient instead of g̃, which would leave ε unused. The two steps
of the body are plain ones, whatever the run's optimizer; `train.clip` bounds each of the three gradients.

| symbol | here |
|---|---|
| w; φ | server state |
| θ_i; h | client state |
| D | `personal_layers`, by default 5/21 of the layers as in the paper |
| ρ, p | `rho`, `p` |
| normalisation of ξ | `score_norm` |
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.method import register
from tailorfl.core.reduction import Reduction, RunSetup
from tailorfl.methods.bases import SendsChange, TwoModels
from tailorfl.methods.fedrep import FedRep
from tailorfl.models.layers import Groups
from tailorfl.training import tree
from tailorfl.training.ascent import ScoreNorm, layer_scores, layerwise_perturbation
from tailorfl.training.gradients import Direction, Gradient
from tailorfl.training.plan import Length
from tailorfl.training.update import Optimizer

Form = Literal["paper", "asam"]
Model = Literal["global", "personal"]
SHARE = 5 / 21
"""The share of layers that stay personal by default: the paper's D = 5 on a ResNet-18, which has 21."""


@register
class PLGULF(SendsChange, TwoModels):
    """A flat global model, and personal models that keep their most personal layers."""

    name = "plgu_lf"
    title = "PLGU-LF"
    paper = "Qu et al., CVPR 2023"
    family = "two models"
    use = "the worst clients: flat minima, personal top layers"
    grid = {"rho": (0.05, 0.1, 0.5)}
    models_trained = 2
    personal_layers: int | None = Field(
        None,
        ge=0,
        description="D: layers that the global model does not overwrite; default the paper's share, 5 of 21",
    )
    rho: float = Field(0.05, ge=0, description="ρ: radius of the ascent")
    score_norm: ScoreNorm = Field("sum", description="how the layer scores are scaled")
    lwsam_form: Form = Field("paper", description="the paper's perturbation, or the exact maximiser (asam)")
    p: float = Field(2.0, gt=1, description="p of the ball ‖ε‖_p ≤ ρ; inf is the sign of the gradient")
    grad_at: Model = Field("global", description="model whose perturbed gradient moves ω")
    eps_from: Model = Field(
        "personal", description="model whose gradient makes ε; global takes a third gradient, at ω"
    )

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        groups = client.layers()
        scores = layer_scores(state, received, groups, self.score_norm)
        theta = self.start(client, state, received, layer_scores(state, received, groups))
        step = self.step(groups)
        trained = client.fit({"theta": theta, "omega": received}, direction=step, given=(scores,))
        return trained["theta"], trained["omega"] - received

    def step(self, groups: Groups) -> Direction:
        """Return the direction of (θ, ω): ∇F(θ), and the gradient at ω + ε, or θ + ε."""

        def direction(state: TensorDict, grad: Gradient, scores: Tensor) -> TensorDict:
            theta, omega = state["theta"], state["omega"]
            g = grad(theta, of="theta")
            climbed = g if self.eps_from == "personal" else grad(omega, of="omega")
            epsilon = layerwise_perturbation(climbed, scores, groups, self.rho, self.lwsam_form, self.p)
            flat = grad((omega if self.grad_at == "global" else theta) + epsilon, of="omega")
            return TensorDict({"theta": g, "omega": flat})

        return direction

    def start(self, client: Client, theta: TensorDict, w: TensorDict, scores: Tensor) -> TensorDict:
        """Return (θ_i on Per, w on Uni)."""
        personal = largest(scores, self.kept(len(scores)))
        out = dict(tree.tensors(w))
        for number, group in enumerate(client.layers(buffers=True)):
            for name in group:
                out[name] = torch.where(personal[number], theta.get(name), w.get(name))
        return TensorDict(out)

    def kept(self, layers: int) -> int:
        """Return D for a model with `layers` layers: by default 5/21 of them, at least one, and never all."""
        if self.personal_layers is not None:
            return self.personal_layers
        return min(max(1, round(SHARE * layers)), layers - 1)

    def reductions(self, run: RunSetup) -> tuple[Reduction, ...]:
        reductions, count = [], self.kept(run.layers)
        because = f"with D = {count} on a model of {run.layers} layer{'s' * (run.layers != 1)}"
        if count >= run.layers:
            reductions.append(Reduction.local(because))
        if count == 0:
            remark = "deploys the received model after local training, as no layer stays personal"
            reductions.append(Reduction(because, "personal", remark=remark))
        if self.rho == 0 and self.grad_at == "global":
            options = {"weights": self.weights}
            reductions.append(Reduction("with ρ = 0", "global", "fedavg", "global", options))
        return tuple(reductions)


@register
class PLGUGRep(FedRep):
    """FedRep whose body takes one plain and one layer-wise sharpness-aware step."""

    name = "plgu_grep"
    title = "PLGU-GRep"
    paper = "Qu et al., CVPR 2023"
    family = "parts"
    use = "FedRep that lifts the worst clients"
    grid = {"head_epochs": (1, 5, 10), "rho": (0.05, 0.1, 0.5)}
    head_epochs: int = Field(5, ge=0, description="K: epochs on the head with the body fixed")
    body_steps: int = Field(1, ge=0, description="batches on which the body takes its two steps")
    rho: float = Field(0.05, ge=0, description="ρ: radius of the ascent")
    score_norm: ScoreNorm = Field("sum", description="how the layer scores are scaled")
    lwsam_form: Form = Field("paper", description="the paper's perturbation, or the exact maximiser (asam)")
    p: float = Field(2.0, gt=1, description="p of the ball ‖ε‖_p ≤ ρ; inf is the sign of the gradient")
    reuse_grad: bool = Field(False, description="use g instead of g' for the ascent, which saves a gradient")

    @model_validator(mode="after")
    def _body_takes_steps(self) -> Self:
        if "body_epochs" in self.model_fields_set:
            raise ValueError(
                "body_epochs has no effect: the body takes two steps on each of body_steps batches"
            )
        return self

    def train(self, client: Client, model: TensorDict) -> TensorDict:
        model = client.fit(model, train=client.split.personal, length=self.length("head"))
        groups = client.layers(client.split.shared)
        lr = client.config.lr

        def twice(phi: TensorDict, grad: Gradient) -> TensorDict:
            g = grad(phi)
            moved = phi - g * lr
            climbed = g if self.reuse_grad else grad(moved)
            scores = layer_scores(moved, phi, groups, self.score_norm)
            epsilon = layerwise_perturbation(climbed, scores, groups, self.rho, self.lwsam_form, self.p)
            return g + grad(moved + epsilon)

        return client.fit(
            model,
            train=client.split.shared,
            length=Length(steps=self.body_steps),
            optimizer=Optimizer.plain(clip_each=True),
            direction=twice,
        )

    def reductions(self, run: RunSetup) -> tuple[Reduction, ...]:
        if not run.split.shared:
            return self.alone(self.length("head"))
        if self.body_steps == 0:
            same_options = self.model_dump(
                include={"weights", "personal_part", "head_epochs", "head_steps"}
                | {"final_personal_epochs", "final_personal_steps"}
            )
            options = {**same_options, "body_epochs": 0}
            return (Reduction("without body steps", "personal", "fedrep", "personal", options),)
        if self.rho > 0:
            return ()
        remark = "is FedRep whose body takes two plain steps on each of its batches"
        return (Reduction("with ρ = 0", "personal", remark=remark),)


def largest(scores: Tensor, count: int) -> Tensor:
    """Return which layers have the `count` largest scores, bool [layers]; of equal ones the deeper come first."""
    layers = scores.shape[0]
    deepest_first = torch.argsort(scores.flip(0), descending=True, stable=True)
    chosen = layers - 1 - deepest_first[: min(count, layers)]
    return (torch.arange(layers)[:, None] == chosen[None, :]).any(1)
