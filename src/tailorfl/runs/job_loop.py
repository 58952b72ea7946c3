"""One job: its rounds, its records and checkpoints, and its summary; begun, or continued where it stopped."""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor

from tailorfl.engines.auto import keep_choice
from tailorfl.errors import ConfigError, RunError
from tailorfl.evaluation.leading import leading
from tailorfl.evaluation.selection import Selection
from tailorfl.evaluation.summary import means, quantiles
from tailorfl.rounds.divergence import listed
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.backend import SIMULATED, Backend
from tailorfl.runs.budget import limit_of
from tailorfl.runs.eval_schedule import EVERY, is_due, long_final, protocol_of, rounds_between
from tailorfl.runs.extension import MODELS
from tailorfl.runs.files import numbers, write_text
from tailorfl.runs.job import Job, Observer
from tailorfl.runs.prediction_log import finish, keeper
from tailorfl.runs.privacy import epsilon_so_far, spent
from tailorfl.runs.records import round_record, summary_of
from tailorfl.runs.signals import raise_if_told, why
from tailorfl.runs.store import TRACE, RunStore, amend, record_of
from tailorfl.settings.experiment import ExperimentConfig

log = logging.getLogger(__name__)
SHARE = 0.02
"""Checkpoints may take this share of the time when no interval is configured."""
BYTES_A_SECOND, WAIT = 200e6, 0.01
"""What the first checkpoint is expected to cost: bytes written, hashed and read back, and seconds of waiting for the
disk. Later ones are expected to cost what the last one did."""


def run_job(
    job: Job,
    sim: Simulation,
    folder: Path,
    resume: bool,
    watch: Observer,
    position: int,
    total: int,
    origin: dict[str, Any],
    backend: Backend = SIMULATED,
) -> None:
    """Do a job, from its last checkpoint on where `resume` and there is one; `origin` is kept with its settings.

    `backend` is where the clients of `sim` are.

    Raises:
        TailorflError: it cannot be continued, or diverges.
    """
    identity = {"method": job.method.name, "label": job.method.label, "seed": job.seed}
    exists = resume and (folder / "config.json").is_file()
    with (
        RunStore.open(folder)
        if exists
        else RunStore.create(
            folder,
            {**identity, **origin, EVERY: rounds_between(job.config, sim)},
            overwrite=True,
        ) as store
    ):
        selection = make_selection(job.config, sim, folder)
        found = store.latest_checkpoint() if exists else None
        seconds = 0.0
        if found is not None:
            _, tensors, facts = found
            sim.load(tensors, facts)
            if selection is not None:
                selection.load(tensors)
            seconds = float(facts["seconds"])
        if exists:
            _keep_engine(sim, store)
            store.truncate_after(sim.round)
            _check_records(store, sim.round, sim.is_traced)
        expensive = long_final(sim, protocol_of(job.config, final=True), job.rounds)
        if expensive is not None:
            log.warning("%s", expensive)
        watch.job_started(job, position, total, job.rounds, sim.round)
        try:
            _rounds(job, sim, store, watch, seconds, identity, selection, backend)
        except (KeyboardInterrupt, SystemExit) as stop:
            store.mark("interrupted", f"{why(stop)} after round {sim.round} of {job.rounds}")
            raise


def make_selection(config: ExperimentConfig, sim: Simulation, folder: Path | None) -> Selection | None:
    """Return what chooses personal models, where something does; it keeps them where private states are kept."""
    if config.eval.select == "last" or not sim.method.has_personal:
        return None
    metric = leading(sim.federation.source, config.eval.metric)
    return Selection(sim, folder if config.engine.states == "disk" else None, metric)


def check_sets(config: ExperimentConfig, sim: Simulation) -> None:
    """Nothing if the sets of an experiment may be evaluated.

    Raises:
        ConfigError: they say who took part in a round, which privacy keeps secret.
    """
    if sim.cohort_is_secret and "participants" in (*config.eval.sets, *config.eval.final):
        raise ConfigError(
            "the set 'participants' of eval.sets says who took part in a round, which this privacy keeps secret: its "
            "epsilon counts on nobody seeing it; leave the set out, or take sampling=uniform"
        )


def _keep_engine(sim: Simulation, store: RunStore) -> None:
    """Go on with the engine that an automatic choice fell on, also where it was not yet in a checkpoint."""
    done = store.rounds()
    if len(done):
        keep_choice(sim.engine, str(done["engine"].iloc[-1]))


def _check_records(store: RunStore, rounds: int, traced: bool) -> None:
    """Raise RunError where the records of the rounds that a checkpoint has behind it are not all there once."""
    done, clients = store.rounds(), store.clients()
    measured = [c for c in done.columns if c.startswith(MODELS)]
    evaluated = done["round"][done[measured].notna().any(axis=1)] if measured else done["round"][:0]
    wanted = Counter(range(1, rounds + 1))
    records = {"rounds.jsonl": Counter(done["round"].tolist())}
    if traced:
        records[TRACE] = Counter(numbers(store.path / TRACE))
    lost = {name: wanted - noted for name, noted in records.items()}
    lost["clients.jsonl"] = Counter(set(evaluated.tolist()) - set(clients["round"].tolist()))
    several = {name: noted - wanted for name, noted in records.items()}
    for what, files in (("has lost the records", lost), ("has several records", several)):
        for name, rounds_of in files.items():
            if rounds_of:
                raise RunError(
                    f"'{store.path / name}' {what} of rounds {listed(sorted(rounds_of))}, so this job's curves would "
                    "be wrong; restore the file from a copy, or move the job's folder away to do it anew"
                )


def _evaluate_again(
    job: Job,
    sim: Simulation,
    store: RunStore,
    watch: Observer,
    selection: Selection | None,
    last: bool,
    backend: Backend,
) -> None:
    """Evaluate the round that a job was to end with, where that was taken back: as one of many, or as the `last`.

    A larger budget may be no more rounds for a method that takes much of it in each.
    """
    if not sim.round or not (last or is_due(rounds_between(job.config, sim), sim.round)):
        return
    record = record_of(store, sim.round)
    if any(key.startswith(MODELS) for key in record):
        return
    records = backend.evaluate(
        sim, protocol_of(job.config, final=last), record.get("clients", ()), selection, None
    )
    found = means(records) | quantiles(records, leading(sim.federation.source, job.config.eval.metric))
    amend(store, sim.round, {**record, **found}, records)
    watch.recorded(job, {"round": sim.round, **found})


def _rounds(
    job: Job,
    sim: Simulation,
    store: RunStore,
    watch: Observer,
    seconds: float,
    identity: dict[str, Any],
    selection: Selection | None,
    backend: Backend,
) -> None:
    config = job.config
    begin = time.perf_counter() - seconds
    saver = Saver(sim, store, config.checkpoint_every, selection)
    check_sets(config, sim)
    metric = leading(sim.federation.source, config.eval.metric)
    limit = limit_of(config, job.rounds, job.method.rounds is not None, sim)
    kept = keeper(job, sim)
    every = rounds_between(config, sim)
    _evaluate_again(job, sim, store, watch, selection, limit.reached(sim), backend)
    while not limit.reached(sim):
        done = sim.step()
        last = limit.reached(sim)
        due = is_due(every, sim.round)
        record = round_record(sim, done, time.perf_counter() - begin)
        if due or last:
            protocol = protocol_of(config, final=last)
            records = backend.evaluate(sim, protocol, done.clients, selection, kept if last else None)
            found = means(records)
            record |= found | quantiles(records, metric) | epsilon_so_far(job, sim)
            store.append_clients(records)
            watch.evaluated(job, sim.round, first_named(found, metric))
        if done.trace is not None:
            store.append_trace(done.trace.line())
        store.append_round(record)
        told = time.perf_counter()
        watch.recorded(job, record)
        begin += time.perf_counter() - told  # what trackers take is none of the job's time
        if last or saver.due():
            saver.save(time.perf_counter() - begin)
        watch.round_done(job, done)
        raise_if_told()
    backend.done(sim)
    summary = summary_of(sim, store, identity, time.perf_counter() - begin, metric)
    if selection is not None:
        summary["selection"] = selection.summary()
        write_text(store.path / "selection.csv", selection.csv())
    if kept is not None:
        if kept.is_empty:  # the last round was evaluated before the job was interrupted
            backend.evaluate(sim, protocol_of(config, final=True), (), selection, kept)
        summary |= finish(kept, job, sim, store)
    if summary["loss_grew"] is not None:
        first, last = summary["loss_grew"]
        log.warning(
            "%s, seed %d: the training loss grew from %.3g to %.3g: training diverged, though all numbers are finite; "
            "lower train.lr, set train.clip, or check the scale of the data",
            job.method.label,
            job.seed,
            first,
            last,
        )
    used = spent(job, sim)
    if used is not None:
        summary["privacy"] = used.summary()
        write_text(store.path / "privacy.csv", used.csv())
    store.finish(summary)
    watch.job_done(job, summary)


def first_named(found: dict[str, float], metric: str) -> dict[str, float]:
    """Return means by "model/set/metric" with those of a metric first."""
    return dict(sorted(found.items(), key=lambda item: not item[0].endswith(f"/{metric}")))


class Saver:
    """Saves the checkpoints of one run.

    Args:
        interval: rounds between checkpoints; None: as often as takes `SHARE` of the time, from the first round on.
        selection: personal models that were chosen, which are saved with the state.
    """

    def __init__(
        self, sim: Simulation, store: RunStore, interval: int | None, selection: Selection | None = None
    ) -> None:
        self._sim, self._store, self._interval, self._selection = sim, store, interval, selection
        self._saved_at = time.perf_counter()
        self._cost: float | None = None

    def due(self) -> bool:
        """Whether it is time for a checkpoint, after a round."""
        if self._interval is not None:
            return self._sim.round % self._interval == 0
        if self._cost is None:
            tensors, _ = self._dump()
            self._cost = WAIT + sum(t.numel() * t.element_size() for t in tensors.values()) / BYTES_A_SECOND
        return time.perf_counter() - self._saved_at >= self._cost / SHARE

    def save(self, seconds: float) -> None:
        """Save the state as it stands; `seconds` the run has taken so far."""
        begin = time.perf_counter()
        tensors, facts = self._dump()
        self._store.save_checkpoint(self._sim.round, tensors, {**facts, "seconds": seconds})
        self._saved_at = time.perf_counter()
        self._cost = self._saved_at - begin

    def _dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = self._sim.dump()
        return tensors if self._selection is None else {**tensors, **self._selection.dump()}, facts
