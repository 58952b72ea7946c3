"""The experiment that a command begins, resumes or extends.

If seeds, methods or rounds are added to a result folder, its existing results are kept and used as far as they fit.

More rounds continue every job from its last state, bit-identical to a longer run that was never stopped: the final
evaluation, which a run does only in its last round, is removed and done again at the new end. If earlier rounds depend
on the number of rounds, extension is refused with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailorfl.core.method import make_method
from tailorfl.errors import ConfigError, RunError
from tailorfl.printable import quoted
from tailorfl.runs import checkpoints
from tailorfl.runs.build import train_config, with_all_options
from tailorfl.runs.fingerprint import changes, deciding, other_settings, refuse
from tailorfl.runs.folders import check_name, experiment_in, experiment_to_resume
from tailorfl.runs.job import Job, Way
from tailorfl.runs.privacy import privacy_of
from tailorfl.runs.schedule import EVERY, is_due
from tailorfl.runs.store import RunStore, amend, reconfigure, record_of
from tailorfl.settings.experiment import ExperimentConfig, MethodConfig

log = logging.getLogger(__name__)

MODELS = ("personal/", "global/")
"""Prefixes of a round record's columns with evaluations."""
TODAYS = ("name", "description", "search", "engine", "threads", "checkpoint_every", "track", "deploy")
"""Settings that do not change results, so the latest ones apply."""


def extended(out: Path, stored: ExperimentConfig, new: ExperimentConfig) -> ExperimentConfig:
    """Return the experiment `stored` in a folder with the additional methods, seeds, rounds and variants of `new`.

    Raises:
        RunError: they differ in something else, or `new` has fewer rounds.
    """
    stored, new = with_all_options(stored), with_all_options(new)
    problems = [*changes(_shared(stored), _shared(new)), *_other_variants(stored, new)]
    methods = {method.label: method for method in stored.methods}
    for method in new.methods:
        old = methods.get(method.label, method)
        problems += [f"{method.label}: {change}" for change in changes(_but_rounds(old), _but_rounds(method))]
        methods[method.label] = method
    if problems:
        raise RunError(
            f"--extend only adds seeds, methods and rounds to '{out}', but the settings differ: {'; '.join(problems)}. "
            "Give a method with other options another label (method={name: ditto, label: Ditto 0.5, lam: 0.5}); for "
            "other settings use another folder (--out)"
        )
    config = stored.model_copy(
        update={
            "methods": tuple(methods.values()),
            "seeds": tuple(dict.fromkeys((*stored.seeds, *new.seeds))),
            "rounds": new.rounds,
            "variants": {**stored.variants, **new.variants},
            "published": {**stored.published, **new.published},
            **{name: getattr(new, name) for name in TODAYS},
        }
    )
    for method in stored.methods:
        before, after = (Job(c, methods_of(c)[method.label], 0).rounds for c in (stored, config))
        if after < before:
            raise RunError(
                f"{method.label} in '{out}' has {before} rounds, and --extend cannot remove any (given: {after}); for "
                "fewer rounds use another folder (--out)"
            )
    return config


def _other_variants(stored: ExperimentConfig, new: ExperimentConfig) -> list[str]:
    """Return a sentence for each variant of both experiments that they define differently."""
    return [
        f"the variant '{name}' was different"
        for name, settings in new.variants.items()
        if stored.variants.get(name, settings) != settings
    ]


def methods_of(config: ExperimentConfig) -> dict[str, MethodConfig]:
    """Return the methods of an experiment by label."""
    return {method.label: method for method in config.methods}


def other_experiment(stored: ExperimentConfig, new: ExperimentConfig, out: Path) -> list[str]:
    """Return the differences between the experiment in a folder and the one that is to continue it.

    Raises:
        RunError: their methods, seeds or numbers of rounds differ.
    """
    stored, new = with_all_options(stored), with_all_options(new)
    jobs = [(sorted(methods_of(c)), sorted(c.seeds), c.rounds, sorted(c.variants)) for c in (stored, new)]
    for name, before, after in zip(("methods", "seeds", "rounds", "variants"), *jobs, strict=True):
        if before != after:
            raise RunError(
                f"'{out}' was started with {name} {before}, but is resumed with {after}; add methods, seeds or rounds "
                f"with --extend {quoted(out)}, or leave out the settings to continue with those in the folder"
            )
    methods = methods_of(stored)
    differences = [*changes(_shared(stored), _shared(new)), *_other_variants(stored, new)]
    for method in new.methods:
        old = methods[method.label].model_dump(mode="json")
        differences += [
            f"{method.label}: {change}" for change in changes(old, method.model_dump(mode="json"))
        ]
    return differences


def is_longer(job: Job, folder: Path) -> bool:
    """Return whether a job has more rounds than planned when its folder was written."""
    if not (folder / "config.json").is_file():
        return False
    experiment = RunStore.open(folder, readonly=True).config.get("experiment", {})
    rounds = [m.get("rounds") for m in experiment.get("methods", ()) if m.get("label") == job.method.label]
    nominal = rounds[0] if rounds and rounds[0] is not None else experiment.get("rounds", job.rounds)
    return int(nominal) < job.rounds


def reopen(jobs: Sequence[Job], out: Path) -> None:
    """Prepare the jobs in a folder that now have more rounds to be continued.

    Raises:
        ConfigError: the rounds so far depend on their planned number; nothing was changed.
    """
    for job in _longer(jobs, out):
        _reopen(job, out / job.folder)


def check_more(config: ExperimentConfig, out: Path, force: bool) -> None:
    """Check that the jobs in a folder can be continued as those of an experiment with more rounds, methods or seeds.

    Raises:
        ConfigError: the rounds so far depend on their planned number.
        RunError: the settings or versions of the jobs differ, without `force`.
    """
    config = with_all_options(config)
    jobs = [Job(config, method, seed) for seed in config.seeds for method in config.methods]
    if not force:
        refuse(out, list(other_settings(jobs, out, longer=True)), force=False)
    _longer(jobs, out)


def _longer(jobs: Sequence[Job], out: Path) -> list[Job]:
    """Return the jobs in a folder that now have more rounds. Raises ConfigError if one cannot have more."""
    longer = [job for job in jobs if is_longer(job, out / job.folder)]
    for job in longer:
        reason = tied(job)
        if reason:
            raise ConfigError(
                f"{job.name} cannot be extended to {job.rounds} rounds: {reason}; run all {job.rounds} rounds in "
                "another folder (--out)"
            )
    return longer


def discard_damage(job: Job, folder: Path) -> bool:
    """Delete damaged checkpoints of a finished job, or the whole job; return whether nothing must be done again.

    The whole job is deleted if records are damaged, or if no checkpoint is left to repeat its last rounds from.
    """
    store = RunStore.open(folder, readonly=True)
    records = store.problems()
    damage = records or store.checkpoint_problems()
    if not damage:
        return True
    with RunStore.open(folder) as opened:
        opened.drop_damaged_checkpoints()
    if records or not checkpoints.rounds(folder):
        log.warning("%s is run again: %s", job.name, ", ".join(damage))
        RunStore.discard(folder)
        return False
    log.warning("checkpoints of %s are made again if needed: %s", job.name, ", ".join(damage))
    return not store.checkpoint_problems()


def tied(job: Job) -> str:
    """Return why the rounds of a job so far are not those of a longer run, "" if they are."""
    schedule = train_config(job).round_schedule
    if schedule.is_relative:
        return (
            f"train.round_schedule of kind {schedule.kind} depends on the total number of rounds, so a longer run has "
            "other learning rates from the first round on"
        )
    if privacy_of(job) is not None:
        return "its noise and ε (train.dp) were computed for the original number of rounds"
    return ""


def _reopen(job: Job, folder: Path) -> None:
    """Undo what the last round of a job did only because it was the last."""
    discard_damage(job, folder)
    if not (folder / "config.json").is_file():
        return
    with RunStore.open(folder) as store:
        rounds = store.rounds()["round"].tolist()
        last = record_of(store, rounds[-1]) if rounds else {}
        was_evaluated = any(key.startswith(MODELS) for key in last)
        due = bool(last) and is_due(store.config.get(EVERY, job.config.eval.every or 0), int(last["round"]))
    selects = (
        job.config.eval.select == "val" and make_method(job.method.name, job.method.options).has_personal
    )
    if was_evaluated and not due and selects:
        log.warning(
            "%s starts again: its last round was a candidate of eval.select=val, but is none in a longer run",
            job.name,
        )
        RunStore.discard(folder)
        return
    with RunStore.open(folder) as store:
        store.mark("interrupted", f"to continue to round {job.rounds}")
        store.truncate_after(int(last.get("round", 0)))  # removes its results, as there are no later rounds
        if was_evaluated:
            plain = {key: value for key, value in last.items() if not key.startswith(MODELS)}
            amend(store, int(last["round"]), plain, [])
        reconfigure(store, {**store.config, "experiment": job.config.to_dict()})


def _shared(config: ExperimentConfig) -> dict[str, Any]:
    """Return the settings that determine results, without those of methods and the number of rounds."""
    return {k: v for k, v in deciding(config.to_dict()).items() if k != "rounds"}


def _but_rounds(method: MethodConfig) -> dict[str, Any]:
    return {key: value for key, value in method.model_dump(mode="json").items() if key != "rounds"}


def resumed(folder: Path, new: ExperimentConfig | None, force: bool = False) -> tuple[ExperimentConfig, Way]:
    """Return the experiment to continue in a folder, or `new` if the folder has none yet.

    So the same command begins an experiment and continues it however often it is repeated, as by a cluster's queue
    after a job has lost its machine.

    Raises:
        ConfigError: the folder has no experiment, and none is given.
        RunError: the given experiment is not the folder's.
    """
    if new is None:
        return experiment_to_resume(folder), "resume"
    check_name(folder)
    if not (folder / "config.yaml").is_file():
        return new, "new"
    differences = other_experiment(experiment_in(folder), new, folder)
    if not force:  # otherwise every existing job notes the differences
        refuse(folder, differences, force)
    return new, "resume"


def with_more(folder: Path, new: ExperimentConfig) -> tuple[ExperimentConfig, Way]:
    """Return the experiment in a folder with the additions of `new`.

    Raises:
        ConfigError: the folder has no experiment.
        RunError: `new` differs in more than additions.
    """
    return extended(folder, experiment_in(folder), new), "extend"
