"""Runs experiments: every method with every seed, each in a result folder of its own, resumable at any moment.

<out>/config.yaml                    the experiment
<out>/<label>/seed-<s>/              one job: records, checkpoints, summary (see tailorfl.runs.store)
<out>/comparison.csv, .md, *.png     what `ExperimentResult` makes of all of them
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tailorfl.data.federation import Federation
from tailorfl.errors import DivergenceError
from tailorfl.evaluation.leading import dominated
from tailorfl.experiments.curves import first_metric
from tailorfl.experiments.due import left_out
from tailorfl.experiments.extending import discard_damage, is_longer, reopen
from tailorfl.experiments.faults import told
from tailorfl.experiments.fingerprint import FORCED, made_with, other_data, other_settings, refuse
from tailorfl.experiments.folders import (
    check_folder,
    check_source,
    discard_jobs,
    experiment_in,
    locked,
)
from tailorfl.experiments.jobs import Job, Observer
from tailorfl.experiments.one_job import run_job
from tailorfl.experiments.reductions import remarks
from tailorfl.experiments.report import write_report
from tailorfl.experiments.result import ExperimentResult
from tailorfl.experiments.standing import Standing
from tailorfl.experiments.starting import Way
from tailorfl.experiments.tracking import forget, leaves_the_machine, tracked
from tailorfl.experiments.tuned import NAME as TUNING
from tailorfl.experiments.venue import SIMULATED, Venue
from tailorfl.experiments.written_out import with_all_options
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.files import write_text
from tailorfl.runs.signals import ended_in_order
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig

log = logging.getLogger(__name__)


@told()
def run_experiment(
    config: ExperimentConfig,
    out: Path,
    *,
    way: Way = "new",
    overwrite: bool = False,
    observer: Observer | None = None,
    source: Any = None,
    force: bool = False,
    tuning: Path | None = None,
    venue: Venue = SIMULATED,
) -> ExperimentResult:
    """Runs every method with every seed and returns the result; finished jobs that are there are kept.

    `way` says what is done with what is there, see `tailorfl.experiments.starting`. `source` is a
    `tailorfl.data.Source` to use in place of the configured one; `force` goes on with other settings, data or versions
    than the experiment was started with, and notes that for the report. `tuning` is the tuning.json that the settings
    come from, of which the folder gets a copy. `venue` is where clients are: in this process, unless told.

    Raises:
        TailorflError: see the message; what was finished stays on disk and "resume" continues from there.
    """
    torch.set_num_threads(config.threads)
    config = with_all_options(config)
    given = observer if observer is not None else Observer()
    resume = way != "new"
    jobs = [Job(config, method, seed) for seed in config.seeds for method in config.methods]
    # Even between two jobs, when none of them is locked, the folder is this process's.
    with (
        ended_in_order(),
        tracked(config, out, given) as watch,
        locked(out),
        Standing(out, len(jobs)) as standing,
    ):
        check_folder(out, resume, overwrite)
        begun = False
        if resume:
            refuse(out, list(other_settings(jobs, out, longer=way == "extend")), force)
        federation: Federation | None = None
        facts: dict[str, Any] = {}
        built: int | None = None
        said: set[str] = set()
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
                federation, built = venue.federation(config, seed, source, said), seed
                _say_leading(config, first_metric(config, federation.source), federation, said)
                facts = made_with(job, federation)
                if resume:
                    refuse(out, list(other_data(jobs, out, job, federation)), force)
            sim = venue.simulation(job, federation, folder)
            if not begun:  # only now: data or a model that cannot be used replace no earlier experiment
                _begin(config, jobs, out, way, tuning)
                begun = True
            _say_reductions(job, sim, said)
            _say_secrets(job, sim, said)
            _say_left_out(job, sim, said)
            try:
                origin = {"own_source": source is not None, **facts}
                standing.begin(job, sim, position)
                run_job(job, sim, folder, resume, watch, position, len(jobs), origin, venue)
            except DivergenceError as error:
                log.warning("%s, seed %d, is left out of the results: %s", job.method.label, job.seed, error)
                diverged.append(error)
            standing.end()
            del sim  # its states need not be held while the next ones are made
        if diverged and not any(_is_finished(out / job.folder) for job in jobs):
            raise diverged[0]
        result = ExperimentResult.load(out)
        result.write()
        # Made while it ran, its table would not be that of the plots beside it.
        if (out / "report.md").is_file():
            write_report(result)
    return result


def _is_kept(job: Job, folder: Path, way: Way) -> bool:
    """Whether a job is finished and whole; what is damaged of it is deleted, to be done again."""
    if not _is_finished(folder) or (way == "extend" and is_longer(job, folder)):
        return False
    return discard_damage(job, folder)


def _is_finished(folder: Path) -> bool:
    return (folder / "config.json").is_file() and RunStore.open(folder, readonly=True).status == "finished"


def _begin(config: ExperimentConfig, jobs: Sequence[Job], out: Path, way: Way, tuning: Path | None) -> None:
    """Makes the folder that of the experiment, once everything was looked at that could refuse it."""
    tuned = None if tuning is None else tuning.read_text(encoding="utf-8")
    if way == "new":
        discard_jobs(out)
        forget(out)
        (out / FORCED).unlink(missing_ok=True)
        (out / TUNING).unlink(missing_ok=True)
    if way == "extend":
        reopen(jobs, out)
    if way == "new" or with_all_options(experiment_in(out)) != config:
        write_text(out / "config.yaml", config.to_yaml())
    if tuned is not None:
        write_text(out / TUNING, tuned)


def _say_reductions(job: Job, sim: Simulation, said: set[str]) -> None:
    """Warns where the settings of a line make its method another one, once a line and not once a seed."""
    for sentence in remarks(sim, job.rounds):
        warning = f"{job.method.label}: {sentence}"
        if warning not in said:
            log.warning("%s", warning)
            said.add(warning)


def _say_secrets(job: Job, sim: Simulation, said: set[str]) -> None:
    """Warns, once, where rounds are sent elsewhere though ε counts on nobody seeing them."""
    warning = "track sends losses and bytes of single rounds elsewhere, and ε counts on nobody seeing them"
    if sim.cohort_is_secret and leaves_the_machine(job.config) and warning not in said:
        log.warning("%s: send them only to whom you trust with the data", warning)
        said.add(warning)


def _say_left_out(job: Job, sim: Simulation, said: set[str]) -> None:
    """Says, once, which evaluations a budget leaves out."""
    sentence = left_out(job.config, sim, job.rounds)
    if sentence and sentence not in said:
        log.warning("%s", sentence)
        said.add(sentence)


def _say_leading(config: ExperimentConfig, metric: str, federation: Federation, said: set[str]) -> None:
    """Say once which metric comes first, where the data decide that."""
    why = dominated(federation.source)
    if why and config.eval.metric is None and why not in said:
        log.warning(
            "%s, so %s comes first and accuracy beside it; eval.metric chooses", why, metric.replace("_", " ")
        )
        said.add(why)
