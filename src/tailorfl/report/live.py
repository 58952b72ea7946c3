"""The current state of the experiment in a result folder: its jobs, their progress, scores and times.

It is read from the files that a run appends to, without disturbing it; nothing here imports torch. A `Watched` folder
reads only what was appended since the last time, and returns plain values for `tailorfl watch --json` and the board:

    {"name": "digits", "folder": "runs/digits", "status": "running", "message": "", "done": 1, "total": 6,
     "left": 12.5, "metric": "accuracy", "jobs": [{"name": "Ditto, seed 0", "method": "Ditto", "variant": "",
     "label": "ditto", "seed": 0, "status": "running", "message": "", "round": 7, "rounds": 30, "seconds": 3.1,
     "left": 10.2, "loss": 0.41, "score": 0.83, "low": 0.7, "high": 0.95, "bytes_up": 1000,
     "bytes_down": 1000, "epsilon": null, "curve": [[5, 0.83, 0.7, 0.95]], "losses": [[1, 2.3], [2, 1.9]]}]}

Seconds are those of the job so far; `left` is an estimate, null if unknown. With a budget it is: a method's number of
rounds shows only at its end, and `rounds` are the nominal ones or, if they are more, those so far. `score` is the mean
over clients of the leading metric of the deployed model on the clients' own test data; `low` and `high` are its 10 %
and 90 % quantiles. `curve` and `losses` are thinned to `MOST_POINTS`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tailorfl.errors import RunError
from tailorfl.runs.files import decode, is_locked, parsed, reporting
from tailorfl.runs.folders import experiment_in
from tailorfl.runs.job import Job
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.names import slug

MOST_POINTS = 400
"""Largest number of points of a line."""
OVER = ("finished", "failed")
"""Status of jobs that will not continue in this process; a job that diverged stays failed."""
INTERNAL = ("metric", "has_budget")
"""Facts of a job that are not displayed."""
Snapshot = dict[str, Any]


class Watched:
    """A result folder, of an experiment or of one with variants."""

    def __init__(self, folder: Path) -> None:
        """Raise ConfigError if the folder holds no experiment."""
        self.folder = folder
        experiment_in(folder)
        self._records: dict[Path, _Records] = {}

    def look(self) -> Snapshot:
        """Return the current state. Raises RunError or ConfigError if a file cannot be read."""
        config = experiment_in(self.folder)  # read again: it may have been extended or restarted
        parts = list(_parts(config, self.folder))
        jobs = [
            self._job(variant, Job(experiment, method, seed), folder)
            for variant, experiment, folder in parts
            for seed in experiment.seeds
            for method in experiment.methods
        ]
        status, message = _status([folder for _, _, folder in parts], jobs)
        _estimate(jobs, status)
        left = [job["left"] for job in jobs if job["status"] not in OVER]
        return {
            "name": config.name,
            "folder": str(self.folder),
            "status": status,
            "message": message,
            "done": sum(job["status"] in OVER for job in jobs),
            "total": len(jobs),
            "left": sum(left) if left and None not in left and status == "running" else None,
            "metric": next((job["metric"] for job in jobs if job["metric"]), None),
            "jobs": [{key: value for key, value in job.items() if key not in INTERNAL} for job in jobs],
        }

    def _job(self, variant: str, job: Job, out: Path) -> dict[str, Any]:
        folder = out / job.folder
        status, message = _status_of_job(folder)
        records = self._records.setdefault(folder, _Records(folder / "rounds.jsonl")).read()
        last = records[-1] if records else {}
        key = _headline(records)
        scores = [[r["round"], *_score(r, key)] for r in records if key and r.get(key) is not None]
        losses = [[r["round"], r["loss/train"]] for r in records if r.get("loss/train") is not None]
        _, score, low, high = scores[-1] if scores else [None] * 4
        epsilons = [r["epsilon"] for r in records if r.get("epsilon") is not None]
        name, done = f"{job.method.display_name}, seed {job.seed}", last.get("round", 0)
        rounds = job.rounds
        if job.has_budget:
            rounds = done if status == "finished" else max(rounds, done)
        return {
            "name": f"{variant}: {name}" if variant else name,
            "method": job.method.display_name,
            "variant": variant,
            "label": job.method.label,
            "seed": job.seed,
            "status": status,
            "message": message,
            "round": done,
            "rounds": rounds,
            "seconds": last.get("seconds"),
            "left": None,
            "loss": losses[-1][1] if losses else None,
            "score": score,
            "low": low,
            "high": high,
            "bytes_up": last.get("bytes_up"),
            "bytes_down": last.get("bytes_down"),
            "epsilon": epsilons[-1] if epsilons else None,
            "curve": _thinned(scores),
            "losses": _thinned(losses),
            "metric": None if key is None else key.rpartition("/")[2],
            "has_budget": job.has_budget,
        }


class _Records:
    """The records of a growing file; each read continues the last one, or starts over if the file was replaced."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inode = self._offset = 0
        self._records: list[dict[str, Any]] = []

    def read(self) -> Sequence[Mapping[str, Any]]:
        with reporting(self._file, "read"):
            try:
                file = self._file.open("rb")
            except FileNotFoundError:
                self._inode, self._records = 0, []
                return []
            with file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._inode or facts.st_size < self._offset:
                    # It was replaced, so repeated rounds are new records.
                    self._inode, self._offset, self._records = facts.st_ino, 0, []
                file.seek(self._offset)
                block = file.read()
        complete = block.rfind(b"\n") + 1
        records = parsed(self._file, block[:complete].split(b"\n")[:-1])
        self._records += [_slim(record) for record in records]
        self._offset += complete
        return self._records


def _slim(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the displayed part of a record."""
    names = ("round", "seconds", "bytes_up", "bytes_down", "epsilon", "loss/train")
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in record.items()
        if key in names or key.startswith(("personal/local/", "global/local/"))
    }


def _headline(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the key of the leading metric, the only one with quantiles; personal before global."""
    for record in reversed(records):
        for model in ("personal", "global"):
            keys: list[str] = [key for key in record if key.startswith(f"{model}/local/")]
            if keys:
                return next((key.removesuffix("/p50") for key in keys if key.endswith("/p50")), keys[0])
    return None


def _score(record: Mapping[str, Any], key: str) -> list[Any]:
    return [record.get(f"{key}{quantile}") for quantile in ("", "/p10", "/p90")]


def _thinned(points: list[Any]) -> list[Any]:
    step = math.ceil(len(points) / MOST_POINTS)
    return points[::-1][::step][::-1] if step > 1 else points  # the last point is kept


def _parts(config: ExperimentConfig, folder: Path) -> Iterator[tuple[str, ExperimentConfig, Path]]:
    """Yield (name of the variant, experiment, folder); one with the name "" if there are no variants."""
    if not config.variants:
        yield "", config, folder
        return
    from tailorfl.settings.loading import expand  # only for variants

    for name, experiment in expand(config).items():
        part = folder / slug(name)
        yield name, experiment_in(part) if (part / "config.yaml").is_file() else experiment, part


def _status_of_job(folder: Path) -> tuple[str, str]:
    if not (folder / "config.json").is_file():
        return "waiting", ""
    status = RunStore.open(folder, readonly=True).status
    is_stopped = status in ("failed", "interrupted")
    return status, str(_facts(folder).get("message", "")) if is_stopped else ""


def _status(folders: Sequence[Path], jobs: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return (status, message) of the experiment, which is running while a process holds one of its folders."""
    if any(is_locked(folder) for folder in folders):
        return "running", ""
    facts = [_facts(folder) for folder in folders if (folder / "status.json").is_file()]
    statuses = [str(part.get("status")) for part in facts]
    if statuses == ["finished"] * len(folders) or (jobs and all(job["status"] == "finished" for job in jobs)):
        return "finished", ""
    for status, part in zip(statuses, facts, strict=True):
        if status in ("failed", "interrupted"):
            return status, str(part.get("message", ""))
    is_begun = any(job["status"] != "waiting" for job in jobs)
    return ("interrupted", "the process was killed") if is_begun else ("waiting", "nothing runs here")


def _facts(folder: Path) -> dict[str, Any]:
    file = folder / "status.json"
    try:
        with reporting(file, "read"):
            return dict(decode(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise RunError(f"'{file}' is damaged ({error}); restore it from a copy") from error


def _estimate(jobs: Sequence[dict[str, Any]], status: str) -> None:
    """Estimate the seconds left of every job from its own pace, else that of its method, else that of all jobs."""
    paces: dict[tuple[str, ...], list[float]] = {}
    for job in jobs:
        if job["seconds"] and job["round"]:
            for line in ((job["name"],), (job["variant"], job["label"]), ()):
                paces.setdefault(line, []).append(job["seconds"] / job["round"])
    for job in jobs:
        lines = ((job["name"],), (job["variant"], job["label"]), ())
        pace = next((paces[line] for line in lines if line in paces), None)
        if job["status"] in OVER:
            job["left"] = 0.0
        elif pace and status == "running" and not job["has_budget"]:
            job["left"] = (job["rounds"] - job["round"]) * sum(pace) / len(pace)
