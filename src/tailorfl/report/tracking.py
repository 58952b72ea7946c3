"""What is recorded of each round, told to trackers as well: TensorBoard, MLflow, Weights & Biases.

A tracker of a job holds what the job's rounds.jsonl holds, no more and no less. So a job that goes on after a kill
first tells again what is recorded, and a round that was tracked but lost is not there twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailorfl.errors import RunError, TailorflError
from tailorfl.report.trackers import Ending, MLflow, Point, TensorBoard, Tracker, Wandb
from tailorfl.runs.files import decode, encode, parsed, read_lines, reporting, write_text
from tailorfl.runs.job import Job, Observer

if TYPE_CHECKING:
    from tailorfl.settings.experiment import ExperimentConfig

MARK = "tracked.json"
"""Says that trackers wrote into a result folder, and under which id."""
PLACES = ("tensorboard", "wandb", "mlflow.db")
"""What trackers write beside the jobs of a result folder."""


class Tracking(Observer):
    """Tells trackers of every job what its rounds.jsonl says."""

    def __init__(self, out: Path, trackers: Sequence[Tracker]) -> None:
        self._out, self._trackers = out, trackers
        self._open = False

    def job_started(self, job: Job, position: int, total: int, rounds: int, resumed_from: int) -> None:
        """Tell what is recorded of the rounds that are done already."""
        self.close("failed")  # of a job that diverged nobody says that it is over
        key, past = self._key(job), self._past(job)
        self._open = True
        for tracker in self._trackers:
            with _telling(tracker):
                tracker.begin(job, key, past)

    def recorded(self, job: Job, record: Mapping[str, Any]) -> None:
        """Tell one record, or what came to it later."""
        for tracker in self._trackers:
            with _telling(tracker):
                tracker.add(*_point(record))

    def job_done(self, job: Job, summary: dict[str, Any]) -> None:
        """Close what was opened for the job."""
        self.close("finished")

    def job_kept(self, job: Job) -> None:
        """Tell all of a job that was finished before: trackers may be new, or have missed its end."""
        self.job_started(job, 0, 0, job.rounds, job.rounds)
        self.close("finished")

    def close(self, ending: Ending) -> None:
        """Close the job that is open, if one is."""
        if self._open:
            self._open = False
            for tracker in self._trackers:
                with _telling(tracker):
                    tracker.end(ending)

    def _past(self, job: Job) -> list[Point]:
        file = self._out / job.folder / "rounds.jsonl"
        return [_point(record) for record in parsed(file, read_lines(file))]

    def _key(self, job: Job) -> str:
        """Return an id of the job that no other job of any result folder has."""
        mark = self._out / MARK
        if not mark.is_file():
            write_text(mark, encode({"id": uuid.uuid4().hex[:12]}))
        try:
            folder = str(decode(mark.read_bytes())["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"'{mark}' is damaged ({error!r}); delete it, and trackers begin anew under another id"
            ) from error
        digest = hashlib.blake2b(job.folder.as_posix().encode(), digest_size=4).hexdigest()
        return f"{folder}-{digest}"


@contextmanager
def tracked(config: ExperimentConfig, out: Path) -> Iterator[tuple[Observer, ...]]:
    """Yield who tells the trackers of an experiment in the folder `out`: nobody where there are none.

    Raises:
        MissingExtraError: the package of a wanted tracker is not installed.
    """
    settings, trackers = config.track, list[Tracker]()
    if settings.tensorboard:
        trackers.append(TensorBoard(out / "tensorboard"))
    if settings.mlflow:
        database = f"sqlite:///{(out / 'mlflow.db').resolve()}"
        trackers.append(MLflow(database if settings.mlflow is True else settings.mlflow))
    if settings.wandb is not None:
        trackers.append(Wandb(out / "wandb", settings.wandb))
    if not trackers:
        yield ()
        return
    tracking = Tracking(out, trackers)
    try:
        yield (tracking,)
    except BaseException as error:
        with contextlib.suppress(TailorflError):  # the first error is the one to tell
            tracking.close("interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed")
        raise


def forget(out: Path) -> None:
    """Delete what trackers wrote into a result folder, where a new experiment replaces the one in it."""
    if not (out / MARK).is_file():
        return
    with reporting(out, "delete what trackers wrote in"):
        for name in PLACES:
            path = out / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (out / MARK).unlink()


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record by name; the round itself, lists and texts are left out."""
    return {
        key: float(value)
        for key, value in record.items()
        if key != "round" and isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    }


def _point(record: Mapping[str, Any]) -> Point:
    return int(record["round"]), numbers(record)


@contextmanager
def _telling(tracker: Tracker) -> Iterator[None]:
    """Make an error that says which setting of whatever a tool raises: each has a dozen kinds of its own."""
    try:
        yield
    except TailorflError:
        raise
    except Exception as error:
        raise RunError(
            f"track.{tracker.setting}: cannot write there ({type(error).__name__}: {error}); what was recorded is in "
            "the result folder; continue with --resume RESULTS, or without: tailorfl run RESULTS/config.yaml "
            f"track.{tracker.setting}={'null' if tracker.setting == 'wandb' else 'false'} --resume RESULTS"
        ) from error
