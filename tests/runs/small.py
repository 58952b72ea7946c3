"""What tests of runs share: observers that stop a run, what a folder holds, and the simulation of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from tailorfl.data.source import Source
from tailorfl.report.result import ExperimentResult
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.files import read_lines
from tailorfl.runs.job import Job, Observer
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.loading import load

TINY: dict[str, Any] = {
    "methods": ["local", "ditto"],
    "seeds": [0],
    "rounds": 3,
    "data": {"clients": 4, "samples": 200},
    "model": "logistic",
    "engine": "sequential",
    "eval": {"every": 2},
    "checkpoint_every": 2,
}
"""An experiment of two seconds at most."""


class StopAt(Observer):
    """Ctrl-C when a job starts, or after one of its rounds."""

    def __init__(self, job: str, round: int = 0) -> None:
        self.job, self.round = job, round

    def job_started(self, job: Job, *_: Any) -> None:
        if (job.name, 0) == (self.job, self.round):
            raise KeyboardInterrupt

    def round_done(self, job: Job, done: Any) -> None:
        if (job.name, done.round) == (self.job, self.round):
            raise KeyboardInterrupt


class Counts(Observer):
    """Which jobs were done, and how many rounds of each."""

    def __init__(self) -> None:
        self.rounds: dict[str, int] = {}

    def round_done(self, job: Job, done: Any) -> None:
        self.rounds[job.name] = self.rounds.get(job.name, 0) + 1


def contents(folder: Path) -> dict[str, bytes]:
    """Return what every file of a folder holds, but its locks."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != ".lock"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def facts(file: Path) -> dict[str, Any]:
    """Return what a JSON file holds."""
    return dict(json.loads(file.read_text()))


def records(file: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file of records."""
    return [json.loads(line) for line in read_lines(file)]


def untimed(result: ExperimentResult) -> pd.DataFrame:
    """Return the table of a result without what the clock says."""
    return result.table.drop(columns=["seconds", "seconds_ci"])


def first_job(settings: Mapping[str, Any] | ExperimentConfig, **changes: Any) -> Job:
    """Return the job of the first method and seed of an experiment."""
    config = settings if isinstance(settings, ExperimentConfig) else load({**settings, **changes})
    return Job(config, config.methods[0], config.seeds[0])


def simulation_of(job: Job, source: Source | None = None) -> Simulation:
    """Return the simulation of a job as a run makes it."""
    return make_simulation(job, make_federation(job.config, job.seed, source=source))
