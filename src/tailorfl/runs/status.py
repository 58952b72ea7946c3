"""How an experiment stands: status.json of its result folder, beside those of its jobs.

    {"status": "interrupted", "message": "stopped by SIGTERM", "done": 3, "jobs": 12,
     "job": "ditto, seed 1", "round": 17, "rounds": 30, "process": 4711, "updated": "2026-01-01T12:00:00+00:00"}

It is written when a job begins and when the experiment ends, however it does; a process that was killed outright leaves
"running", and whether it lives tells the lock of the folder. `round` is the last that was done; the job is continued
from its last checkpoint, which may be of an earlier one.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tailorfl.errors import RunError
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.files import decode, encode, is_locked, write_text
from tailorfl.runs.job import Job
from tailorfl.runs.signals import why

NAME = "status.json"


class StatusFile:
    """Says how the experiment in a folder stands while jobs are done in the block that it opens.

    Nothing is written where no job begins.
    """

    def __init__(self, out: Path, jobs: int) -> None:
        self._out, self._jobs, self._done = out, jobs, 0
        self._job: Job | None = None
        self._sim: Simulation | None = None

    def begin(self, job: Job, sim: Simulation, position: int) -> None:
        """Job number `position` (from 1) begins."""
        self._job, self._sim, self._done = job, sim, position - 1
        self._write("running")

    def end(self) -> None:
        """Note that the job is over; its simulation need not be held any more."""
        self._sim, self._done = None, self._done + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._job is None:
            return
        try:
            if error is None:
                self._done = self._jobs
                self._write("finished")
            else:
                stopped = isinstance(error, KeyboardInterrupt | SystemExit)
                self._write("interrupted" if stopped else "failed", why(error))
        except RunError as second:
            if error is None:
                raise
            error.add_note(f"the experiment could not be marked: {second}")

    def _write(self, status: str, message: str = "") -> None:
        facts: dict[str, Any] = {"status": status, "message": message}
        facts |= {"done": self._done, "jobs": self._jobs}
        if self._job is not None and self._sim is not None:
            facts |= {"job": self._job.name, "rounds": self._job.rounds}
            facts |= {} if status == "running" else {"round": self._sim.round}
        updated = datetime.now(UTC).isoformat(timespec="seconds")
        write_text(self._out / NAME, encode({**facts, "process": os.getpid(), "updated": updated}, indent=1))


def sentence(out: Path) -> str:
    """Return how the experiment in a folder stands, for people; "" where it is finished or does not say."""
    file = out / NAME
    if not file.is_file():
        return ""
    try:
        facts = dict(decode(file.read_bytes()))
        progress = f"{facts['done']} of {facts['jobs']} jobs done"
        if "job" in facts:
            after = f" after round {facts['round']} of {facts['rounds']}" if "round" in facts else ""
            progress += f", in {facts['job']}{after}"
        running = facts["status"] == "running"
        status = "interrupted (the process was killed)" if running and not is_locked(out) else facts["status"]
        message = f" ({facts['message']})" if facts["message"] else ""
    except (ValueError, KeyError, TypeError) as error:
        return f"{NAME} cannot be read ({error!r})"
    return "" if status == "finished" else f"{status}{message}: {progress}"
