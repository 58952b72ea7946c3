"""Runs experiments: every method with every seed, each in a result folder of its own, resumable at any moment.

<out>/config.yaml                    the experiment
<out>/<label>/seed-<s>/              one job: records, checkpoints, summary (see tailorfl.runs.store)
<out>/comparison.csv, .md, *.png     what `ExperimentResult` makes of all of them
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tailorfl.methods as _methods  # noqa: F401  registers the library's methods
from tailorfl.core.client_privacy import ClientDP
from tailorfl.core.cohort import TrainConfig
from tailorfl.core.keys import generator
from tailorfl.core.method import make_method
from tailorfl.core.privacy import SampleDP
from tailorfl.core.round_schedule import RoundSchedule
from tailorfl.data.build import build as build_federation
from tailorfl.data.federation import Federation
from tailorfl.data.validate import validate
from tailorfl.engines.groups import assign_by_size
from tailorfl.engines.private_updates import cohort_is_secret
from tailorfl.engines.rounds import listed
from tailorfl.engines.simulation import Simulation, make_engine
from tailorfl.errors import ConfigError, DataError, DivergenceError, RunError
from tailorfl.evaluation.generation import Generation
from tailorfl.evaluation.metrics import primary
from tailorfl.evaluation.protocols import Protocol as EvaluationProtocol
from tailorfl.evaluation.protocols import evaluate, means
from tailorfl.evaluation.selection import Selection
from tailorfl.experiments.budget import limit_of
from tailorfl.experiments.curves import check_target
from tailorfl.experiments.faults import told
from tailorfl.experiments.final_cost import long_final
from tailorfl.experiments.fingerprint import FORCED, made_with, other_data, other_settings, refuse
from tailorfl.experiments.folders import check_folder, check_source, discard_jobs, locked
from tailorfl.experiments.jobs import Job, Observer
from tailorfl.experiments.models import make_model
from tailorfl.experiments.privacy import spent, with_privacy
from tailorfl.experiments.records import round_record, summary_of
from tailorfl.experiments.reductions import named
from tailorfl.experiments.result import ExperimentResult
from tailorfl.experiments.saving import Saver
from tailorfl.experiments.schema import ExperimentConfig
from tailorfl.runs.files import write_text
from tailorfl.runs.store import RunStore

log = logging.getLogger(__name__)


@told()
def run_experiment(
    config: ExperimentConfig,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
    source: Any = None,
    force: bool = False,
) -> ExperimentResult:
    """Runs every method with every seed and returns the result; finished jobs of a resumed experiment are kept.

    `source` is a `tailorfl.data.Source` to use in place of the configured one; `force` resumes with other settings,
    data or versions than the experiment was started with, and notes that for the report.

    Raises:
        TailorflError: see the message; what was finished stays on disk and `resume` continues from there.
    """
    torch.set_num_threads(config.threads)
    config = with_all_options(config)
    watch = observer if observer is not None else Observer()
    jobs = [Job(config, method, seed) for seed in config.seeds for method in config.methods]
    # Even between two jobs, when none of them is locked, the folder is this process's.
    with locked(out):
        check_folder(out, resume, overwrite)
        begun = resume
        if resume:
            refuse(out, list(other_settings(jobs, out)), force)
        federation: Federation | None = None
        facts: dict[str, Any] = {}
        built: int | None = None
        said: set[str] = set()
        diverged: list[DivergenceError] = []
        for position, job in enumerate(jobs, start=1):
            folder = out / job.folder
            if resume and _is_finished(folder):
                damage = RunStore.open(folder, readonly=True).problems()
                if not damage:
                    continue
                log.warning("%s, seed %d, is done again: %s", job.method.label, job.seed, ", ".join(damage))
                RunStore.discard(folder)
            if resume:
                check_source(out, source)
            seed = config.data.seed_of(job.seed)
            if federation is None or seed != built:
                federation, built = make_federation(config, seed, source, said), seed
                check_target(config.eval.target, primary(federation.source.task)[0])
                facts = made_with(job, federation)
                if resume:
                    refuse(out, list(other_data(jobs, out, job, facts["data"])), force)
            sim = make_simulation(job, federation, folder)
            if not begun:  # only now: data or a model that cannot be used replace no earlier experiment
                discard_jobs(out)
                (out / FORCED).unlink(missing_ok=True)
                write_text(out / "config.yaml", config.to_yaml())
                begun = True
            _say_reductions(job, sim, said)
            try:
                origin = {"own_source": source is not None, **facts}
                _run_job(job, sim, folder, resume, watch, position, len(jobs), origin)
            except DivergenceError as error:
                log.warning("%s, seed %d, is left out of the results: %s", job.method.label, job.seed, error)
                diverged.append(error)
            del sim  # its states need not be held while the next ones are made
        if diverged and not any(_is_finished(out / job.folder) for job in jobs):
            raise diverged[0]
        result = ExperimentResult.load(out)
        result.write()
    return result


def with_all_options(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the experiment with every option of its methods written out, so that its folder says what was run."""
    return config.model_copy(
        update={
            "methods": tuple(
                m.model_copy(update={"options": make_method(m.name, m.options).all_options()})
                for m in config.methods
            )
        }
    )


def _say_reductions(job: Job, sim: Simulation, said: set[str]) -> None:
    """Warns where the settings of a line make its method another one, once a line and not once a seed."""
    for sentence in named(sim, job.rounds):
        warning = f"{job.method.label}: {sentence}"
        if warning not in said:
            log.warning("%s", warning)
            said.add(warning)


def make_federation(
    config: ExperimentConfig, seed: int, source: Any = None, said: set[str] | None = None
) -> Federation:
    """Returns the federation of an experiment, checked; what is weak about it is logged as warnings.

    `said` are warnings that were logged before and are not repeated; new ones are added to it.

    Raises:
        DataError: data that cannot be used, or nothing to test on.
    """
    arguments = config.data.model_dump(exclude={"seed"})
    if source is not None:
        arguments |= {"source": source, "path": None, "options": None}
    federation = build_federation(**arguments, seed=seed)
    if not federation.sizes("test")[: federation.num_clients].any():
        raise DataError(
            "no client has test samples, so nothing could be compared; leave a share for them in data.split, "
            "such as {train: 0.7, val: 0.1, test: 0.2}"
        )
    said = set() if said is None else said
    for warning in validate(federation):
        if warning not in said:
            log.warning("data of seed %d: %s", seed, warning)
            said.add(warning)
    return federation


def make_simulation(job: Job, federation: Federation, folder: Path | None = None) -> Simulation:
    """Returns the simulation of a job, before its first round; `folder` is where states on disk would lie."""
    config = job.config
    wanted = config.model_of(job.method).architectures
    models = {name: make_model(c, federation.source, job.seed) for name, c in wanted.items()}
    several = len(models) > 1
    drawn = config.model_of(job.method).assign == "random"
    chance = generator(job.seed, "architectures") if drawn else None
    owners = assign_by_size(federation.sizes().tolist(), list(models), chance) if several else ()

    def build(sample_dp: SampleDP | None, client_dp: ClientDP | None) -> Simulation:
        return Simulation(
            make_method(job.method.name, job.method.options),
            federation,
            models if several else next(iter(models.values())),
            replace(train_config(job), dp=sample_dp),
            assignment=owners,
            engine=make_engine(**config.engine.arguments),
            seed=job.seed,
            fraction=config.fraction,
            sampling=config.sampling,
            weights=config.weights,
            state_folder=folder if config.engine.states == "disk" else None,
            client_dp=client_dp,
        )

    return with_privacy(job, build)


def train_config(job: Job) -> TrainConfig:
    """Returns the training settings of a job: the experiment's, and in their place those of its method; no privacy.

    Raises:
        ConfigError: the two do not fit together.
    """
    settings = {**job.config.train.model_dump(), **job.method.train}
    del settings["dp"]
    falls = RoundSchedule(**settings.pop("round_schedule"), rounds=job.rounds)
    return TrainConfig(**settings, round_schedule=falls)


def _is_finished(folder: Path) -> bool:
    return (folder / "config.json").is_file() and RunStore.open(folder, readonly=True).status == "finished"


def _run_job(
    job: Job,
    sim: Simulation,
    folder: Path,
    resume: bool,
    watch: Observer,
    position: int,
    total: int,
    origin: dict[str, Any],
) -> None:
    identity = {"method": job.method.name, "label": job.method.label, "seed": job.seed}
    exists = resume and (folder / "config.json").is_file()
    with (
        RunStore.open(folder)
        if exists
        else RunStore.create(
            folder,
            {**identity, **origin},
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
            _check_records(store, sim.round)
        expensive = long_final(sim, _protocol(job.config, final=True), job.rounds)
        if expensive is not None:
            log.warning("%s", expensive)
        watch.job_started(job, position, total, job.rounds, sim.round)
        _rounds(job, sim, store, watch, seconds, identity, selection)


def make_selection(config: ExperimentConfig, sim: Simulation, folder: Path | None) -> Selection | None:
    """What chooses personal models, where something does; it keeps them where private states are kept."""
    if config.eval.select == "last" or not sim.method.has_personal:
        return None
    return Selection(sim, folder if config.engine.states == "disk" else None)


def _keep_engine(sim: Simulation, store: RunStore) -> None:
    """Goes on with the engine that an automatic choice fell on, also where it was not yet in a checkpoint."""
    done = store.rounds()
    if len(done):
        sim.engine.resume(str(done["engine"].iloc[-1]))


def _check_records(store: RunStore, rounds: int) -> None:
    """Raises RunError where the records of the rounds that a checkpoint has behind it are not all there."""
    done, clients = store.rounds(), store.clients()
    lost = sorted(set(range(1, rounds + 1)) - set(done["round"].tolist()))
    measured = [c for c in done.columns if c.startswith(("personal/", "global/"))]
    evaluated = done["round"][done[measured].notna().any(axis=1)] if measured else done["round"][:0]
    unseen = sorted(set(evaluated.tolist()) - set(clients["round"].tolist()))
    for name, rounds_lost in (("rounds.jsonl", lost), ("clients.jsonl", unseen)):
        if rounds_lost:
            raise RunError(
                f"'{store.path / name}' has lost the records of rounds {listed(rounds_lost)}, so this job's curves "
                "would have holes; restore the file from a copy, or move the job's folder away to do it anew"
            )


def _rounds(
    job: Job,
    sim: Simulation,
    store: RunStore,
    watch: Observer,
    seconds: float,
    identity: dict[str, Any],
    selection: Selection | None,
) -> None:
    config = job.config
    begin = time.perf_counter() - seconds
    saver = Saver(sim, store, config.checkpoint_every, selection)
    if cohort_is_secret(sim) and "participants" in (*config.eval.sets, *config.eval.final):
        raise ConfigError(
            "the set 'participants' of eval.sets says who took part in a round, which this privacy keeps secret: its "
            "epsilon counts on nobody seeing it; leave the set out, or take sampling=uniform"
        )
    limit = limit_of(config, job.rounds, job.method.rounds is not None, sim)
    if job.rounds == sim.round and not sim.round:
        raise ConfigError("rounds is 0: there is nothing to run")
    while not limit.reached(sim):
        done = sim.step()
        last = limit.reached(sim)
        due = config.eval.every > 0 and sim.round % config.eval.every == 0
        record = round_record(sim, done, time.perf_counter() - begin)
        if due or last:
            records = evaluate(sim, _protocol(config, final=last), done.clients, selection)
            found = means(records)
            record |= found
            store.append_clients(records)
            watch.evaluated(job, sim.round, found)
        store.append_round(record)
        if last or saver.due():
            saver.save(time.perf_counter() - begin)
        watch.round_done(job, done)
    summary = summary_of(sim, store, identity, time.perf_counter() - begin)
    if selection is not None:
        summary["selection"] = selection.summary()
        write_text(store.path / "selection.csv", selection.csv())
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


def _protocol(config: ExperimentConfig, final: bool) -> EvaluationProtocol:
    sets = dict.fromkeys((*config.eval.sets, *(config.eval.final if final else ())))
    return EvaluationProtocol(
        tuple(sets),
        tuple(config.eval.adapt_steps),
        config.eval.max_samples,
        config.eval.feature_distance,
        config.eval.sharpness,
        Generation(**config.eval.generation.model_dump()),
    )
