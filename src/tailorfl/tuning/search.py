"""The search for one method's settings: the next trial, until the budget is used up, and the results.

Its state is the list of trials in the ledger, so a killed search continues after the finished trials; unfinished ones
are trained first, with their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tailorfl.evaluation.comparisons import expected_best
from tailorfl.settings.experiment import ExperimentConfig, MethodConfig
from tailorfl.tuning.samplers import Search, propose, size
from tailorfl.tuning.space import Space, edges, start
from tailorfl.tuning.training import Outcome, Task
from tailorfl.tuning.trials import Ledger, Trial

WIDENED_AT = (1 / 2, 3 / 4)
"""Shares of the budget after which a grid is widened if the best value so far lies at its edge."""


@dataclass(frozen=True)
class Tuned:
    """The search space and all trials of one method."""

    label: str
    space: Space
    trials: Sequence[Trial]
    higher_is_better: bool

    @property
    def best(self) -> Trial | None:
        """The first of the completed trials with the best score, or None without one."""
        complete = [t for t in self.trials if t.state == "complete" and t.score is not None]
        sign = 1 if self.higher_is_better else -1
        return max(complete, key=lambda t: (sign * (t.score or 0.0), -t.number), default=None)

    @property
    def chosen(self) -> dict[str, Any]:
        """The chosen values; empty if no trial was completed."""
        return {} if self.best is None else dict(self.best.values)

    @property
    def samples(self) -> int:
        """The samples of all trials."""
        return sum(trial.samples for trial in self.trials)

    def expected_of(self, samples: Sequence[float]) -> list[float | None]:
        """Return the expected best score of each budget in samples, or None if it pays for no trial.

        The number of trials of a budget is its ratio to a trial's average cost. A failed trial counts as the worst one
        with a score, a trial that was stopped early with its last score.
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


class MethodSearch:
    """The trials of one line of an experiment.

    Args:
        config: the experiment of the trials.
        allowance: the method's budget in samples.
        space: the initial space; with `widen` it may grow.
        ended: called with every finished trial.
    """

    def __init__(
        self,
        search: Search,
        config: ExperimentConfig,
        line: MethodConfig,
        space: Space,
        allowance: float,
        ledger: Ledger,
        *,
        widen: bool = False,
        ended: Callable[[str, Trial], None] = lambda label, trial: None,
    ) -> None:
        self.search, self.allowance = search, allowance
        self._config, self._line, self._base, self._widen = config, line, space, widen
        self._ledger, self._ended = ledger, ended
        self._first: Mapping[str, Any] | None = start(config, line, space)
        self.trials = ledger.open(search.label, search.higher_is_better)
        self._waiting = [trial for trial in self.trials if not trial.done]

    def next(self) -> Task | None:
        """Return the next trial to train, or None if the budget is used up or nothing is left to try."""
        if self._waiting:
            return self._task(self._waiting.pop(0))
        running = sum(not trial.done for trial in self.trials)
        charges = [self._charge(trial) for trial in self.trials if trial.done]
        if not left(self.allowance, self.search.trials, charges, running):
            return None
        space = self.space()
        values = propose(self.search, space, self.trials, self._first)
        if values is None:
            return None
        trial = Trial(len(self.trials), values)
        self._ledger.begin(self.search.label, trial, space)
        self.trials.append(trial)
        return self._task(trial)

    def take(self, number: int, outcome: Outcome) -> None:
        """Store the outcome of a trial."""
        trial = self.trials[number] = replace(
            self.trials[number],
            state=outcome.state,
            score=outcome.score,
            samples=outcome.samples,
            seconds=outcome.seconds,
            reason=outcome.reason,
        )
        if outcome.state != "failed":
            self._ledger.keep_engine(self.search.label, outcome.engine)
        self._ledger.tell(self.search.label, trial)
        self._ended(self.search.label, trial)

    def space(self) -> Space:
        """Return the present space: the initial one, widened at the sides where the best value lay at an edge.

        It is a function of the finished trials, so that it is the same after an interruption.
        """
        space = self._base
        if not self._widen:
            return space
        for share in WIDENED_AT:
            trials = self._first_of(share, space)
            if trials is None:
                return space
            best = Tuned(self.search.label, space, trials, self.search.higher_is_better).chosen
            sides = edges(self._config, self._line, space, best)
            space = {key: d.beyond(sides[key]) if key in sides else d for key, d in space.items()}
        return space

    def tuned(self) -> Tuned:
        """Return the results of the search."""
        return Tuned(self.search.label, self.space(), self.trials, self.search.higher_is_better)

    @property
    def used(self) -> float:
        """The budget used by the finished trials, in samples."""
        return sum(self._charge(trial) for trial in self.trials if trial.done)

    def _charge(self, trial: Trial) -> float:
        """Return a trial's share of the budget in samples: a failed one counts as at least a complete one."""
        complete = self.allowance / self.search.trials
        return max(trial.samples, complete) if trial.state == "failed" else trial.samples

    def _first_of(self, share: float, space: Space) -> list[Trial] | None:
        """Return the first trials that used a share of the budget, or all points of a space.

        None if the search has not come that far.
        """
        for count, trial in enumerate(self.trials, start=1):
            if not trial.done:
                return None
            first = self.trials[:count]
            spent = sum(map(self._charge, first))
            inside = [t for t in first if all(space[key].has(value) for key, value in t.values.items())]
            if spent >= share * self.allowance or len(inside) >= size(space):
                return first
        return None

    def _task(self, trial: Trial) -> Task:
        return Task(self.search.label, trial.number, trial.values, self._ledger.engine(self.search.label))


def left(allowance: float, trials: int, used: Iterable[float], begun: int = 0) -> bool:
    """Return whether another trial fits: it must not end further above the allowance than the last one ended below.

    Args:
        allowance: the method's budget in samples.
        trials: number of trials for which the budget was planned.
        used: cost of each finished trial in samples.
        begun: number of unfinished trials, each counted as the mean of the others.
    """
    spent = list(used)
    mean = sum(spent) / len(spent) if sum(spent) > 0 else allowance / trials
    if sum(spent) <= 0 and len(spent) + begun >= trials:  # for methods that train nothing
        return False
    return sum(spent) + begun * mean + mean / 2 <= allowance
