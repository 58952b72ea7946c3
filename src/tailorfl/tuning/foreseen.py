"""What a tuning would take, before its first trial: how many trials of each method its budget pays, and seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tailorfl.runs.budget import nearest
from tailorfl.runs.cost_estimate import estimate
from tailorfl.tuning.run import Plan
from tailorfl.tuning.samplers import size
from tailorfl.tuning.training import Trainer


@dataclass(frozen=True)
class Foreseen:
    """Of one method."""

    trials: int
    """Those that train all their rounds; where some are stopped early there are more, which take as long together."""
    seconds: float


def foreseen(plan: Plan, watch: Callable[[str], None] | None = None) -> dict[str, Foreseen]:
    """Return what every method of a tuning would take with one worker, by label; `watch` is told what is tried.

    A trial takes the rounds of the budget, and evaluations of validation parts alone: one at its end, and where models
    are selected by them those on the way.

    Raises:
        TailorflError: the experiment cannot be built, or nobody has validation samples; the message says why.
    """
    config = plan.config
    every = config.eval.every if config.eval.select == "val" else 0
    looks = config.eval.model_copy(update={"sets": ("val",), "every": every})
    allowance = plan.budget.trials * Trainer(config, Path()).allowance()
    found = {}
    for label, row in estimate(config.model_copy(update={"eval": looks}), watch).methods.items():
        each = row["gradients_per_round"] * row["rounds"] * len(config.seeds)
        paid = nearest(allowance, each) if each else plan.budget.trials
        trials = int(min(paid, size(plan.spaces[label])))
        found[label] = Foreseen(trials, row["seconds"] * trials)
    return found
