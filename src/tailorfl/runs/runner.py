"""Runs experiments: every method with every seed, each in a result folder of its own, resumable at any moment.

<out>/config.yaml                    the experiment
<out>/<label>/seed-<s>/              one job: records, checkpoints, summary (see tailorfl.runs.store)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch

from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.errors import DivergenceError
from tailorfl.evaluation.leading import dominated, first_metric
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import with_all_options
from tailorfl.runs.extension import discard_damage, is_longer, reopen
from tailorfl.runs.files import write_text
from tailorfl.runs.fingerprint import FORCED, digests, other_data, other_settings, refuse
from tailorfl.runs.folders import (
    CERTIFICATE,
    MEMBERSHIP,
    RESULTS,
    TUNING,
    StatusFile,
    check_folder,
    check_source,
    discard_jobs,
    experiment_in,
    locked,
)
from tailorfl.runs.job import Job, Observer, Way
from tailorfl.runs.job_loop import SIMULATED, Backend, run_job
from tailorfl.runs.reductions import remarks
from tailorfl.runs.schedule import left_out
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig

log = logging.getLogger(__name__)


class RunOptions(TypedDict, total=False):
    """Options of `run_jobs` in addition to the experiment, its folder and the observer."""

    way: Way
    overwrite: bool
    source: Any
    force: bool
    tuning: Path | None
    backend: Backend


def run_jobs(
    config: ExperimentConfig,
    out: Path,
    *,
    way: Way = "new",
    overwrite: bool = False,
    observer: Observer | None = None,
    source: Any = None,
    force: bool = False,
    tuning: Path | None = None,
    backend: Backend = SIMULATED,
) -> None:
    """Run every method with every seed; finished jobs in the folder are kept.

    `way` begins, resumes or extends the experiment in the folder, see `tailorfl.runs.extension`. `source` is a
    `tailorfl.data.Source` to use instead of the configured one; `force` continues with other settings, data or versions
    than at the start, and notes that for the report. `tuning` is the tuning.json of the settings, which is copied into
    the folder. `backend` has the functions for a simulation (by default) or a deployment.

    Raises:
        TailorflError: see the message; finished work stays on disk and "resume" continues from there.
    """
    torch.set_num_threads(config.threads)
    config = with_all_options(config)
    watch = observer if observer is not None else Observer()
    resume = way != "new"
    jobs = [Job(config, method, seed) for seed in config.seeds for method in config.methods]
    # This lock holds the folder even between two jobs, when no job is locked.
    with locked(out), StatusFile(out, len(jobs)) as status:
        check_folder(out, resume, overwrite)
        begun = False
        if resume:
            refuse(out, list(other_settings(jobs, out, longer=way == "extend")), force)
        federation: Federation | None = None
        data: dict[str, str] = {}
        built: int | None = None
        warned: set[str] = set()
        diverged: list[DivergenceError] = []
        for position, job in enumerate(jobs, start=1):
            folder = out / job.folder
            if resume and _is_kept(job, folder, way):
                watch.job_kept(job)
                continue
            if resume:
                check_source(out, source)
            seed = config.data.seed_of(job.seed)
            if federation is None or seed != built:
                federation, built = backend.federation(config, seed, source, warned), seed
                _warn_once([_note_on_metric(config, federation.source)], warned)
                data = digests(federation)
                if resume:
                    refuse(out, list(other_data(jobs, out, job, federation, data)), force)
            sim = backend.simulation(job, federation, folder)
            if sim.given is not federation:  # a client has joined it
                federation = sim.given
                data = digests(federation)
            if not begun:  # only now: unusable data or models must not replace an earlier experiment
                _begin(config, jobs, out, way, tuning, backend)
                watch.experiment_started(out, way)
                begun = True
            _warn_once(_notes(job, sim), warned)
            try:
                status.begin(job, sim, position)
                has_own = source is not None
                run_job(job, sim, folder, resume, watch, position, len(jobs), has_own, data, backend)
            except DivergenceError as error:
                log.warning("%s, is left out of the results: %s", job.name, error)
                diverged.append(error)
            status.end()
            del sim  # frees its states before the next ones are made
        if not begun and not force:
            _begin(config, jobs, out, way, tuning, backend)
        if diverged and not any(_is_finished(out / job.folder) for job in jobs):
            raise diverged[0]
        watch.experiment_done(out)


def _is_kept(job: Job, folder: Path, way: Way) -> bool:
    """Return whether a job is finished and undamaged; damaged parts are deleted, to be done again."""
    if not _is_finished(folder) or (way == "extend" and is_longer(job, folder)):
        return False
    return discard_damage(job, folder)


def _is_finished(folder: Path) -> bool:
    return (folder / "config.json").is_file() and RunStore.open(folder, readonly=True).status == "finished"


def _begin(
    config: ExperimentConfig, jobs: Sequence[Job], out: Path, way: Way, tuning: Path | None, backend: Backend
) -> None:
    """Prepare the folder for the experiment, after all checks that could refuse it."""
    tuned = None if tuning is None else tuning.read_text(encoding="utf-8")
    if way == "new":
        discard_jobs(out)
        of_a_server = MEMBERSHIP if backend is SIMULATED else ()  # a deployment has written its own already
        for name in (FORCED, TUNING, CERTIFICATE, *RESULTS, *of_a_server):
            (out / name).unlink(missing_ok=True)
    if way == "extend":
        reopen(jobs, out)
    if way == "new" or with_all_options(experiment_in(out)) != config:
        write_text(out / "config.yaml", config.to_yaml())
    if tuned is not None:
        write_text(out / TUNING, tuned)


def _notes(job: Job, sim: Simulation) -> Iterator[str]:
    """Yield notes on a job before it begins: once per line or run, not once per seed."""
    # Notes on a line whose settings reduce its method to another one.
    for sentence in remarks(sim, job.rounds):
        yield f"{job.method.label}: {sentence}"
    if sim.cohort_is_secret and job.config.track.leaves_the_machine:
        yield (
            "track sends losses and bytes of single rounds to another machine, but ε holds only if nobody sees them; "
            "send them only to people you trust with the data"
        )
    yield left_out(job.config, sim, job.rounds)


def _note_on_metric(config: ExperimentConfig, source: Source) -> str:
    """Return a note on the first metric if the data determine it, otherwise ""."""
    metric, reason = first_metric(config, source), dominated(source)
    if not reason or config.eval.metric is not None:
        return ""
    return (
        f"{reason}, so {metric.replace('_', ' ')} is the first metric, with accuracy next to it; set eval.metric to "
        "choose another"
    )


def _warn_once(notes: Iterable[str], warned: set[str]) -> None:
    """Log notes as warnings that were not logged before."""
    for note in notes:
        if note and note not in warned:
            log.warning("%s", note)
            warned.add(note)
