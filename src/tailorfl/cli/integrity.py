"""The command `tailorfl check`: is a result folder whole?"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from tailorfl.cli.screen import say
from tailorfl.errors import RunError


def show_integrity(console: Console, folder: Path) -> None:
    """Prints a line a job of the experiment in a folder, of its variants where it has some.

    Raises:
        RunError: something is damaged; names how many jobs.
        ConfigError: the folder holds no experiment.
    """
    from tailorfl.experiments.folders import experiment_in
    from tailorfl.experiments.integrity import job_problems, jobs_of
    from tailorfl.experiments.standing import sentence

    stands = sentence(folder)
    if stands:
        say(console, f"experiment: {stands}")
    damaged = 0
    for name, problems in (
        (name, job_problems(place)) for name, place in jobs_of(folder, experiment_in(folder))
    ):
        damaged += any(bad for bad, _ in problems)
        text = "; ".join(text for _, text in problems) or "whole"
        say(console, f"{name}: {text}")
    if damaged:
        raise RunError(
            f"{damaged} jobs of '{folder}' are damaged; restore them from a copy, or do them again with "
            f"--resume {folder}"
        )
