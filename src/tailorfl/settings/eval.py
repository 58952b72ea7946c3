"""The settings of evaluation, `eval`."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
)

from tailorfl.settings.base import Number, Settings, Whole, listed

EvaluationSet = Literal["val", "local", "participants", "global", "heldout", "shifted"]
SETS = get_args(EvaluationSet)


class GenerationConfig(Settings):
    """Generated responses, for sources of the task generation."""

    max_new_tokens: Whole = Field(default=20, ge=1, description="largest number of tokens of a response")
    beams: Whole = Field(default=1, ge=1, description="beams of the search; 1 is greedy")
    samples: Whole | None = Field(
        default=None,
        ge=1,
        description="largest number of responses for each client's part and each common set",
    )


class EvalConfig(Settings):
    """Evaluation: rounds, sets and metrics."""

    every: Whole | None = Field(
        default=None,
        ge=0,
        description=(
            "rounds between evaluations; 0: only at the end; null: the smallest of 5, 10, 20, ... with which "
            "evaluations are at most a tenth of the work"
        ),
    )
    sets: Annotated[tuple[EvaluationSet, ...], BeforeValidator(listed)] = Field(
        default=("val", "local"), description="sets to evaluate during the run"
    )
    final: Annotated[tuple[EvaluationSet, ...], BeforeValidator(listed)] = Field(
        default=("local", "global", "heldout", "shifted"),
        description="additional sets at the end, if the data have them",
    )
    adapt_steps: tuple[Annotated[Whole, Field(ge=0)], ...] = Field(
        default=(0, 10), description="steps of adaptation of held-out clients before their evaluation"
    )
    max_samples: Whole | None = Field(
        default=None, ge=1, description="largest number of samples of the global and of each shifted test set"
    )
    metric: str | None = Field(
        default=None,
        description="primary metric, to compare methods and choose models; by default the task's first, or "
        "balanced accuracy if one class has most samples of the data or of a client",
    )
    metrics: Annotated[tuple[Literal["auc", "brier", "ece"], ...], BeforeValidator(listed)] = Field(
        default=(),
        description="further metrics: auc (each class against the rest), Brier score, calibration error",
    )
    select: Literal["last", "val"] = Field(
        default="last",
        description="personal model that a client deploys: the last, or its best on validation data",
    )
    calibrate: Literal["none", "temperature"] = Field(
        default="none", description="fit a temperature of each client's probabilities on its validation part"
    )
    predictions: Whole = Field(
        default=20_000,
        ge=0,
        description=(
            "keep predictions, for tables of single clients, if there are at most this many test samples; never with "
            "private training"
        ),
    )
    feature_distance: bool = Field(
        default=False, description="also measure the distance of personal features to the global model's"
    )
    sharpness: Number | None = Field(
        default=None, gt=0, description="ρ: also measure the loss's growth at distance ρ along its gradient"
    )
    target: Number | None = Field(
        default=None,
        description="report the rounds and bytes until the mean test metric over clients reaches this",
    )
    generation: GenerationConfig = GenerationConfig()

    @field_validator("final")
    @classmethod
    def _what_is_compared(
        cls, final: tuple[EvaluationSet, ...], info: ValidationInfo
    ) -> tuple[EvaluationSet, ...]:
        if "local" not in (*final, *info.data.get("sets", ("local",))):
            raise ValueError("should contain 'local', by which methods are compared")
        return final

    @field_validator("select")
    @classmethod
    def _something_to_choose_from(cls, select: str, info: ValidationInfo) -> str:
        if select == "val" and info.data.get("every") == 0:
            raise ValueError(
                "'val' chooses among rounds that are evaluated, and every = 0 evaluates only the last"
            )
        return select
