"""The search for one method's settings: what to train next, and what follows from what was trained.

Its state is the list of trials in the ledger, so a search that was killed goes on where it stood: trials that were
begun are trained on first, with their values.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tailorfl.settings.experiment import ExperimentConfig, MethodConfig
from tailorfl.tuning.budget import left
from tailorfl.tuning.outcome import Tuned
from tailorfl.tuning.samplers import Search, propose, rungs, size, step, stops
from tailorfl.tuning.space import Space, edges, start
from tailorfl.tuning.training import Outcome, Stretch
from tailorfl.tuning.trials import Ledger, Trial

WIDENED_AT = (1 / 2, 3 / 4)
"""Shares of the budget after which a grid is widened, where the best value so far lies at its edge."""


class MethodSearch:
    """The trials of one line of an experiment.

    Args:
        config: what trials run.
        allowance: samples that the method may see.
        space: where it begins; `widen` says whether it may grow.
        told: called with every trial that has ended.
    """

    def __init__(
        self,
        search: Search,
        config: ExperimentConfig,
        line: MethodConfig,
        space: Space,
        allowance: float,
        ledger: Ledger,
        folder: Path,
        *,
        widen: bool = False,
        told: Callable[[str, Trial], None] = lambda label, trial: None,
    ) -> None:
        self.search, self.allowance = search, allowance
        self._config, self._line, self._base, self._widen = config, line, space, widen
        self._ledger, self._folder, self._told = ledger, folder, told
        self._rungs = rungs(search.sampler, config.rounds if line.rounds is None else line.rounds)
        self._first: Mapping[str, Any] | None = start(config, line, space)
        self.trials = ledger.open(search.label, search.higher_is_better)
        self._waiting = [t.number for t in self.trials if not t.done]

    def next(self) -> Stretch | None:
        """Return what to train next; None where the budget is used up, or nothing is left to try."""
        if self._waiting:
            return self._stretch(self.trials[self._waiting.pop(0)])
        running = sum(not t.done for t in self.trials)
        if not left(self.allowance, self.search.trials, map(self._charge, self._done), running):
            return None
        space = self.space()
        values = propose(self.search, space, self.trials, self._first)
        if values is None:
            return None
        trial = Trial(len(self.trials), values)
        self._ledger.begin(self.search.label, trial, space)
        self.trials.append(trial)
        return self._stretch(trial)

    def take(self, number: int, outcome: Outcome) -> Stretch | None:
        """Take what came of a stretch of a trial; returns the next one where the trial goes on."""
        trial = self.trials[number]
        rung = len(trial.scores)
        trial = replace(
            trial,
            score=outcome.score,
            samples=outcome.samples,
            seconds=trial.seconds + outcome.seconds,
            reason=outcome.reason,
        )
        if outcome.score is None:
            self._end(replace(trial, state="failed"))
            return None
        self._ledger.keep_engine(self.search.label, outcome.engine)
        if self._rungs > 1:
            trial = replace(trial, scores={**trial.scores, step(rung): outcome.score})
        if rung == self._rungs - 1:
            self._end(replace(trial, state="complete"))
            return None
        stop, noted = stops(self.search, self.trials, trial, self._rungs)
        trial = self.trials[number] = replace(trial, rungs=noted)
        if stop:
            self._end(replace(trial, state="pruned"))
            return None
        self._ledger.note(self.search.label, trial)
        return self._stretch(trial)

    def space(self) -> Space:
        """Return what is searched now: the first space, widened at the sides where the best value lay at an edge.

        A function of the trials that have ended, so that it is the same after an interruption.
        """
        space = self._base
        if not self._widen:
            return space
        for share in WIDENED_AT:
            seen = self._first_of(share, space)
            if seen is None:
                return space
            best = Tuned(self.search.label, space, seen, self.search.higher_is_better).chosen
            sides = edges(self._config, self._line, space, best)
            space = {key: d.beyond(sides[key]) if key in sides else d for key, d in space.items()}
        return space

    def tuned(self) -> Tuned:
        """Return what the search has come to."""
        return Tuned(self.search.label, self.space(), self.trials, self.search.higher_is_better)

    @property
    def used(self) -> float:
        """What the trials that have ended count as, in samples."""
        return sum(map(self._charge, self._done))

    @property
    def _done(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.done]

    def _charge(self, trial: Trial) -> float:
        """Return what a trial takes of the budget: a failed one all that it would have taken."""
        whole = self.allowance / self.search.trials
        return max(trial.samples, whole) if trial.state == "failed" else trial.samples

    def _first_of(self, share: float, space: Space) -> list[Trial] | None:
        """Return the first trials that took a share of the budget, or all points of a space.

        None where it is not so far.
        """
        spent, seen = 0.0, []
        for trial in self.trials:
            if not trial.done:
                return None
            spent += self._charge(trial)
            seen.append(trial)
            inside = [t for t in seen if all(space[key].has(value) for key, value in t.values.items())]
            if spent >= share * self.allowance or len(inside) >= size(space):
                return seen
        return None

    def _stretch(self, trial: Trial) -> Stretch:
        share = step(len(trial.scores)) / step(self._rungs - 1)
        engine = self._ledger.engine(self.search.label)
        return Stretch(self.search.label, trial.number, trial.values, share, engine)

    def _end(self, trial: Trial) -> None:
        self.trials[trial.number] = trial
        self._ledger.tell(self.search.label, trial)
        shutil.rmtree(self._stretch(trial).place(self._folder), ignore_errors=True)
        self._told(self.search.label, trial)
