"""Which experiment a command begins, resumes or extends, and how.

More seeds, methods or rounds in a result folder: what lies there is kept, and used where it fits.

More rounds continue every job from its last state. The bits are those of a longer run that was never stopped: what a
run does in its last round alone, the final evaluation, is taken back and done again at the new end. Where the number of
rounds decides what earlier rounds do, there is nothing to continue, and that is refused with the reason.
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
from tailorfl.runs.build import with_all_options
from tailorfl.runs.fingerprint import changes, deciding, refuse
from tailorfl.runs.folders import check_name, experiment_in, experiment_to_resume
from tailorfl.runs.job import Job, Way
from tailorfl.runs.privacy import privacy_of
from tailorfl.runs.schedule import EVERY, is_due
from tailorfl.runs.store import RunStore, amend, reconfigure, record_of
from tailorfl.settings.experiment import ExperimentConfig, MethodConfig
from tailorfl.training.update import RoundSchedule

log = logging.getLogger(__name__)

MODELS = ("personal/", "global/")
"""How the columns of a round's record begin that hold evaluations."""
TODAYS = ("engine", "threads", "checkpoint_every", "track")
"""Settings that change no number, so those given last hold."""


def extended(out: Path, stored: ExperimentConfig, new: ExperimentConfig) -> ExperimentConfig:
    """Return the experiment `stored` in a folder, with what `new` has beyond it: methods, seeds, rounds, variants.

    Raises:
        RunError: they differ in something else, or there would be fewer rounds.
    """
    stored, new = with_all_options(stored), with_all_options(new)
    problems = list(changes(_shared(stored), _shared(new)))
    problems += [
        f"the variant '{name}' was another"
        for name, settings in new.variants.items()
        if stored.variants.get(name, settings) != settings
    ]
    methods = {method.label: method for method in stored.methods}
    for method in new.methods:
        old = methods.get(method.label, method)
        problems += [f"{method.label}: {change}" for change in changes(_but_rounds(old), _but_rounds(method))]
        methods[method.label] = method
    if problems:
        raise RunError(
            f"--extend adds seeds, methods and rounds to '{out}', and what it has must stay as it is: "
            f"{'; '.join(problems)}. Give a method with other options a label of its own "
            "(method={name: ditto, label: Ditto 0.5, lam: 0.5}); for other settings start anew elsewhere (--out)"
        )
    config = stored.model_copy(
        update={
            "methods": tuple(methods.values()),
            "seeds": tuple(dict.fromkeys((*stored.seeds, *new.seeds))),
            "rounds": new.rounds,
            "variants": {**stored.variants, **new.variants},
            **{name: getattr(new, name) for name in TODAYS},
        }
    )
    for method in stored.methods:
        before, after = (Job(c, methods_of(c)[method.label], 0).rounds for c in (stored, config))
        if after < before:
            raise RunError(
                f"{method.label} in '{out}' has {before} rounds, and --extend takes none of them away (given: "
                f"{after}); start anew in another folder (--out) for fewer"
            )
    return config


def methods_of(config: ExperimentConfig) -> dict[str, MethodConfig]:
    """Return the methods of an experiment by label."""
    return {method.label: method for method in config.methods}


def other_experiment(stored: ExperimentConfig, new: ExperimentConfig, out: Path) -> list[str]:
    """Return how the experiment in a folder differs from the one that is given to go on with.

    Raises:
        RunError: they have other methods or seeds, or another number of rounds.
    """
    stored, new = with_all_options(stored), with_all_options(new)
    jobs = [(sorted(methods_of(c)), sorted(c.seeds), c.rounds, sorted(c.variants)) for c in (stored, new)]
    for name, before, after in zip(("methods", "seeds", "rounds", "variants"), *jobs, strict=True):
        if before != after:
            raise RunError(
                f"'{out}' was started with {name} {before}, but is to go on with {after}; add methods, seeds or rounds "
                f"with --extend {quoted(out)}, or leave out the settings to go on with its own"
            )
    methods = methods_of(stored)
    differences = list(changes(_shared(stored), _shared(new)))
    for method in new.methods:
        old = methods[method.label].model_dump(mode="json")
        differences += [
            f"{method.label}: {change}" for change in changes(old, method.model_dump(mode="json"))
        ]
    return differences


def is_longer(job: Job, folder: Path) -> bool:
    """Return whether a job is to have more rounds than it was to have when its folder was written."""
    if not (folder / "config.json").is_file():
        return False
    experiment = RunStore.open(folder, readonly=True).config.get("experiment", {})
    rounds = [m.get("rounds") for m in experiment.get("methods", ()) if m.get("label") == job.method.label]
    nominal = rounds[0] if rounds and rounds[0] is not None else experiment.get("rounds", job.rounds)
    return int(nominal) < job.rounds


def reopen(jobs: Sequence[Job], out: Path) -> None:
    """Make the jobs in a folder that are to have more rounds than they were written with ready to go on.

    Raises:
        ConfigError: the number of rounds decided what they did so far; nothing was changed.
    """
    longer = [job for job in jobs if is_longer(job, out / job.folder)]
    for job in longer:
        reason = tied(job)
        if reason:
            raise ConfigError(
                f"{job.name} cannot go on to {job.rounds} rounds: {reason}; start anew with so many in another folder "
                "(--out)"
            )
    for job in longer:
        _reopen(job, out / job.folder)


def discard_damage(job: Job, folder: Path) -> bool:
    """Delete what is damaged of a finished job: a checkpoint, or all of it; return whether nothing is to do again.

    All of it goes where records are damaged, or no checkpoint is left from which its last rounds could be done again.
    """
    store = RunStore.open(folder, readonly=True)
    records = store.problems()
    damage = records or store.checkpoint_problems()
    if not damage:
        return True
    with RunStore.open(folder) as opened:
        opened.drop_damaged_checkpoints()
    if records or not checkpoints.rounds(folder):
        log.warning("%s is done again: %s", job.name, ", ".join(damage))
        RunStore.discard(folder)
        return False
    log.warning("checkpoints of %s are made again where they are needed: %s", job.name, ", ".join(damage))
    return not store.checkpoint_problems()


def tied(job: Job) -> str:
    """Return why the rounds of a job so far are not the first ones of a longer run; "" where they are."""
    settings = job.config.train_of(job.method)
    try:
        RoundSchedule(**settings["round_schedule"])
    except ConfigError:
        return (
            f"train.round_schedule of kind {settings['round_schedule']['kind']} falls with the share of the rounds "
            "that are done, so a longer run has other learning rates from the first round on"
        )
    if privacy_of(job) is not None:
        return "its noise and ε (train.dp) were found for the rounds that it had"
    return ""


def _reopen(job: Job, folder: Path) -> None:
    """Take back what the last round of a job did because it was the last."""
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
            "%s is done anew: its last round was a candidate of eval.select=val, which it is not in a longer run",
            job.name,
        )
        RunStore.discard(folder)
        return
    with RunStore.open(folder) as store:
        store.mark("interrupted", f"to go on to round {job.rounds}")
        store.truncate_after(int(last.get("round", 0)))  # of its results, as there are no later rounds
        if was_evaluated:
            plain = {key: value for key, value in last.items() if not key.startswith(MODELS)}
            amend(store, int(last["round"]), plain, [])
        reconfigure(store, {**store.config, "experiment": job.config.to_dict()})


def _shared(config: ExperimentConfig) -> dict[str, Any]:
    """Return the settings that decide numbers, those of methods and the number of rounds apart."""
    return {k: v for k, v in deciding(config.to_dict()).items() if k != "rounds"}


def _but_rounds(method: MethodConfig) -> dict[str, Any]:
    return {key: value for key, value in method.model_dump(mode="json").items() if key != "rounds"}


def resumed(folder: Path, new: ExperimentConfig | None, force: bool = False) -> tuple[ExperimentConfig, Way]:
    """Return the experiment to go on with in a folder; where there is none yet, `new` is begun.

    So the same command begins an experiment, and goes on with it however often it is sent again, as a queue of a
    cluster does with a job that lost its machine.

    Raises:
        ConfigError: the folder has no experiment, and none is given.
        RunError: another one is given than the folder has.
    """
    if new is None:
        return experiment_to_resume(folder), "resume"
    check_name(folder)
    if not (folder / "config.yaml").is_file():
        return new, "new"
    differences = other_experiment(experiment_in(folder), new, folder)
    if not force:  # else every job that is there notes what was different
        refuse(folder, differences, force)
    return new, "resume"


def with_more(folder: Path, new: ExperimentConfig) -> tuple[ExperimentConfig, Way]:
    """Return the experiment in a folder with what `new` adds to it.

    Raises:
        ConfigError: the folder has no experiment.
        RunError: `new` is something else than more of it.
    """
    return extended(folder, experiment_in(folder), new), "extend"
