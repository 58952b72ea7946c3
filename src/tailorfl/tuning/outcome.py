"""What a tuning comes to: what was chosen of every method, `tuning.json`, and the experiment to compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tailorfl.evaluation.expected import expected_best
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.tuning.budget import Budget
from tailorfl.tuning.space import Space, changed, edges
from tailorfl.tuning.trials import Trial

TUNED = "tuned.yaml"
"""The experiment with the chosen settings, in the folder of a tuning."""


@dataclass(frozen=True)
class Tuned:
    """One method: what was searched, and all that was tried."""

    label: str
    space: Space
    trials: Sequence[Trial]
    higher_is_better: bool

    @property
    def best(self) -> Trial | None:
        """The trial with the best score of those that came to their end, of equals the first; None without any."""
        done = [t for t in self.trials if t.state == "complete" and t.score is not None]
        sign = 1 if self.higher_is_better else -1
        return max(done, key=lambda t: (sign * (t.score or 0.0), -t.number), default=None)

    @property
    def chosen(self) -> dict[str, Any]:
        """The values that were chosen; nothing where no trial came to its end."""
        return {} if self.best is None else dict(self.best.values)

    @property
    def samples(self) -> int:
        """What all trials saw."""
        return sum(trial.samples for trial in self.trials)

    def expected_of(self, samples: Sequence[float]) -> list[float | None]:
        """Return the expected best score of budgets of so many samples; None where one pays for no trial.

        A budget pays for as many trials as it is times what a trial took on average. A trial that failed counts as the
        worst that has a score, a trial that was stopped early with its last score.
        """
        scores = [t.score for t in self.trials if t.score is not None]
        if not scores:
            return [None for _ in samples]
        worst = min(scores) if self.higher_is_better else max(scores)
        everything = scores + [worst] * sum(t.state == "failed" for t in self.trials)
        done = sum(t.done for t in self.trials)
        each = self.samples / done
        draws = [math.floor(budget / each + 0.5) if each else done for budget in samples]
        found = expected_best(everything, [max(n, 1) for n in draws], higher_is_better=self.higher_is_better)
        return [value if n else None for n, value in zip(draws, found, strict=True)]


def at_edge(config: ExperimentConfig, tuned: Tuned) -> dict[str, int]:
    """Return the settings whose chosen value lies at an edge of what was tried: -1 the lower one, 1 the upper one."""
    line = {m.label: m for m in config.methods}[tuned.label]
    return edges(config, line, tuned.space, tuned.chosen)


def ranks(tuned: Sequence[Tuned]) -> dict[str, int | None]:
    """Return the place of every method by its best validation score, 1 the best and equals alike; None without one."""
    scores = {t.label: None if t.best is None else t.best.score for t in tuned}

    def better(one: float, other: float, higher: bool) -> bool:
        return one > other if higher else one < other

    return {
        t.label: None
        if (mine := scores[t.label]) is None
        else 1 + sum(s is not None and better(s, mine, t.higher_is_better) for s in scores.values())
        for t in tuned
    }


def as_json(
    config: ExperimentConfig, budget: Budget, samples: int, sampler: str, metric: str, tuned: Sequence[Tuned]
) -> dict[str, Any]:
    """Return the content of tuning.json; `samples` are what each method was allowed to see."""
    places = ranks(tuned)
    return {
        "budget": {
            "trials": budget.trials,
            "rounds": budget.rounds,
            "seeds": list(budget.seeds),
            "samples": samples,
        },
        "sampler": sampler,
        "metric": metric,
        "methods": {
            one.label: {
                "space": {key: dimension.plain() for key, dimension in one.space.items()},
                "chosen": one.chosen,
                "rank": places[one.label],
                "edges": list(at_edge(config, one)),
                "trials": [trial.plain() for trial in one.trials if trial.done],
            }
            for one in tuned
        },
    }


def experiment(config: ExperimentConfig, chosen: Mapping[str, Mapping[str, Any]]) -> ExperimentConfig:
    """Return the experiment with the chosen settings, for its own rounds and seeds."""
    lines = tuple(changed(config, line, chosen[line.label]) for line in config.methods)
    return config.model_copy(update={"name": f"{config.name}-tuned", "methods": lines, "search": {}})
