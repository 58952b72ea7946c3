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
    """How responses are generated, for sources of the task generation."""

    max_new_tokens: Whole = Field(default=20, ge=1, description="most tokens of a response")
    beams: Whole = Field(default=1, ge=1, description="of beam search; 1 is greedy")
    samples: Whole | None = Field(
        default=None, ge=1, description="at most so many responses of each client's part and common set"
    )


class EvalConfig(Settings):
    """When and on what to evaluate."""

    every: Whole | None = Field(
        default=None,
        ge=0,
        description="rounds between evaluations; 0 evaluates only at the end; null: 5, 10, 20, ..., the first at which "
        "they are a tenth of the work at most",
    )
    sets: Annotated[tuple[EvaluationSet, ...], BeforeValidator(listed)] = Field(
        default=("val", "local"), description="sets that are evaluated during the run"
    )
    final: Annotated[tuple[EvaluationSet, ...], BeforeValidator(listed)] = Field(
        default=("local", "global", "heldout", "shifted"),
        description="sets that are evaluated at the end too, as far as the data have them",
    )
    adapt_steps: tuple[Annotated[Whole, Field(ge=0)], ...] = Field(
        default=(0, 10), description="steps of adaptation of held-out clients before they are evaluated"
    )
    max_samples: Whole | None = Field(
        default=None, ge=1, description="at most so many samples of the global and of each shifted test set"
    )
    metric: str | None = Field(
        default=None,
        description="what methods are compared by, models chosen by and shown first, such as auc; by default the "
        "task's first metric, balanced accuracy where one class has most samples of the data or of a client",
    )
    metrics: Annotated[tuple[Literal["auc", "brier", "ece"], ...], BeforeValidator(listed)] = Field(
        default=(),
        description="further metrics of classes: auc (of several classes each against the rest), Brier score, expected "
        "calibration error",
    )
    select: Literal["last", "val"] = Field(
        default="last",
        description="the personal model that each client deploys: the last, or that of its best validation score "
        "among the rounds that are evaluated",
    )
    calibrate: Literal["none", "temperature"] = Field(
        default="none",
        description="after the last round: a temperature of each client's probabilities, fitted on its validation part",
    )
    predictions: Whole = Field(
        default=20_000,
        ge=0,
        description="keep what deployed models say of each test sample, for intervals and tables of single clients, "
        "where all clients have so many at most; never of private training",
    )
    feature_distance: bool = Field(
        default=False,
        description="also how far personal features lie from those of the global model, on every set",
    )
    sharpness: Number | None = Field(
        default=None,
        gt=0,
        description="ρ: also how much the loss grows at distance ρ along its gradient, of every model on every set",
    )
    target: Number | None = Field(
        default=None,
        description="report the rounds and bytes until the mean over clients of the own test metric is this good",
    )
    generation: GenerationConfig = GenerationConfig()

    @field_validator("final")
    @classmethod
    def _what_is_compared(
        cls, final: tuple[EvaluationSet, ...], info: ValidationInfo
    ) -> tuple[EvaluationSet, ...]:
        if "local" not in (*final, *info.data.get("sets", ("local",))):
            raise ValueError("should contain 'local', which methods are compared by")
        return final

    @field_validator("select")
    @classmethod
    def _something_to_choose_from(cls, select: str, info: ValidationInfo) -> str:
        if select == "val" and info.data.get("every") == 0:
            raise ValueError(
                "'val' chooses among rounds that are evaluated, and every = 0 evaluates only the last"
            )
        return select
