"""A cohort: the clients that run together, and all that their code may see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, check_known
from tailorfl.models.functional import Model
from tailorfl.models.split import Split
from tailorfl.privacy import PrivacyRecord
from tailorfl.settings.experiment import DEFAULT
from tailorfl.settings.train import ClassWeights, ObjectiveName, OptimizerName, Schedule
from tailorfl.training import tree
from tailorfl.training.keys import derive
from tailorfl.training.objective import Loss
from tailorfl.training.plan import BatchPlan, Length, Rows, Steps, make_plan
from tailorfl.training.sample_privacy import SampleDP
from tailorfl.training.update import CONSTANT, RoundSchedule, UpdateRule

INPUT_BYTES = 8 * 2**20
"""Bytes of inputs that one forward pass of an evaluation may hold (activations need several times that)."""

TOKEN_WIDTH = 384
"""Floats that a token counts as: models embed it as a vector (of 384 numbers in a small sentence encoder)."""

PLAN_BLOCK = 64
"""Number of clients whose batches are planned together when they run one after another."""


@dataclass(frozen=True)
class TrainConfig:
    """Local training as in `tailorfl.settings.train`; a method may override the settings of a fit.

    Raises:
        ConfigError: a name is unknown, a number is out of its range, settings of the optimizer are incompatible, or
            training has no length.
    """

    epochs: int | None = DEFAULT.train.epochs
    steps: int | None = DEFAULT.train.steps
    batch_size: int = DEFAULT.train.batch_size
    lr: float = DEFAULT.train.lr
    momentum: float = DEFAULT.train.momentum
    weight_decay: float = DEFAULT.train.weight_decay
    clip: float | None = DEFAULT.train.clip
    dp: SampleDP | None = None
    """`train.dp` of level sample, with the noise that its ε needs."""
    objective: ObjectiveName = DEFAULT.train.objective
    gamma: float = DEFAULT.train.gamma
    optimizer: OptimizerName = DEFAULT.train.optimizer
    schedule: Schedule = DEFAULT.train.schedule
    class_weights: ClassWeights = DEFAULT.train.class_weights
    round_schedule: RoundSchedule = CONSTANT
    decay: float = 1.0
    """The round's factor of `lr` and of a method's own rates."""

    def __post_init__(self) -> None:
        _ = self.rule
        check_known("objective", self.objective, get_args(ObjectiveName))
        check_known("class_weights", self.class_weights, get_args(ClassWeights))
        if self.epochs is None and self.steps is None:
            raise ConfigError("training needs either epochs or steps; give one of them")
        least = {
            "epochs": 1,
            "steps": 1,
            "batch_size": 0,
            "lr": 0,
            "momentum": 0,
            "weight_decay": 0,
            "gamma": 0,
        }
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and not lowest <= value < math.inf:
                raise ConfigError(f"{name} should be a finite number of at least {lowest}, but is {value}")
        if self.momentum >= 1:
            raise ConfigError(f"momentum should be below 1, but is {self.momentum}")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip should be a number above 0, or None for no clipping, but is {self.clip}")

    def decayed(self, share: float) -> TrainConfig:
        """Return the settings of a round in which rates are multiplied by `share`."""
        return replace(self, lr=self.lr * share, decay=share)

    def resolved(self, length: Length) -> tuple[int, float | None, int | Tensor | None]:
        """Return (samples a batch, epochs, steps) of a fit of this length, one of the last two None."""
        batch = self.batch_size if length.batch_size is None else length.batch_size
        epochs, steps = length.epochs, length.steps
        if epochs is None and steps is None:
            epochs, steps = self.epochs, self.steps
        return (batch, None, steps) if steps is not None else (batch, epochs, None)

    @property
    def balanced(self) -> bool:
        """Whether clients train with the balanced softmax."""
        return self.objective == "balanced_softmax"

    @cached_property
    def rule(self) -> UpdateRule:
        """The rule by which a gradient moves the parameters."""
        return UpdateRule(self.lr, self.optimizer, self.schedule, self.momentum, self.weight_decay)


@dataclass(frozen=True)
class Cohort:
    """The clients that run together, and all that they may see: their rows, the model, the seed and the round."""

    ids: tuple[int, ...]
    members: tuple[Rows, ...]
    """Training rows of each client, in the order of `ids`."""
    val: tuple[Rows, ...]
    source: Source
    model: Model
    split: Split
    loss: Loss
    config: TrainConfig
    seed: int
    round: int
    public: Source | None = None
    """Unlabelled samples that every client has."""
    class_weights: Tensor | None = None
    """float64 [clients, classes] class weights in each client's loss; None: equal weights."""
    limit: int | None = None
    """Largest number of batches in a training, however many fits it consists of; 0 turns training off."""
    record: PrivacyRecord | None = field(default=None, compare=False)
    """The record of private training; None if none is kept."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    """The device of the clients' tensors; rows of `source` are on the device of its samples."""
    counting: bool = False
    """If true, nothing is trained and no sample is read: a fit records what it would use and returns its start."""
    plans: dict[Any, Any] = field(default_factory=dict, compare=False)

    def part(self, positions: Sequence[int]) -> Cohort:
        """Return the cohort of the clients at `positions`."""
        take = [int(p) for p in positions]
        return replace(
            self,
            ids=tuple(self.ids[p] for p in take),
            members=tuple(self.members[p] for p in take),
            val=tuple(self.val[p] for p in take),
            class_weights=None if self.class_weights is None else self.class_weights[take],
            plans={},
        )

    @property
    def sizes(self) -> Rows:
        """[clients] int64: training samples of each client."""
        return np.array([len(m) for m in self.members], dtype=np.int64)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of numbers outside the model."""
        return tree.precision(self.model.module.parameters())

    @cached_property
    def label_counts(self) -> Tensor:
        """[clients, classes] of `dtype` in host memory: training samples of each class."""
        y, classes = self.source.y.cpu().numpy(), self.source.outputs
        table = np.stack([np.bincount(y[rows], minlength=classes) for rows in self.members])
        return torch.from_numpy(table).to(self.dtype)

    @property
    def min_batch(self) -> int:
        """Smallest batch a step may use: batch norm cannot train on a single sample."""
        return 2 if self.model.has_batch_statistics else 1

    def weights_of_classes(self, positions: Sequence[int]) -> Tensor | None:
        """Return `class_weights` of the clients at `positions`, on the device of the clients' tensors."""
        return None if self.class_weights is None else self.class_weights[list(positions)].to(self.device)

    def keys(self, positions: Sequence[int], purpose: str) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Return one key a client for this round and purpose, uint64 [positions]."""
        ids = np.array([self.ids[p] for p in positions])
        return derive(self.seed, "client", self.round, purpose, ids)

    def left(self, first: int) -> int | None:
        """Return the number of batches that a training may still take after `first` batches; None without a limit."""
        return None if self.limit is None else max(self.limit - first, 0)

    def plan(
        self,
        positions: tuple[int, ...],
        purpose: str,
        batch: int,
        epochs: float | None,
        steps: Steps | None,
        first: int,
        batches: int = 1,
        poisson: bool = False,
        noise: str | None = None,
    ) -> BatchPlan:
        """Return the batch plan of the clients at `positions`; every step takes `batches` batches.

        Its keys are of the purpose `noise`; None: nothing but the batches is random. Equal arguments give equal plans
        in every cohort.
        """
        if len(positions) == 1:
            # One client of a loop: planning its whole block costs little more than planning one client.
            block = positions[0] // PLAN_BLOCK * PLAN_BLOCK
            together = tuple(range(block, min(block + PLAN_BLOCK, len(self.ids))))
        else:
            together = positions
        request = (purpose, batch, epochs, steps, first, batches, poisson, noise)
        if self.plans.get("positions") != together:
            self.plans.clear()
            self.plans["positions"] = together
        if request not in self.plans:
            plan = make_plan(
                [self.members[p] for p in together],
                self.keys(together, purpose),
                batch,
                epochs=epochs,
                steps=steps,
                first=first,
                min_batch=self.min_batch,
                limit=self.left(first),
                batches=batches,
                poisson=poisson,
            )
            if noise is not None:
                plan = replace(plan, keys=self.keys(together, noise).astype(np.int64))
            self.plans[request] = plan
        block_plan: BatchPlan = self.plans[request]
        return block_plan if together == positions else block_plan.of(positions[0] - together[0])


def rows_at_once(source: Source, clients: int = 1) -> int:
    """Return the number of samples of each of `clients` clients in one forward pass of an evaluation."""
    floats = math.prod(source.input_shape)
    if source.holds_tokens:
        # A model that generates returns the whole vocabulary for every token.
        floats *= max(TOKEN_WIDTH, source.outputs) if source.task == "generation" else TOKEN_WIDTH
    return max(1, INPUT_BYTES // (4 * clients * floats))


def padded(rows: Sequence[Rows]) -> tuple[Tensor, Tensor]:
    """Return rows as one padded table, and 1 for real entries: int64 and float [clients, widest].

    Padding repeats a row: those of no client may hold no numbers, and 0 · NaN is NaN.
    """
    widest = max((len(r) for r in rows), default=0)
    some = next((r[0] for r in rows if len(r)), 0)
    table = np.full((len(rows), widest), some, dtype=np.int64)
    weight = np.zeros((len(rows), widest), dtype=np.float32)
    for i, r in enumerate(rows):
        table[i, : len(r)] = r
        weight[i, : len(r)] = 1.0
    return torch.from_numpy(table), torch.from_numpy(weight)
