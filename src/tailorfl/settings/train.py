"""The settings of local training, `train`, and of its differential privacy, `train.dp`."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tailorfl.settings.base import Number, Settings, Whole, number

PrivacyLevel = Literal["sample", "client"]
"""What a privacy guarantee hides: one sample of a client, or all of them."""
BatchSampling = Literal["poisson", "shuffle"]
Accountant = Literal["prv", "rdp"]
OptimizerName = Literal["sgd", "adamw"]
ObjectiveName = Literal["task", "balanced_softmax"]
"""Objective of clients: the loss of the task, or the cross entropy of logits shifted by γ log n_c."""
Schedule = Literal["constant", "linear"]
"""Learning rate schedule within a fit."""
Fall = Literal["constant", "step", "cosine", "inverse"]
"""Learning rate schedule over rounds."""
Deployment = Literal["last", "first"]
"""Round whose learning rate is used to tune models for deployment."""
ClassWeights = Literal["none", "client", "federated"]
"""Whose label counts determine class weights in the training loss."""
MOST_STEPS = 10**9
MOST_EPOCHS = 10**6


class PrivacyConfig(Settings):
    """Differential privacy: what it hides, and either the noise or the ε to reach."""

    level: PrivacyLevel = Field(
        default="sample",
        description="sample: clients add noise to every gradient; client: the server adds noise to what clients send",
    )
    clip: Annotated[float, BeforeValidator(number)] = Field(
        gt=0, description="largest norm of one sample's gradient, or of one client's update; .inf: no bound"
    )
    noise: Number | None = Field(
        default=None, ge=0, description="σ: standard deviation of the noise, in units of clip"
    )
    epsilon: Number | None = Field(
        default=None, gt=0, description="largest ε of a client at the end of the run, instead of noise"
    )
    delta: Number = Field(default=1e-5, gt=0, lt=1, description="δ, well below 1/samples or 1/clients")
    sampling: BatchSampling = Field(
        default="poisson",
        description=(
            "batches at level sample: poisson draws every sample independently, which hides who is in a batch; shuffle "
            "takes all samples in random order, so every pass counts in full"
        ),
    )
    calibrate: Literal["client", "run"] | None = Field(
        default=None,
        description=(
            "with epsilon at level sample: client (null) gives every client the noise that it needs, run gives all "
            "clients the largest of these"
        ),
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
                "has no bound (clip: .inf), but noise is a multiple of the bound; set clip, or noise to 0"
            )
        if self.calibrate is not None and self.epsilon is None:
            raise ValueError(
                "has calibrate, which needs epsilon; leave it out, or give epsilon instead of noise"
            )
        if self.calibrate == "client" and self.level == "client":
            raise ValueError(
                "has calibrate: client at level client, where the server adds noise once, to the replies of all "
                "clients; leave calibrate out"
            )
        return self

    @property
    def noise_of_each(self) -> bool:
        """Whether every client has its own noise level."""
        return self.epsilon is not None and self.level == "sample" and self.calibrate != "run"


UNBOUND = PrivacyConfig(clip=math.inf, noise=0.0)
"""Privacy that changes nothing; all other settings are defaults."""


class RoundScheduleSettings(Settings):
    """Learning rate schedule over rounds; the kind alone is a short form."""

    short_form: ClassVar[str | None] = "kind"

    kind: Fall = Field(
        default="constant",
        description="step: × factor at milestones; cosine: to floor; inverse: shift/(shift + t)",
    )
    milestones: tuple[Annotated[Number, Field(gt=0)], ...] = Field(
        default=(0.5, 0.75), description="for step: rounds, or shares of all rounds if below 1"
    )
    factor: Number = Field(default=0.1, gt=0, description="for step: factor at each milestone")
    floor: Number = Field(default=0.0, ge=0, le=1, description="for cosine: remaining share of the rate")
    shift: Number = Field(
        default=1.0, gt=0, description="for inverse: number of rounds after which the rate is halved"
    )
    deployment: Deployment = Field(
        default="last",
        description="rate of fine-tuning before deployment: that of the last or the first round",
    )

    @model_validator(mode="after")
    def _of_this_kind(self) -> Self:
        owners = {"milestones": ["step"], "factor": ["step"], "floor": ["cosine"], "shift": ["inverse"]}
        self.check_owner("kind", owners)
        return self


class TrainSettings(Settings):
    """Local training on every client; a method may override any of it."""

    epochs: Whole | None = Field(
        default=1, ge=1, le=MOST_EPOCHS, description="passes over the client's training data per round"
    )
    steps: Whole | None = Field(
        default=None, ge=1, le=MOST_STEPS, description="SGD steps per round, instead of epochs"
    )
    batch_size: Whole = Field(default=10, ge=0, description="samples per step; 0: all samples of the client")
    lr: Number = Field(default=0.05, gt=0, description="learning rate")
    objective: ObjectiveName = Field(
        default="task",
        description="the task's loss; or balanced_softmax: cross entropy of logits + gamma · log(own class counts)",
    )
    gamma: Number = Field(
        default=1.0, ge=0, description="strength of balanced_softmax against unequal classes"
    )
    optimizer: OptimizerName = Field(
        default="sgd", description="optimizer of the clients; restarts in every round"
    )
    schedule: Schedule = Field(
        default="constant", description="learning rate within a round; linear: to 0 over the client's steps"
    )
    round_schedule: RoundScheduleSettings = Field(
        default=RoundScheduleSettings(),
        description="learning rate over the rounds: constant, step, cosine or inverse (1/t)",
    )
    momentum: Number = Field(default=0.0, ge=0, lt=1, description="momentum of sgd")
    weight_decay: Number = Field(
        default=0.0, ge=0, description="weight decay; adamw applies it separately from the gradient"
    )
    class_weights: ClassWeights = Field(
        default="none",
        description=(
            "weights n/(K n_c) of samples in the training loss, from the client's own labels, or from those of all "
            "training clients, which then send their class counts"
        ),
    )
    clip: Number | None = Field(
        default=None,
        gt=0,
        description="largest norm of a step's gradient, for each model separately; null: no clipping",
    )
    dp: PrivacyConfig | None = Field(
        default=None, description="differential privacy: {level, clip, noise or epsilon, delta, accountant}"
    )

    @model_validator(mode="before")
    @classmethod
    def _steps_replace_epochs(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("steps") is not None and "epochs" not in values:
            return {**values, "epochs": None}
        return values

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("needs either epochs or steps; give one of them")
        return self

    @model_validator(mode="after")
    def _gamma_is_of_the_balanced(self) -> Self:
        if not isinstance(self, TrainOverrides):
            self.check_owner("objective", {"gamma": ["balanced_softmax"]})
        return self

    @model_validator(mode="after")
    def _momentum_is_of_sgd(self) -> Self:
        check_momentum(self.optimizer, self.momentum)
        return self


def check_momentum(optimizer: OptimizerName, momentum: float) -> None:
    """Check that an optimizer accepts this momentum: AdamW already averages gradients.

    Raises:
        ValueError: it does not.
    """
    if optimizer == "adamw" and momentum:
        raise ValueError(
            f"has momentum = {momentum} with optimizer = adamw, which already averages gradients; leave out one of the "
            "two"
        )


class TrainOverrides(TrainSettings):
    """Training settings of one method; `**overrides` expands to those that were set."""

    @model_validator(mode="before")
    @classmethod
    def _epochs_replace_steps(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("epochs") is not None and "steps" not in values:
            return {**values, "steps": None}
        return values

    def keys(self) -> list[str]:
        """Return the settings that were given."""
        return [key for key in type(self).model_fields if key in self.model_fields_set]

    def __getitem__(self, key: str) -> Any:
        if key not in self.model_fields_set:
            raise KeyError(key)
        return self.model_dump(mode="json", include={key})[key]
