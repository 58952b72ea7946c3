"""How a process kills itself at a chosen moment of an experiment; only for processes made for that."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tailorfl.runs.checkpoints as checkpoints
import tailorfl.runs.runner as runner
import tailorfl.runs.store as store
from tailorfl.report.result import ExperimentResult
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.job import Job

label, last, current, seen = "", 0, "", 0
real_job, real_write, real_finish = runner.run_job, checkpoints.write_tensors, store.RunStore.finish


def before(owner: Any, name: str, half: Callable[..., None] | None = None) -> None:
    """Replace a function by one that dies instead when its time has come; `half` does half its work."""
    real = getattr(owner, name)

    def dying(*arguments: Any, **options: Any) -> Any:
        global seen
        seen += current == label
        if current == label and seen == last:
            if half is not None:
                half(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(owner, name, dying)


def half_a_file(path: Path, tensors: Mapping[str, Any]) -> None:
    real_write(path, tensors)
    os.truncate(path, path.stat().st_size // 2)


def half_a_line(path: Path, lines: Sequence[str]) -> None:
    with path.open("a") as file:
        file.write(lines[0][: len(lines[0]) // 2])


def remembered_job(job: Job, *arguments: Any) -> None:
    global current
    current = job.method.label
    real_job(job, *arguments)


def finish(self: store.RunStore, summary: Mapping[str, Any]) -> None:
    before(store, "replacing")  # what the parquet files are written with
    real_finish(self, summary)


POINTS: dict[str, Callable[[], None]] = {
    # the clients have trained, the server has not aggregated
    "round": lambda: before(Simulation, "_aggregate"),
    # half of a checkpoint's tensors
    "tensors": lambda: before(checkpoints, "write_tensors", half_a_file),
    # the tensors of a checkpoint are there, its JSON file is not
    "facts": lambda: before(checkpoints, "write_text"),
    # half of a record
    "record": lambda: before(store, "append_lines", half_a_line),
    # summary.json is there, the parquet files are not
    "summary": lambda: setattr(store.RunStore, "finish", finish),
    # the folder of the next job is there, its files are not
    "create": lambda: before(store, "write_text"),
    # every job is finished
    "comparison": lambda: before(ExperimentResult, "plot"),
}


def die(job: str, point: str, count: int) -> None:
    """Kill this process when `point` is reached for the `count`-th time in the job of the label `job`."""
    global label, last
    label, last = job, count
    setattr(runner, "run_job", remembered_job)  # noqa: B010
    POINTS[point]()
