"""The loop of a job: its rounds, records, checkpoints and summary; it begins a job or continues it where it stopped."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tailorfl.data.federation import Federation
from tailorfl.engines.choice import keep_choice
from tailorfl.errors import ConfigError, RunError
from tailorfl.evaluation.leading import leading
from tailorfl.evaluation.predictions import Kept
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.evaluation.selection import Selection
from tailorfl.evaluation.summary import Record, means, quantiles
from tailorfl.rounds.divergence import listed
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.extension import MODELS
from tailorfl.runs.files import numbers, write_text
from tailorfl.runs.fingerprint import made_with
from tailorfl.runs.job import Job, Observer
from tailorfl.runs.privacy import epsilon_so_far, spent
from tailorfl.runs.process import raise_if_told, why
from tailorfl.runs.records import finish, keeper, round_record, summary_of
from tailorfl.runs.schedule import EVERY, is_due, limit_of, long_final, protocol_of, rounds_between
from tailorfl.runs.store import TRACE, RunStore, amend, record_of
from tailorfl.settings.experiment import ExperimentConfig

log = logging.getLogger(__name__)
SHARE = 0.02
"""Share of the time that checkpoints may take if no interval is configured."""
BYTES_A_SECOND, WAIT = 200e6, 0.01
"""Expected cost of the first checkpoint: bytes per second for writing, hashing and reading back, and seconds of waiting
for the disk. Later ones are expected to cost as much as the last one."""


@dataclass(frozen=True)
class Backend:
    """The functions that differ between a simulation and a deployment.

    Attributes:
        federation: (settings, seed, source instead of the configured one, logged warnings) -> federation.
        simulation: (job, federation, the job's folder) -> simulation before its first round.
        evaluate: (simulation, protocol, the last round's clients, selection, kept predictions) -> records.
        done: called with the simulation after its last round.
        is_remote: whether clients are on other machines; these evaluate the models of a round only once.
    """

    federation: Callable[[ExperimentConfig, int, Any, set[str] | None], Federation]
    simulation: Callable[[Job, Federation, Path | None], Simulation]
    evaluate: Callable[[Simulation, Protocol, Sequence[int], Selection | None, Kept | None], list[Record]]
    done: Callable[[Simulation], None] = lambda sim: None
    is_remote: bool = False


SIMULATED = Backend(make_federation, make_simulation, evaluate)


def run_job(
    job: Job,
    sim: Simulation,
    folder: Path,
    resume: bool,
    watch: Observer,
    position: int,
    total: int,
    has_own_source: bool,
    data: Mapping[str, str],
    backend: Backend,
) -> None:
    """Do a job, with `resume` from its last checkpoint if there is one.

    `has_own_source` is whether the samples are the caller's, and `data` are digests of them; both are stored. `backend`
    has the functions for a simulation or a deployment.

    Raises:
        TailorflError: the job cannot be continued, or diverges.
    """
    identity = {"method": job.method.name, "label": job.method.label, "seed": job.seed}
    exists = resume and (folder / "config.json").is_file()
    origin = {"own_source": has_own_source, **made_with(job, sim.given, data)}
    config = {**identity, **origin, EVERY: rounds_between(job.config, sim)}
    with RunStore.open(folder) if exists else RunStore.create(folder, config, overwrite=True) as store:
        loop = _Loop(job, sim, store, watch, backend)
        if exists:
            loop.restore()
        expensive = long_final(sim, protocol_of(job.config, final=True), job.rounds)
        if expensive is not None:
            log.warning("%s", expensive)
        watch.job_started(job, position, total, job.rounds, sim.round)
        try:
            loop.run(identity)
        except (KeyboardInterrupt, SystemExit) as stop:
            store.mark("interrupted", f"{why(stop)} after round {sim.round} of {job.rounds}")
            raise


def make_selection(config: ExperimentConfig, sim: Simulation, folder: Path | None) -> Selection | None:
    """Return the selection of personal models, or None without one; it stores models like private states."""
    if config.eval.select == "last" or not sim.method.has_personal:
        return None
    metric = leading(sim.federation.source, config.eval.metric)
    return Selection(sim, folder if config.engine.states == "disk" else None, metric)


def check_sets(config: ExperimentConfig, sim: Simulation) -> None:
    """Check that the sets of an experiment may be evaluated.

    Raises:
        ConfigError: they reveal who took part in a round, which privacy keeps secret.
    """
    if sim.cohort_is_secret and "participants" in (*config.eval.sets, *config.eval.final):
        raise ConfigError(
            "the set 'participants' of eval.sets reveals who took part in a round, but epsilon holds only if nobody "
            "sees it; leave the set out, or set sampling=uniform"
        )


def _check_records(store: RunStore, rounds: int, traced: bool) -> None:
    """Raise RunError unless every round up to a checkpoint has its records, each exactly once."""
    done, clients = store.rounds(), store.clients()
    measured = [c for c in done.columns if c.startswith(MODELS)]
    evaluated = done["round"][done[measured].notna().any(axis=1)] if measured else done["round"][:0]
    expected = Counter(range(1, rounds + 1))
    records = {"rounds.jsonl": Counter(done["round"].tolist())}
    if traced:
        records[TRACE] = Counter(numbers(store.path / TRACE))
    lost = {name: expected - noted for name, noted in records.items()}
    lost["clients.jsonl"] = Counter(set(evaluated.tolist()) - set(clients["round"].tolist()))
    several = {name: noted - expected for name, noted in records.items()}
    for problem, files in (("has lost the records", lost), ("has several records", several)):
        for name, rounds_of in files.items():
            if rounds_of:
                raise RunError(
                    f"'{store.path / name}' {problem} of rounds {listed(sorted(rounds_of))}, so this job's curves "
                    "would be wrong; restore the file from a copy, or move the job's folder away to run the job again"
                )


class _Loop:
    """The rounds of a job, with its folder open."""

    def __init__(self, job: Job, sim: Simulation, store: RunStore, watch: Observer, backend: Backend) -> None:
        self._job, self._sim, self._store, self._watch, self._backend = job, sim, store, watch, backend
        self._selection = make_selection(job.config, sim, store.path)
        self._metric = leading(sim.federation.source, job.config.eval.metric)
        self._every = rounds_between(job.config, sim)
        self._seconds = 0.0
        """Seconds of the job before it was interrupted."""

    def restore(self) -> None:
        """Go back to the last checkpoint, or to the beginning if there is none."""
        sim, store = self._sim, self._store
        checkpoint = store.latest_checkpoint()
        if checkpoint is not None:
            _, tensors, facts = checkpoint
            sim.load(tensors, facts)
            if self._selection is not None:
                self._selection.load(tensors)
            self._seconds = float(facts["seconds"])
        # An automatically chosen engine stays, even if no checkpoint has it yet.
        records = store.rounds()
        if len(records):
            keep_choice(sim.engine, str(records["engine"].iloc[-1]))
        store.truncate_after(sim.round)
        _check_records(store, sim.round, sim.is_traced)

    def run(self, identity: dict[str, Any]) -> None:
        """Do the remaining rounds, evaluate, and finish the job; `identity` is for its summary."""
        job, sim, store, config = self._job, self._sim, self._store, self._job.config
        begin = time.perf_counter() - self._seconds
        saver = Saver(sim, store, config.checkpoint_every, self._selection)
        check_sets(config, sim)
        limit = limit_of(job, sim)
        predictions = keeper(job, sim)
        self._evaluate_again(limit.reached(sim), saver, begin)
        while not limit.reached(sim):
            done = sim.step()
            last = limit.reached(sim)
            record = round_record(sim, done, time.perf_counter() - begin)
            if not self._backend.is_remote and (last or is_due(self._every, sim.round)):
                records = self._evaluate(last, done.clients, predictions if last else None)
                record |= self._numbers(records) | epsilon_so_far(job, sim)
                store.append_clients(records)
                self._watch.evaluated(job, sim.round, first_named(means(records), self._metric))
            if done.trace is not None:
                store.append_trace(done.trace.line())
            store.append_round(record)
            recorded = time.perf_counter()
            self._watch.recorded(job, record)
            begin += time.perf_counter() - recorded  # the trackers' time is not the job's
            if last or saver.due():
                saver.save(time.perf_counter() - begin)
            if self._backend.is_remote:  # after a crash, the same models must be evaluated again
                self._evaluate_again(last, saver, begin)
            self._watch.round_done(job, done)
            raise_if_told()
        self._backend.done(sim)
        self._finish(summary_of(sim, store, identity, time.perf_counter() - begin, self._metric), predictions)

    def _finish(self, summary: dict[str, Any], predictions: Kept | None) -> None:
        job, sim, store = self._job, self._sim, self._store
        if self._selection is not None:
            summary["selection"] = self._selection.summary()
            write_text(store.path / "selection.csv", self._selection.csv())
        if predictions is not None:
            if predictions.is_empty:  # the last round was evaluated before the job was interrupted
                self._evaluate(True, (), predictions)
            summary |= finish(predictions, job, sim, store)
        if summary["loss_grew"] is not None:
            first, last = summary["loss_grew"]
            log.warning(
                "%s: the training loss is far too large, %.3g in the first round and %.3g in the last: training "
                "diverged, although all numbers are finite; lower train.lr, set train.clip, or check the scale of the "
                "data",
                job.name,
                first,
                last,
            )
        privacy = spent(job, sim)
        if privacy is not None:
            summary["privacy"] = privacy.summary()
            write_text(store.path / "privacy.csv", privacy.csv())
        store.finish(summary)
        self._watch.job_done(job, summary)

    def _evaluate(self, last: bool, clients: Sequence[int], predictions: Kept | None) -> list[Record]:
        protocol = protocol_of(self._job.config, final=last)
        return self._backend.evaluate(self._sim, protocol, clients, self._selection, predictions)

    def _numbers(self, records: list[Record]) -> dict[str, float]:
        """Return the entries of an evaluation in a round's record."""
        return means(records) | quantiles(records, self._metric)

    def _evaluate_again(self, last: bool, saver: Saver, begin: float) -> None:
        """Evaluate the last round if its record has no evaluation: as an intermediate one, or as the `last`.

        The evaluation of a former last round was removed. With a larger budget it can still be the last, for a method
        that uses much of it per round.
        """
        sim, store = self._sim, self._store
        if not sim.round or not (last or is_due(self._every, sim.round)):
            return
        record = record_of(store, sim.round)
        if any(key.startswith(MODELS) for key in record):
            return
        records = self._evaluate(last, record.get("clients", ()), None)
        numbers = self._numbers(records) | epsilon_so_far(self._job, sim)
        self._watch.evaluated(self._job, sim.round, first_named(means(records), self._metric))
        if self._backend.is_remote:  # uses of private samples for it, before the record says that it was made
            saver.save(time.perf_counter() - begin)
        amend(store, sim.round, {**record, **numbers}, records)
        self._watch.recorded(self._job, {"round": sim.round, **numbers})


def first_named(numbers: dict[str, float], metric: str) -> dict[str, float]:
    """Return means by "model/set/metric", with those of `metric` first."""
    return dict(sorted(numbers.items(), key=lambda item: not item[0].endswith(f"/{metric}")))


class Saver:
    """Saves the checkpoints of one run.

    Args:
        interval: rounds between checkpoints; None: as many checkpoints as take `SHARE` of the time, from the first
            round on.
        selection: the selected personal models, which are saved with the state.
    """

    def __init__(
        self, sim: Simulation, store: RunStore, interval: int | None, selection: Selection | None = None
    ) -> None:
        self._sim, self._store, self._interval, self._selection = sim, store, interval, selection
        self._saved_at = time.perf_counter()
        self._cost: float | None = None

    def due(self) -> bool:
        """Return whether a checkpoint is due after a round."""
        if self._interval is not None:
            return self._sim.round % self._interval == 0
        if self._cost is None:
            tensors, _ = self._dump()
            self._cost = WAIT + sum(t.numel() * t.element_size() for t in tensors.values()) / BYTES_A_SECOND
        return time.perf_counter() - self._saved_at >= self._cost / SHARE

    def save(self, seconds: float) -> None:
        """Save the present state; `seconds` is the run's time so far."""
        begin = time.perf_counter()
        tensors, facts = self._dump()
        self._store.save_checkpoint(self._sim.round, tensors, {**facts, "seconds": seconds})
        self._saved_at = time.perf_counter()
        self._cost = self._saved_at - begin

    def _dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = self._sim.dump()
        return tensors if self._selection is None else {**tensors, **self._selection.dump()}, facts
