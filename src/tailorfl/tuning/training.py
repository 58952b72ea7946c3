"""Trains a trial: all its seeds, each from its first round, and scores it on validation data."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tailorfl.data.federation import Federation
from tailorfl.engines.choice import keep_choice
from tailorfl.errors import ConfigError, DataError, DivergenceError, MemoryLimitError, ModelError
from tailorfl.evaluation.leading import leading
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.evaluation.selection import Selection
from tailorfl.evaluation.summary import means
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.runs.job_loop import make_selection
from tailorfl.runs.process import raise_if_told
from tailorfl.runs.schedule import Limit, is_due, limit_of, of_fedavg, rounds_between
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.tuning.samplers import Sampler, pruner, rungs, step
from tailorfl.tuning.space import changed
from tailorfl.tuning.trials import Ledger, State

FAILURES = (ConfigError, DataError, DivergenceError, MemoryLimitError, ModelError)
"""Errors that a trial's values can cause; others, such as a full disk or a lost process, end the tuning."""


@dataclass(frozen=True)
class Task:
    """A trial to train."""

    label: str
    number: int
    values: Mapping[str, Any]
    engine: str | None = None
    """The engine to use, if it was chosen automatically before."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial."""

    state: State
    score: float | None
    """The validation metric, a mean over clients and seeds; None if the trial failed."""
    samples: int
    """Gradients of single samples, of all seeds."""
    seconds: float
    reason: str = ""
    engine: str = ""


@dataclass
class _SeedRun:
    """The unfinished training of a trial with one seed."""

    sim: Simulation
    selection: Selection | None
    limit: Limit
    every: int
    clients: Sequence[int] = ()


class Trainer:
    """Trains the trials of an experiment in one process; data are built once per seed.

    `config` is the experiment of the trials (`plan.tuned_on`), `folder` the result folder of the tuning; the sampler
    determines whether trials may be stopped early.
    """

    def __init__(self, config: ExperimentConfig, folder: Path, sampler: Sampler = "random") -> None:
        torch.set_num_threads(config.threads)
        self.config, self._folder, self._sampler = config, folder, sampler
        self._federations: dict[int, Federation] = {}
        self._warnings: set[str] = set()

    def federation(self, seed: int) -> Federation:
        """Return the data of a seed.

        Raises:
            DataError: the data cannot be used, or no client has validation samples.
        """
        of_data = self.config.data.seed_of(seed)
        if of_data not in self._federations:
            federation = make_federation(self.config, of_data, logged=self._warnings)
            if not federation.sizes("val")[: federation.num_clients].any():
                raise DataError(
                    "tuning chooses by validation samples, but no client has any; give the validation part a share in "
                    "data.split, such as {train: 0.7, val: 0.1, test: 0.2}"
                )
            self._federations[of_data] = federation
        return self._federations[of_data]

    def metric(self) -> str:
        """Return the metric by which settings are chosen."""
        return leading(self.federation(self.config.seeds[0]).source, self.config.eval.metric)

    def allowance(self) -> int:
        """Return the number of samples of a FedAvg trial, over all seeds."""
        jobs = [Job(self.config, self.config.methods[0], seed) for seed in self.config.seeds]
        sims = (make_simulation(job, self.federation(job.seed)) for job in jobs)
        return sum(of_fedavg(self.config, sim, "gradients") for sim in sims)

    def train(self, task: Task) -> Outcome:
        """Train a trial to its end, or until it is stopped early; a failure is part of the outcome."""
        begin, used, engine = time.perf_counter(), dict[int, int](), ""
        line = {m.label: m for m in self.config.methods}[task.label]
        count = rungs(self._sampler, self.config.rounds if line.rounds is None else line.rounds)
        runs: dict[int, _SeedRun] = {}

        def score_of(seed: int, rung: int) -> float:
            nonlocal engine
            is_last = rung == count - 1
            run = runs.pop(seed, None) or self._begin(Job(self.config, line, seed), task.engine)
            if not is_last:  # in the last stage, each run is freed before the next one begins
                runs[seed] = run
            try:
                return self._advance(run, step(rung) / step(count - 1))
            finally:
                used[seed], engine = run.sim.gradients, run.sim.engine.name

        def outcome(state: State, score: float | None, reason: str = "") -> Outcome:
            return Outcome(state, score, sum(used.values()), time.perf_counter() - begin, reason, engine)

        score = math.nan
        try:
            line = changed(self.config, line, task.values)
            for rung in range(count):
                score = math.fsum(score_of(seed, rung) for seed in self.config.seeds) / len(self.config.seeds)
                if rung < count - 1 and self._stops(task, rung, count, score):
                    return outcome("pruned", score)
        except FAILURES as error:
            return outcome("failed", None, str(error))
        return outcome("complete", score)

    def _begin(self, job: Job, engine: str | None) -> _SeedRun:
        sim = make_simulation(job, self.federation(job.seed), self._folder)
        if engine is not None:
            keep_choice(sim.engine, engine)
        limit = limit_of(job, sim)
        selection = make_selection(job.config, sim, self._folder)
        return _SeedRun(sim, selection, limit, rounds_between(job.config, sim))

    def _advance(self, run: _SeedRun, share: float) -> float:
        """Train up to a share of the rounds and return the validation metric.

        Raises:
            DataError: the metric is missing or not finite.
        """
        limit, sim, protocol = _shared(run.limit, share), run.sim, self._protocol
        while not limit.reached(sim):
            run.clients = sim.step().clients
            if run.selection is not None and is_due(run.every, sim.round) and not limit.reached(sim):
                evaluate(sim, protocol, run.clients, run.selection)
            raise_if_told()
        score = means(evaluate(sim, protocol, run.clients, run.selection)).get(_judged(sim, self.metric()))
        if score is None or not math.isfinite(score):
            raise DataError(
                "its models have no validation score, for example because all outputs are infinite"
            )
        return float(score)

    def _stops(self, task: Task, rung: int, count: int, score: float) -> bool:
        with Ledger.opened(self._folder) as ledger:
            return ledger.stops(task.label, task.number, step(rung), score, pruner(self._sampler, count))

    @property
    def _protocol(self) -> Protocol:
        decisive = self.config.eval.metric
        further = () if decisive is None else (decisive,)
        return Protocol(("val",), generation=self.config.eval.generation, metrics=further)


def _shared(limit: Limit, share: float) -> Limit:
    """Return a limit reduced to a share of the rounds; unchanged for 1."""
    if share == 1:
        return limit
    return Limit(max(1, round(limit.rounds * share)), limit.kind, limit.allowance * share)


def _judged(sim: Simulation, metric: str) -> str:
    """Return the name of a method's decisive mean: that of its deployed models on validation parts."""
    return f"{'personal' if sim.method.has_personal else 'global'}/val/{metric}"
