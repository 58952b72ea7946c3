"""Server optimizers: FedAvg's averaged update as a pseudo-gradient.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021.

    Δ = Σ a_i (θ_i − w)
    sgd      m = β₁ m + Δ;                 w = w + η m
    adam     m = β₁ m + (1−β₁) Δ;  v = β₂ v + (1−β₂) Δ²;                w = w + η m / (√v + ε)
    yogi     m as adam;            v = v − (1−β₂) Δ² sign(v − Δ²);      w = w + η m / (√v + ε)
    adagrad  m as adam;            v = v + Δ²;                          w = w + η m / (√v + ε)

No bias correction, as in the paper. Buffers (running statistics) are not optimised: they become the average.

| symbol | here |
|---|---|
| η | `lr` |
| β₁, β₂ | `momentum`, `beta2` |
| ε (τ in the paper) | `eps` |
| v₀ | `initial` |
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from tensordict import TensorDict

Kind = Literal["sgd", "adam", "yogi", "adagrad"]


class ServerOptimizer(BaseModel):
    """One server step; its state is a TensorDict that the server keeps between rounds."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Kind = "sgd"
    lr: float = Field(default=1.0, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    initial: float = Field(default=0.0, ge=0)

    @property
    def is_plain_average(self) -> bool:
        """Whether w + Δ is meant, which is the average itself (exactly so, without rounding)."""
        return self.kind == "sgd" and self.lr == 1 and self.momentum == 0

    def start(self, parameters: TensorDict) -> TensorDict:
        """Return the state before the first round."""
        out = {}
        if self.kind != "sgd" or self.momentum > 0:
            out["m"] = parameters.apply(torch.zeros_like)
        if self.kind != "sgd":
            out["v"] = parameters.apply(lambda t: torch.full_like(t, self.initial))
        return TensorDict(out, batch_size=[])

    def step(self, w: TensorDict, update: TensorDict, state: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Return (new parameters, new state) for the averaged update Δ.

        `w` and `update` hold parameters only.
        """
        if self.kind == "sgd":
            if self.momentum == 0:
                return w + update * self.lr, state
            m = state["m"] * self.momentum + update
            return w + m * self.lr, TensorDict({"m": m}, batch_size=[])
        m = state["m"] * self.momentum + update * (1 - self.momentum)
        square = update * update
        if self.kind == "adam":
            v = state["v"] * self.beta2 + square * (1 - self.beta2)
        elif self.kind == "yogi":
            v = state["v"] - square * (state["v"] - square).sign() * (1 - self.beta2)
        else:
            v = state["v"] + square
        return w + (m * self.lr) / (v.sqrt() + self.eps), TensorDict({"m": m, "v": v}, batch_size=[])
