"""What a tuning comes to: what was chosen of every method, `tuning.json`, and the experiment to compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailorfl.evaluation.expected import expected_best
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.tuning.plan import TUNED, Plan
from tailorfl.tuning.space import Space, changed, edges
from tailorfl.tuning.trials import Trial


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
        complete = [t for t in self.trials if t.state == "complete" and t.score is not None]
        sign = 1 if self.higher_is_better else -1
        return max(complete, key=lambda t: (sign * (t.score or 0.0), -t.number), default=None)

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
        scores += [worst] * sum(t.state == "failed" for t in self.trials)
        done = sum(t.done for t in self.trials)
        mean = self.samples / done
        draws = [math.floor(budget / mean + 0.5) if mean else done for budget in samples]
        best = expected_best(scores, [max(n, 1) for n in draws], higher_is_better=self.higher_is_better)
        return [value if n else None for n, value in zip(draws, best, strict=True)]


@dataclass(frozen=True)
class Tuning:
    """What a tuning has come to."""

    folder: Path
    plan: Plan
    samples: int
    """What every method was allowed to see."""
    metric: str
    methods: Sequence[Tuned]

    @property
    def experiment(self) -> Path:
        """The experiment with what was chosen, for `tailorfl.compare`."""
        return self.folder / TUNED

    def edges(self, tuned: Tuned) -> dict[str, int]:
        """Return the settings whose chosen value lies at an edge of what was tried: -1 the lower, 1 the upper one."""
        line = next(m for m in self.plan.config.methods if m.label == tuned.label)
        return edges(self.plan.config, line, tuned.space, tuned.chosen)

    def ranks(self) -> dict[str, int | None]:
        """Return the rank of every method by its best score, 1 the best and equals alike; None without one."""
        signed = {
            t.label: (t.best.score or 0.0) * (1 if t.higher_is_better else -1) for t in self.methods if t.best
        }
        ranks = {
            label: 1 + sum(rival > score for rival in signed.values()) for label, score in signed.items()
        }
        return {t.label: ranks.get(t.label) for t in self.methods}

    def as_json(self) -> dict[str, Any]:
        """Return the content of tuning.json."""
        budget, ranks = self.plan.budget, self.ranks()
        return {
            "budget": {
                "trials": budget.trials,
                "rounds": budget.rounds,
                "seeds": list(budget.seeds),
                "samples": self.samples,
            },
            "sampler": self.plan.request.sampler,
            "metric": self.metric,
            "methods": {
                tuned.label: {
                    "space": {key: dimension.plain() for key, dimension in tuned.space.items()},
                    "chosen": tuned.chosen,
                    "rank": ranks[tuned.label],
                    "edges": list(self.edges(tuned)),
                    "trials": [trial.plain() for trial in tuned.trials if trial.done],
                }
                for tuned in self.methods
            },
        }


def experiment(config: ExperimentConfig, chosen: Mapping[str, Mapping[str, Any]]) -> ExperimentConfig:
    """Return the experiment with the chosen settings, for its own rounds and seeds."""
    lines = tuple(changed(config, line, chosen[line.label]) for line in config.methods)
    return config.model_copy(update={"name": f"{config.name}-tuned", "methods": lines, "search": {}})
