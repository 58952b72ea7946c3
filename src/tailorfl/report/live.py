"""How the experiment in a result folder stands at this moment: its jobs, how far each is, how good, and for how long.

Read from the files that a run appends to, without disturbing it; nothing here imports torch. A `Watched` folder reads
each time only what was appended since, and gives plain values as `tailorfl watch --json` and the board show them:

    {"name": "digits", "folder": "runs/digits", "status": "running", "message": "", "done": 1, "total": 6,
     "left": 12.5, "metric": "accuracy", "jobs": [{"name": "ditto, seed 0", "variant": "", "label": "ditto", "seed": 0,
     "status": "running", "message": "", "round": 7, "rounds": 30, "seconds": 3.1, "left": 10.2, "loss": 0.41,
     "score": 0.83, "low": 0.7, "high": 0.95, "bytes_up": 1000, "bytes_down": 1000, "epsilon": null,
     "curve": [[5, 0.83, 0.7, 0.95]], "losses": [[1, 2.3], [2, 1.9]]}]}

Seconds are those of the job so far; `left` is an estimate, null where nothing can be said. `score` is the mean over
clients of the metric that comes first, of the model that is deployed, on the clients' own test data; `low` and `high`
are quantiles 10 and 90 %. `curve` and `losses` are thinned to `MOST_POINTS`.
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
"""Points of a line that is drawn."""
OVER = ("finished", "failed")
"""How a job stands that will do nothing more in this process: one that diverged stays failed."""
Snapshot = dict[str, Any]


class Watched:
    """A result folder, of an experiment or of one with variants."""

    def __init__(self, folder: Path) -> None:
        """Raise ConfigError where the folder holds no experiment."""
        self.folder = folder
        experiment_in(folder)
        self._records: dict[Path, _Records] = {}

    def look(self) -> Snapshot:
        """Return how it stands now. Raises RunError or ConfigError where a file cannot be read."""
        config = experiment_in(self.folder)  # again: it may be extended, or begun anew
        parts = list(_parts(config, self.folder))
        jobs = [
            self._job(name, Job(one, method, seed), place)
            for name, one, place in parts
            for seed in one.seeds
            for method in one.methods
        ]
        status, message = _status([place for _, _, place in parts], jobs)
        _estimate(jobs, status)
        waited = [job["left"] for job in jobs if job["status"] not in OVER]
        known = [seconds for seconds in waited if seconds is not None]
        return {
            "name": config.name,
            "folder": str(self.folder),
            "status": status,
            "message": message,
            "done": sum(job["status"] in OVER for job in jobs),
            "total": len(jobs),
            "left": sum(known) if known and len(known) == len(waited) and status == "running" else None,
            "metric": next((job["metric"] for job in jobs if job["metric"]), None),
            "jobs": [{key: value for key, value in job.items() if key != "metric"} for job in jobs],
        }

    def _job(self, variant: str, job: Job, out: Path) -> dict[str, Any]:
        place = out / job.folder
        status, message = _status_of_job(place)
        reader = self._records.setdefault(place, _Records(place / "rounds.jsonl"))
        records = reader.read()
        last = records[-1] if records else {}
        key = _headline(records)
        scores = [
            _point(record, key) for record in records if key is not None and record.get(key) is not None
        ]
        losses = [[r["round"], r["loss/train"]] for r in records if r.get("loss/train") is not None]
        score = scores[-1] if scores else [None] * 4
        spent = [r["epsilon"] for r in records if r.get("epsilon") is not None]
        return {
            "name": f"{variant}: {job.name}" if variant else job.name,
            "variant": variant,
            "label": job.method.label,
            "seed": job.seed,
            "status": status,
            "message": message,
            "round": last.get("round", 0),
            "rounds": job.rounds,
            "seconds": last.get("seconds"),
            "left": None,
            "loss": losses[-1][1] if losses else None,
            "score": score[1],
            "low": score[2],
            "high": score[3],
            "bytes_up": last.get("bytes_up"),
            "bytes_down": last.get("bytes_down"),
            "epsilon": spent[-1] if spent else None,
            "curve": _thinned(scores),
            "losses": _thinned(losses),
            "metric": None if key is None else key.rpartition("/")[2],
        }


class _Records:
    """The records of a file that grows; read from where the last look ended, from its start where it was cut."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: tuple[int, int] = (0, 0)  # inode and bytes
        self._records: list[dict[str, Any]] = []

    def read(self) -> Sequence[Mapping[str, Any]]:
        with reporting(self._file, "read"):
            try:
                file = self._file.open("rb")
            except FileNotFoundError:
                self._seen, self._records = (0, 0), []
                return []
            with file:
                facts = _inode(file.fileno())
                inode, offset = self._seen
                if (
                    inode != facts[0] or facts[1] < offset
                ):  # it was replaced: what was done again is another line
                    offset, self._records = 0, []
                file.seek(offset)
                block = file.read()
        whole = block.rfind(b"\n") + 1
        found = parsed(self._file, block[:whole].split(b"\n")[:-1])
        self._records += [_slim(record) for record in found]
        self._seen = (facts[0], offset + whole)
        return self._records


def _inode(descriptor: int) -> tuple[int, int]:
    facts = os.fstat(descriptor)
    return facts.st_ino, facts.st_size


def _slim(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is shown of a record."""
    named = ("round", "seconds", "bytes_up", "bytes_down", "epsilon", "loss/train")
    shown = ("personal/local/", "global/local/")
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in record.items()
        if key in named or key.startswith(shown)
    }


def _headline(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the key of the metric that comes first, which alone has quantiles; personal before global."""
    for record in reversed(records):
        for model in ("personal", "global"):
            found: list[str] = [key for key in record if key.startswith(f"{model}/local/")]
            if found:
                medians = [key for key in found if key.endswith("/p50")]
                return medians[0].removesuffix("/p50") if medians else found[0]
    return None


def _point(record: Mapping[str, Any], key: str) -> list[Any]:
    return [record["round"], record[key], record.get(f"{key}/p10"), record.get(f"{key}/p90")]


def _thinned(points: list[Any]) -> list[Any]:
    step = math.ceil(len(points) / MOST_POINTS)
    return points[::-1][::step][::-1] if step > 1 else points  # the last stays


def _parts(config: ExperimentConfig, folder: Path) -> Iterator[tuple[str, ExperimentConfig, Path]]:
    """(name of the variant, experiment, folder); one under "" where there are no variants."""
    if not config.variants:
        yield "", config, folder
        return
    from tailorfl.settings.loading import expand  # imports torch

    for name, one in expand(config).items():
        place = folder / slug(name)
        yield name, experiment_in(place) if (place / "config.yaml").is_file() else one, place


def _status_of_job(place: Path) -> tuple[str, str]:
    if not (place / "config.json").is_file():
        return "waiting", ""
    store = RunStore.open(place, readonly=True)
    status = store.status
    if status in ("failed", "interrupted"):
        return status, str(_facts(place).get("message", ""))
    return status, ""


def _status(places: Sequence[Path], jobs: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """(status, message) of the whole: running while a process holds one of its folders."""
    if any(is_locked(place) for place in places):
        return "running", ""
    facts = [_facts(place) for place in places if (place / "status.json").is_file()]
    if len(facts) == len(places) and all(one.get("status") == "finished" for one in facts):
        return "finished", ""
    if jobs and all(job["status"] == "finished" for job in jobs):
        return "finished", ""
    for one in facts:
        if one.get("status") in ("failed", "interrupted"):
            return str(one["status"]), str(one.get("message", ""))
    begun = any(job["status"] != "waiting" for job in jobs)
    return ("interrupted", "the process was killed") if begun else ("waiting", "nothing runs here")


def _facts(place: Path) -> dict[str, Any]:
    file = place / "status.json"
    try:
        with reporting(file, "read"):
            found = decode(file.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it holds no named values")
    except ValueError as error:
        raise RunError(f"'{file}' is damaged ({error}); restore it from a copy") from error
    return found


def _estimate(jobs: Sequence[dict[str, Any]], status: str) -> None:
    """Fill in what is left of every job: its rounds to come, each as long as those of its line, or of all lines."""
    paces: dict[tuple[str, str], list[float]] = {}
    for job in jobs:
        if job["seconds"] and job["round"]:
            paces.setdefault((job["variant"], job["label"]), []).append(job["seconds"] / job["round"])
    every = [pace for found in paces.values() for pace in found]
    for job in jobs:
        mine = [job["seconds"] / job["round"]] if job["seconds"] and job["round"] else None
        found = mine or paces.get((job["variant"], job["label"])) or every
        if job["status"] in OVER:
            job["left"] = 0.0
        elif found and status == "running":
            job["left"] = (job["rounds"] - job["round"]) * sum(found) / len(found)
