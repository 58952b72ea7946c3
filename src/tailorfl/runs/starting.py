"""What a command or a call from Python begins, resumes or extends: which experiment, and in which way."""

from __future__ import annotations

from pathlib import Path

from tailorfl.runs.extension import extended, other_experiment
from tailorfl.runs.fingerprint import refuse
from tailorfl.runs.folders import check_name, experiment_in, experiment_to_resume
from tailorfl.runs.job import Way
from tailorfl.settings.experiment import ExperimentConfig


def resumed(
    folder: Path, given: ExperimentConfig | None, force: bool = False
) -> tuple[ExperimentConfig, Way]:
    """Returns the experiment to go on with in a folder; where there is none yet, `given` is begun.

    So the same command begins an experiment, and goes on with it however often it is sent again, as a queue of a
    cluster does with a job that lost its machine.

    Raises:
        ConfigError: the folder has no experiment, and none is given.
        RunError: another one is given than the folder has.
    """
    if given is None:
        return experiment_to_resume(folder), "resume"
    check_name(folder)
    if not (folder / "config.yaml").is_file():
        return given, "new"
    differences = other_experiment(experiment_in(folder), given, folder)
    if not force:  # else every job that is there notes what was different
        refuse(folder, differences, force)
    return given, "resume"


def with_more(folder: Path, given: ExperimentConfig) -> tuple[ExperimentConfig, Way]:
    """Returns the experiment in a folder with what `given` adds to it.

    Raises:
        ConfigError: the folder has no experiment.
        RunError: `given` is something else than more of it.
    """
    return extended(folder, experiment_in(folder), given), "extend"
