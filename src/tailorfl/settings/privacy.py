"""The settings of differential privacy, `train.dp`."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tailorfl.settings.base import Number, Settings, number

PrivacyLevel = Literal["sample", "client"]
"""What a guarantee hides: one sample of a client, or all of them."""
BatchSampling = Literal["poisson", "shuffle"]
Accountant = Literal["prv", "rdp"]


class PrivacyConfig(Settings):
    """Differential privacy: what it hides, and either the noise or the ε that the noise has to reach."""

    level: PrivacyLevel = Field(
        default="sample",
        description="sample: noise in every gradient, on the clients; client: in what clients send, by the server",
    )
    clip: Annotated[float, BeforeValidator(number)] = Field(
        gt=0, description="largest norm of one sample's gradient, or of one client's update; .inf: no bound"
    )
    noise: Number | None = Field(
        default=None, ge=0, description="σ: standard deviation of the noise, in units of clip"
    )
    epsilon: Number | None = Field(
        default=None, gt=0, description="instead of noise: no client's ε exceeds this at the end of the run"
    )
    delta: Number = Field(default=1e-5, gt=0, lt=1, description="δ, well below 1/samples or 1/clients")
    sampling: BatchSampling = Field(
        default="poisson",
        description="batches of level sample: poisson draws every sample independently, which hides who is "
        "in a batch; shuffle goes through all samples in random order, and a pass counts in full",
    )
    calibrate: Literal["client", "run"] | None = Field(
        default=None,
        description="with epsilon at level sample: client (null) gives every client the noise that it needs "
        "for epsilon, run gives all clients the largest of these",
    )
    accountant: Accountant = Field(
        default="prv", description="how ε is computed: prv is tight, rdp quicker and looser"
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.noise is None) == (self.epsilon is None):
            raise ValueError("needs either noise or epsilon; give one of them")
        if math.isinf(self.clip) and self.noise != 0:
            raise ValueError(
                "has no bound (clip: .inf), which noise is a multiple of; with it, noise must be 0"
            )
        if self.calibrate is not None and self.epsilon is None:
            raise ValueError(
                "has calibrate, which is about the noise for an epsilon; leave it out with noise"
            )
        if self.calibrate == "client" and self.level == "client":
            raise ValueError(
                "has calibrate: client at level client, where the server adds one noise to what all clients send; "
                "leave it out"
            )
        return self

    @property
    def noise_of_each(self) -> bool:
        """Whether every client gets noise of its own."""
        return self.epsilon is not None and self.level == "sample" and self.calibrate != "run"


UNBOUND = PrivacyConfig(clip=math.inf, noise=0.0)
"""Privacy that changes nothing; what it does not say are the defaults."""
