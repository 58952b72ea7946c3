"""Trains one stretch of one trial: from its last checkpoint to a share of its rounds, and looks at validation data."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tailorfl.data.federation import Federation
from tailorfl.engines.auto import keep_choice
from tailorfl.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    MemoryLimitError,
    ModelError,
    RunError,
)
from tailorfl.evaluation.leading import leading
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.evaluation.summary import means
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs import checkpoints
from tailorfl.runs.budget import Limit, limit_of, of_fedavg
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.eval_schedule import is_due, rounds_between
from tailorfl.runs.files import decode, encode, is_locked
from tailorfl.runs.job import Job
from tailorfl.runs.job_loop import Saver, make_selection
from tailorfl.runs.signals import raise_if_told
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.names import slug
from tailorfl.tuning.space import changed

log = logging.getLogger(__name__)

FAILURES = (ConfigError, DataError, DivergenceError, MemoryLimitError, ModelError)
"""What a trial's own values can bring about; a full disk or a lost process ends the tuning instead."""
UNDER_WAY = "under-way"
"""Folder of the trials that have not ended; a trial's checkpoints are deleted with its end."""


@dataclass(frozen=True)
class Stretch:
    """What a process is told to do: a trial, and up to which share of its rounds."""

    label: str
    number: int
    values: Mapping[str, Any]
    share: float
    engine: str | None = None
    """The engine to take, where an automatic choice fell on it before."""

    def place(self, folder: Path) -> Path:
        """Where the trial's checkpoints lie."""
        return folder / UNDER_WAY / f"{slug(self.label)}-{self.number}"


@dataclass(frozen=True)
class Outcome:
    """What came of a stretch."""

    score: float | None
    """The validation metric, a mean over clients and seeds; None where the trial failed."""
    samples: int
    """Gradients of single samples since the beginning of the trial, of all seeds."""
    seconds: float
    """Of this stretch."""
    reason: str = ""
    engine: str = ""


class Trainer:
    """Trains the stretches of an experiment's trials in one process; data are built once a seed.

    `config` is what trials run (`budget.tuned_on`), `folder` the result folder of the tuning.
    """

    def __init__(self, config: ExperimentConfig, folder: Path) -> None:
        torch.set_num_threads(config.threads)
        self.config, self._folder = config, folder
        self._federations: dict[int, Federation] = {}
        self._said: set[str] = set()

    def federation(self, seed: int) -> Federation:
        """Return the data of a seed.

        Raises:
            DataError: they cannot be used, or nobody has validation samples.
        """
        of_data = self.config.data.seed_of(seed)
        if of_data not in self._federations:
            found = make_federation(self.config, of_data, said=self._said)
            if not found.sizes("val")[: found.num_clients].any():
                raise DataError(
                    "tuning chooses by validation samples, but no client has any; leave a share for them in "
                    "data.split, such as {train: 0.7, val: 0.1, test: 0.2}"
                )
            self._federations[of_data] = found
        return self._federations[of_data]

    def metric(self) -> str:
        """Return the metric that settings are chosen by."""
        return leading(self.federation(self.config.seeds[0]).source, self.config.eval.metric)

    def allowance(self) -> int:
        """Return the samples that a trial of FedAvg sees, over all seeds."""
        total = 0
        for seed in self.config.seeds:
            job = Job(self.config, self.config.methods[0], seed)
            sim = make_simulation(job, self.federation(seed))
            total += of_fedavg(self.config, sim, "gradients")
        return total

    def train(self, stretch: Stretch) -> Outcome:
        """Train a trial up to a share of its rounds, from where its checkpoints are; what fails is told."""
        begin, samples, scores, engine = time.perf_counter(), 0, [], ""
        line = {m.label: m for m in self.config.methods}[stretch.label]
        for seed in self.config.seeds:
            sim = None
            try:
                job = Job(self.config, changed(self.config, line, stretch.values), seed)
                place = stretch.place(self._folder) / f"seed-{seed}"
                sim = make_simulation(job, self.federation(seed), place)
                if stretch.engine is not None:
                    keep_choice(sim.engine, stretch.engine)
                scores.append(self._train(job, sim, place, stretch.share, stretch.values))
            except FAILURES as error:
                samples += 0 if sim is None else sim.gradients
                return Outcome(None, samples, time.perf_counter() - begin, str(error), engine)
            samples, engine = samples + sim.gradients, sim.engine.name
        return Outcome(math.fsum(scores) / len(scores), samples, time.perf_counter() - begin, "", engine)

    def _train(
        self, job: Job, sim: Simulation, place: Path, share: float, values: Mapping[str, Any]
    ) -> float:
        """Return the validation metric of one seed after a share of the rounds; raises DataError where it has none."""
        identity = {"method": job.method.name, "seed": job.seed, "values": dict(values)}
        exists = _goes_on(place, identity)
        with RunStore.open(place) if exists else RunStore.create(place, identity, overwrite=True) as store:
            selection = make_selection(job.config, sim, place)
            found = store.latest_checkpoint() if exists else None
            if found is not None:
                _, tensors, facts = found
                sim.load(tensors, facts)
                if selection is not None:
                    selection.load(tensors)
            limit = _shared(limit_of(job.config, job.rounds, job.method.rounds is not None, sim), share)
            saver = Saver(sim, store, job.config.checkpoint_every, selection)
            clients: tuple[int, ...] = ()
            every = rounds_between(job.config, sim)
            while not limit.reached(sim):
                clients = sim.step().clients
                last = limit.reached(sim)
                if selection is not None and is_due(every, sim.round) and not last:
                    evaluate(sim, self._protocol, clients, selection)
                if last or saver.due():
                    saver.save(0.0)
                raise_if_told()
            found_means = means(evaluate(sim, self._protocol, clients, selection))
            score = found_means.get(_judged(sim, self.metric()))
        if score is None or not math.isfinite(score):
            raise DataError("its models have no validation score, as where all outputs are infinite")
        return float(score)

    @property
    def _protocol(self) -> Protocol:
        return Protocol(("val",), generation=self.config.eval.generation)


def _goes_on(place: Path, identity: Mapping[str, Any]) -> bool:
    """Whether a folder has a sound state of this very trial; what else lies there is deleted."""
    if not place.exists():
        return False
    try:
        store = RunStore.open(place, readonly=True)
        damaged = checkpoints.problems(place)
        if (
            store.config == decode(encode(identity))
            and store.status
            and damaged.keys() < {*checkpoints.rounds(place)}
        ):
            return True
    except RunError as error:
        log.warning("a trial is trained again: %s", error)
    if not is_locked(place):  # by a process that outlived another one, which RunStore tells of
        shutil.rmtree(place)
    return False


def _shared(limit: Limit, share: float) -> Limit:
    """Return a limit cut to a share of the rounds; all of it for 1."""
    if share == 1:
        return limit
    return Limit(max(1, round(limit.rounds * share)), limit.kind, limit.allowance * share)


def _judged(sim: Simulation, metric: str) -> str:
    """Return the name of the mean that a method is judged by: of its deployable models on validation parts."""
    return f"{'personal' if sim.method.has_personal else 'global'}/val/{metric}"
