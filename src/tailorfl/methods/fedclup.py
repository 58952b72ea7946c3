"""FedCLUP with constant λ (Yu et al., "Understanding the Statistical Accuracy-Communication Trade-off in
Personalized Federated Learning with Minimax Guarantees", ICML 2025).

    min over w, v_i:  Σ_i (1/N) ( F_i(v_i) + (λ/2)‖v_i − w‖² )

    server sends w
    client i:  v_i = LocalSGD(v_i, prox (λ, w)), warm start, v_i persists;   sends v_i
    server:    w = (1 − γλ) w + γλ mean_S v_i                              ( = w − γ mean_S λ(w − v_i) )

Small λ is high personalization, large λ low. Step size of the server:

    gamma = "mean"     γ = 1/λ: w is the plain mean of v_i (the real-data experiments); default, needs no L
    gamma = "theory"   γ = (λ + L)/(2λL), Corollary 2
    gamma = "edge"     γ = 1/λ + 1/L (the synthetic experiments); fastest, at the boundary of the theory

| symbol | here |
|---|---|
| λ | `lam` |
| L | `smoothness` |
| η | the run's learning rate; with `smoothness` given and `theory_lr`, 1/(λ + L) |
| K | the run's steps or epochs |
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.methods.bases import TwoModels


@register
class FedCLUP(TwoModels):
    """Personal models tied to a global one by λ, which trades statistical accuracy against communication."""

    name: ClassVar[str] = "fedclup"
    title: ClassVar[str] = "FedCLUP"
    paper: ClassVar[str] = "Yu et al., ICML 2025"
    lam: float = Field(0.5, ge=0, description="λ: degree of collaboration; small is high personalization")
    gamma: Literal["mean", "theory", "edge"] = Field("mean", description="rule for the server's step size γ")
    smoothness: float | None = Field(None, gt=0, description="L, if known; needed by gamma = theory and edge")
    theory_lr: bool = Field(False, description="use η = 1/(λ + L) instead of the run's learning rate")

    @model_validator(mode="after")
    def _needs_smoothness(self) -> Self:
        if self.smoothness is None and (self.gamma != "mean" or self.theory_lr):
            raise ValueError("gamma = theory or edge and theory_lr need smoothness (L)")
        return self

    @property
    def step(self) -> float:
        """γλ: how far the server moves from w to the mean of the personal models."""
        if self.lam == 0 or self.gamma == "mean" or self.smoothness is None:
            return 1.0 if self.lam > 0 else 0.0
        edge = 1.0 + self.lam / self.smoothness
        return edge if self.gamma == "edge" else edge / 2.0

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        lr = 1.0 / (self.lam + self.smoothness) if self.theory_lr and self.smoothness else None
        v = client.fit(state, prox=(self.lam, received), lr=lr)
        return v, v

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return replies.towards(server, self.step)
