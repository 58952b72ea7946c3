"""The step of local training: the update rule of the parameters, and the learning rate schedule over rounds.

The rule works in place, for one client or a whole cohort at once:

    sgd      v = μ v + g + δ p;   p = p − η v                                     as torch.optim.SGD
    adamw    p = (1 − η δ) p;   m = β₁ m + (1 − β₁) g;   s = β₂ s + (1 − β₂) g²     as torch.optim.AdamW
             p = p − η m̂ / (√ŝ + ε),   m̂ = m / (1 − β₁ᵗ),   ŝ = s / (1 − β₂ᵗ)       (Loshchilov and Hutter, ICLR 2019)

    η = lr                        constant
    η = lr · (1 − k / K)          linear, at step k (from 0) of the client's own K steps

The optimizer's memory (v, or m and s) starts at zero in every fit. A method that splits its training into several fits
therefore starts a new optimizer and a new decay with each: a fit of one step takes it at the full rate.

| symbol | here |
|---|---|
| μ, δ | `momentum`, `weight_decay` |
| β₁, β₂, ε | `BETA_1`, `BETA_2`, `EPS`, torch's defaults |

Over the rounds the rate falls:

    η_t = lr · s(t),   with t rounds before this one and T rounds in the run

    constant   s = 1
    step       s = factor^(number of milestones passed), a milestone m < 1 after m·T rounds, m ≥ 1 after m rounds
    cosine     s = floor + (1 − floor) (1 + cos(π t/T)) / 2
    inverse    s = shift / (shift + t)                     the 1/t of stochastic approximation

It applies to every rate by which a client moves a model: the run's, and a method's own. It does not apply to rates that
are part of an objective (Per-FedAvg's α), nor to steps of the server. Tuning for deployment, of trained clients and of
newcomers, takes the rate of the last round, or with `deployment: first` that of the first.

| symbol | here |
|---|---|
| T | `rounds` |
| s(t) | `share` |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor

from tailorfl.errors import ConfigError, unknown
from tailorfl.settings.experiment import DEFAULT
from tailorfl.settings.train import Deployment, Fall, OptimizerName, Schedule, check_momentum

PLAIN: Mapping[str, Any] = {"optimizer": "sgd", "schedule": "constant", "momentum": 0.0, "weight_decay": 0.0}
"""Training settings under which a step is just p − η g."""
BETA_1, BETA_2, EPS = 0.9, 0.999, 1e-8
CLIP_EPS = 1e-6
"""The constant that torch's clip_grad_norm_ adds to a norm."""


@dataclass(frozen=True)
class UpdateRule:
    """The settings of an update.

    Raises:
        ConfigError: unknown optimizer or schedule; momentum with AdamW, which has its own.
    """

    lr: float
    optimizer: OptimizerName
    schedule: Schedule
    momentum: float
    weight_decay: float
    own: float = 1.0
    """Factor of η for tensors that the model does not have."""

    @cached_property
    def memories(self) -> int:
        """Number of tensors that the optimizer stores for each parameter; 0: p = (1 − η δ) p − η g."""
        return 2 if self.optimizer == "adamw" else 1 if self.momentum else 0

    def apply(
        self,
        number: int,
        pace: float | Tensor,
        params: list[Tensor],
        memory: list[Tensor],
        gradient: list[Tensor],
    ) -> None:
        """Take a step in place; also overwrites `gradient`.

        Args:
            number: of the step, from 0.
            pace: η of this step, [clients] if they differ.
            params: the parameters, [clients, ...] (without that axis for one client).
            memory: the optimizer's memory of them, `memories` times as many tensors; zeros at first.
            gradient: their gradients.
        """
        if self.optimizer == "adamw":
            self._adamw(number + 1, params, memory, gradient, pace)
            return
        if self.weight_decay:
            torch._foreach_add_(gradient, params, alpha=self.weight_decay)
        if memory:
            torch._foreach_mul_(memory, self.momentum)
            torch._foreach_add_(memory, gradient)
            gradient = memory
        if isinstance(pace, Tensor):
            torch._foreach_sub_(params, [along(pace, g) * g for g in gradient])
        else:
            torch._foreach_add_(params, gradient, alpha=-pace)

    def _adamw(
        self, t: int, params: list[Tensor], memory: list[Tensor], gradient: list[Tensor], pace: float | Tensor
    ) -> None:
        mean, square = memory[: len(params)], memory[len(params) :]
        decay = self.weight_decay
        if decay and isinstance(pace, Tensor):
            torch._foreach_sub_(params, [along(pace * decay, p) * p for p in params])
        elif decay:
            torch._foreach_mul_(params, 1.0 - pace * decay)
        torch._foreach_lerp_(mean, gradient, 1.0 - BETA_1)
        torch._foreach_mul_(square, BETA_2)
        torch._foreach_addcmul_(square, gradient, gradient, 1.0 - BETA_2)
        scale = torch._foreach_sqrt(square)
        torch._foreach_div_(scale, (1.0 - BETA_2**t) ** 0.5)
        torch._foreach_add_(scale, EPS)
        share = pace / (1.0 - BETA_1**t)
        if isinstance(share, Tensor):
            torch._foreach_sub_(params, [along(share, m) * m / s for m, s in zip(mean, scale, strict=True)])
        else:
            torch._foreach_addcdiv_(params, mean, scale, -share)

    def __post_init__(self) -> None:
        for kind, value, valid in (
            ("optimizer", self.optimizer, get_args(OptimizerName)),
            ("schedule", self.schedule, get_args(Schedule)),
        ):
            if value not in valid:
                raise unknown(kind, value, valid)
        try:
            check_momentum(self.optimizer, self.momentum)
        except ValueError as error:
            raise ConfigError(f"the training of a model {error}") from error


@dataclass(frozen=True)
class Optimizer:
    """The optimizer of one fit, instead of the run's settings; None takes the run's.

    Attributes:
        lr: η; a 0-d tensor may differ by client and round.
        kind: sgd or adamw, which restart in every fit.
        schedule: constant, or linear: to 0 over the client's steps of the fit.
        momentum: μ of sgd.
        weight_decay: δ.
        own: κ, for tensors of the start that the model does not have, which only terms use: their rate is κη, for both
            rules.
        clip_each: whether the run's clip bounds each gradient that a direction requests, instead of the sum of the
            direction and the proximal pull.
    """

    lr: float | Tensor | None = None
    kind: OptimizerName | None = None
    schedule: Schedule | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    own: float | None = None
    clip_each: bool = False

    @classmethod
    def plain(cls, lr: float | Tensor | None = None, clip_each: bool = False) -> Optimizer:
        """Return one whose steps are just p − η g, whatever the run's settings are."""
        return cls(lr, "sgd", "constant", momentum=0.0, weight_decay=0.0, clip_each=clip_each)

    def rule(self, run: UpdateRule) -> UpdateRule:
        """Return the rule of a fit in a run with rule `run`; a rate that is a tensor is not included."""
        overrides: dict[str, Any] = {
            "lr": None if isinstance(self.lr, Tensor) else self.lr,
            "optimizer": self.kind,
            "schedule": self.schedule,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "own": self.own,
        }
        overrides = {name: value for name, value in overrides.items() if value is not None}
        return replace(run, **overrides) if overrides else run


OF_RUN = Optimizer()
"""The run's settings."""


def clip_norm(gradient: Sequence[Tensor], limit: float, stacked: bool) -> None:
    """Clip one model's gradient to norm `limit`, separately for each client, as torch's clip_grad_norm_ does.

    `gradient` are all its tensors, [clients, ...] (without that axis unless `stacked`).
    """
    first = 1 if stacked else 0
    squares = sum(g.square().flatten(first).sum(-1) if g.ndim > first else g.square() for g in gradient)
    assert isinstance(squares, Tensor)
    scale = (limit / (squares.sqrt() + CLIP_EPS)).clamp(max=1.0)
    for g in gradient:
        g.mul_(along(scale, g))


def along(scale: Tensor, like: Tensor) -> Tensor:
    """Return `scale` [clients] (or 0-d) shaped to multiply `like` [clients, ...]."""
    return scale.reshape(scale.shape + (1,) * (like.ndim - scale.ndim))


_SET = DEFAULT.train.round_schedule


@dataclass(frozen=True)
class RoundSchedule:
    """A learning rate schedule over rounds, as in `tailorfl.settings.train`.

    Raises:
        ConfigError: unknown kind, or a kind that needs the number of rounds without it.
    """

    kind: Fall = _SET.kind
    rounds: int | None = None
    """Number of rounds of the run."""
    milestones: tuple[float, ...] = _SET.milestones
    factor: float = _SET.factor
    floor: float = _SET.floor
    shift: float = _SET.shift
    deployment: Deployment = _SET.deployment

    def __post_init__(self) -> None:
        if self.kind not in get_args(Fall):
            raise unknown("round schedule", self.kind, get_args(Fall))
        if self.rounds is None and self.is_relative:
            raise ConfigError(
                f"a round schedule of kind {self.kind} depends on the total number of rounds; give it, as in "
                f"RoundSchedule('{self.kind}', rounds=100)"
            )

    @property
    def is_relative(self) -> bool:
        """Whether it depends on the number of rounds of the run."""
        return self.kind == "cosine" or (self.kind == "step" and any(m < 1 for m in self.milestones))

    def share(self, round: int) -> float:
        """Return s(t) for a round counted from 0."""
        if self.kind == "step":
            total = self.rounds or 0
            # in floating point m · total may be slightly above an integer
            passed = sum(round + 1e-9 >= (m * total if m < 1 else m) for m in self.milestones)
            return float(self.factor**passed)
        if self.kind == "cosine":
            done = min(round / (self.rounds or 1), 1.0)
            return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2
        return self.shift / (self.shift + round) if self.kind == "inverse" else 1.0

    def deployed(self, rounds: int) -> float:
        """Return the factor of the rate for tuning models after `rounds` rounds."""
        return self.share(max(rounds - 1, 0)) if self.deployment == "last" else 1.0


CONSTANT = RoundSchedule()
