"""When a method is another one: settings that reduce it are named before a run and in its table.

A `Reduction` says which model of a method equals which model of another one. The test table of reductions runs both
sides of each, so that what is said is proved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tailorfl.models.split import Split
from tailorfl.settings.experiment import DEFAULT, Sampling
from tailorfl.training.cohort import TrainConfig

Which = Literal["personal", "global"]


@dataclass(frozen=True)
class Facts:
    """What of a run, beside a method's own settings, decides whether the method is another one in it."""

    split: Split
    layers: int
    """Layers with trainable parameters, a norm counted with the one before it."""
    train: TrainConfig
    clients: int
    """Training clients."""
    most: int
    """Most clients that a round may have."""
    everyone: bool
    """Whether every client takes part in every round."""
    rounds: int
    sampling: Sampling = DEFAULT.sampling
    validation: bool = True
    """Whether any client has validation samples."""
    architectures: int = 1

    @property
    def one_step(self) -> bool:
        """Whether local training is a single step."""
        return self.train.steps == 1 or (self.train.epochs == 1 and self.train.batch_size == 0)


@dataclass(frozen=True)
class Reduction:
    """`model` of a method equals `other_model` of `other`, or if that is "" the initial one, or what `remark` says."""

    because: str
    """The settings that make it so, such as "with λ = 0"."""
    model: Which = "global"
    other: str = ""
    """Name of the other method; "": the model is never trained."""
    other_model: Which = "global"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the other method."""
    train: Mapping[str, Any] = field(default_factory=dict)
    """Training settings of the other method, where they differ from the run's."""
    remark: str = ""
    """What the method is then, where no method of the library is the same."""


def to_local(because: str, **train: Any) -> Reduction:
    """Personal models that are LocalTrain's."""
    return Reduction(because, "personal", "local", "personal", train=train)


def untrained(because: str, model: Which) -> Reduction:
    """A model whose parameters stay as they were drawn."""
    return Reduction(because, model)


def length(epochs: int | None, steps: int | None = None) -> dict[str, Any]:
    """The training settings of so many steps, or epochs; without both the run's own."""
    if steps is None and epochs is None:
        return {}
    return {"epochs": None, "steps": steps} if steps is not None else {"epochs": epochs, "steps": None}


def none(epochs: int | None, steps: int | None = None) -> bool:
    """Whether a training of that length does nothing."""
    return steps == 0 if steps is not None else epochs == 0
