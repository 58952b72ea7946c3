"""The command `tailorfl check`: is a result folder whole?"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from tailorfl.cli.screen import print_json, say
from tailorfl.errors import RunError
from tailorfl.printable import quoted


def show_integrity(console: Console, folder: Path, as_json: bool = False) -> None:
    """Print a line a job of the experiment in a folder, of its variants where it has some; or all as one JSON object.

    Raises:
        RunError: something is damaged; names how many jobs.
        ConfigError: the folder holds no experiment.
    """
    from tailorfl.runs.folders import experiment_in
    from tailorfl.runs.job import job_problems, jobs_of
    from tailorfl.runs.status import sentence

    stands = sentence(folder)
    found = [(name, job_problems(place)) for name, place in jobs_of(folder, experiment_in(folder))]
    damaged = sum(any(bad for bad, _ in problems) for _, problems in found)
    if as_json:
        jobs = [
            {"job": name, "damaged": any(bad for bad, _ in said), "problems": [text for _, text in said]}
            for name, said in found
        ]
        print_json({"experiment": stands, "damaged": damaged, "jobs": jobs})
    else:
        if stands:
            say(console, f"experiment: {stands}")
        for name, problems in found:
            say(console, f"{name}: {'; '.join(text for _, text in problems) or 'whole'}")
    if damaged:
        raise RunError(
            f"{damaged} jobs of '{folder}' are damaged; restore them from a copy, or do them again with "
            f"--resume {quoted(folder)} (first move away the folders of those that are not finished)"
        )
