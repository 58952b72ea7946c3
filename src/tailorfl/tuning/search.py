"""The search for one method's settings: what to train next, until the budget is used up.

Its state is the list of trials in the ledger, so a search that was killed goes on with what has ended; trials that were
begun are trained first, with their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tailorfl.settings.experiment import ExperimentConfig, MethodConfig
from tailorfl.tuning.budget import left
from tailorfl.tuning.outcome import Tuned
from tailorfl.tuning.samplers import Search, propose, size
from tailorfl.tuning.space import Space, edges, start
from tailorfl.tuning.training import Outcome, Task
from tailorfl.tuning.trials import Ledger, Trial

WIDENED_AT = (1 / 2, 3 / 4)
"""Shares of the budget after which a grid is widened, where the best value so far lies at its edge."""


class MethodSearch:
    """The trials of one line of an experiment.

    Args:
        config: what trials run.
        allowance: samples that the method may see.
        space: where it begins; `widen` says whether it may grow.
        ended: called with every trial that has ended.
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
        """Return what to train next; None where the budget is used up, or nothing is left to try."""
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
        """Write down what came of a trial."""
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
        """Return what is searched now: the first space, widened at the sides where the best value lay at an edge.

        A function of the trials that have ended, so that it is the same after an interruption.
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
        """Return what the search has come to."""
        return Tuned(self.search.label, self.space(), self.trials, self.search.higher_is_better)

    @property
    def used(self) -> float:
        """What the trials that have ended count as, in samples."""
        return sum(self._charge(trial) for trial in self.trials if trial.done)

    def _charge(self, trial: Trial) -> float:
        """Return what a trial takes of the budget: a failed one all that it would have taken."""
        complete = self.allowance / self.search.trials
        return max(trial.samples, complete) if trial.state == "failed" else trial.samples

    def _first_of(self, share: float, space: Space) -> list[Trial] | None:
        """Return the first trials that took a share of the budget, or all points of a space.

        None where it is not so far.
        """
        spent = 0.0
        for count, trial in enumerate(self.trials, start=1):
            if not trial.done:
                return None
            spent += self._charge(trial)
            first = self.trials[:count]
            inside = [t for t in first if all(space[key].has(value) for key, value in t.values.items())]
            if spent >= share * self.allowance or len(inside) >= size(space):
                return first
        return None

    def _task(self, trial: Trial) -> Task:
        return Task(self.search.label, trial.number, trial.values, self._ledger.engine(self.search.label))
