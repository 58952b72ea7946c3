"""The fall of local training's learning rate from round to round.

    η_t = lr · s(t),   t the rounds before this one, T the rounds of the run

    constant   s = 1
    step       s = factor^(number of milestones passed), a milestone m < 1 after m·T rounds, m ≥ 1 after m rounds
    cosine     s = floor + (1 − floor) (1 + cos(π t/T)) / 2
    inverse    s = shift / (shift + t)                     the 1/t of stochastic approximation

Every rate by which a client moves a model is multiplied: the run's, and those that a method has of its own. What is
part of an objective (Per-FedAvg's α) and steps of the server are not. Tuning for deployment, of clients that trained
and of late ones, takes the rate of the last round, or with `deployment: first` that of the first.

| symbol | here |
|---|---|
| T | `rounds` |
| s(t) | `share` |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from tailorfl.errors import ConfigError, unknown
from tailorfl.settings.experiment import DEFAULT
from tailorfl.settings.train import Deployment, Fall

_SET = DEFAULT.train.round_schedule


@dataclass(frozen=True)
class RoundSchedule:
    """A fall of the rate over rounds, as `tailorfl.settings.train` declares it.

    Raises:
        ConfigError: unknown kind, or one that needs to know the number of rounds and does not.
    """

    kind: Fall = _SET.kind
    rounds: int | None = None
    """Rounds of the run."""
    milestones: tuple[float, ...] = _SET.milestones
    factor: float = _SET.factor
    floor: float = _SET.floor
    shift: float = _SET.shift
    deployment: Deployment = _SET.deployment

    def __post_init__(self) -> None:
        if self.kind not in get_args(Fall):
            raise unknown("round schedule", self.kind, get_args(Fall))
        relative = self.kind == "step" and any(m < 1 for m in self.milestones)
        if self.rounds is None and (relative or self.kind == "cosine"):
            raise ConfigError(
                f"a round schedule of kind {self.kind} falls with the share of the rounds that are done; say how many "
                f"there are, as RoundSchedule('{self.kind}', rounds=100)"
            )

    def share(self, round: int) -> float:
        """Return s(t) for a round counted from 0."""
        if self.kind == "step":
            total = self.rounds or 0
            # 0.7 · 10 is a little more than 7.
            passed = sum(round + 1e-9 >= (m * total if m < 1 else m) for m in self.milestones)
            return float(self.factor**passed)
        if self.kind == "cosine":
            done = min(round / (self.rounds or 1), 1.0)
            return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2
        return self.shift / (self.shift + round) if self.kind == "inverse" else 1.0

    def deployed(self, rounds: int) -> float:
        """Return the share of the rate with which models are tuned after so many rounds."""
        return self.share(max(rounds - 1, 0)) if self.deployment == "last" else 1.0


CONSTANT = RoundSchedule()
