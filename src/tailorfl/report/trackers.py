"""TensorBoard, MLflow and Weights & Biases, which receive the record of each round.

A tracker of a job holds exactly the records of the job's rounds.jsonl. A job that continues after it was killed
therefore first sends its records again, so that a round that was tracked but lost is not there twice. Packages are
imported only if they are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import re
import shutil
import textwrap
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tailorfl.errors import ConfigError, MissingExtraError, RunError, TailorflError, needs_extra
from tailorfl.runs.files import decode, encode, parsed, read_lines, reporting, write_text
from tailorfl.runs.job import Job, Observer

if TYPE_CHECKING:
    from tailorfl.settings.execution import WandbMode
    from tailorfl.settings.experiment import ExperimentConfig

TIMED = ("seconds", "round_seconds")
"""Numbers that differ if a round is repeated."""
AT_ONCE = 1000
"""Largest number of metrics that MLflow accepts in one call."""
REFUSED = re.compile(r"[^/\w. -]")
"""Characters that MLflow refuses in names of metrics, such as the + of the set heldout+10."""

Ending = Literal["finished", "interrupted", "failed"]
Point = tuple[int, Mapping[str, float]]
"""A round, and its numbers by name."""
MARK = "tracked.json"
"""File that shows that trackers wrote into a result folder, with their id."""
PLACES = ("tensorboard", "wandb", "mlflow.db")
"""Files and folders that trackers write into a result folder, next to its jobs."""


class Tracker(Protocol):
    """A tool that tracks one job at a time."""

    setting: str
    """The tracker's key in `track`."""

    def begin(self, job: Job, key: str, past: Sequence[Point]) -> None:
        """Start or continue a job; afterwards the tool has exactly the rounds of `past` under `key`."""

    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        """Store numbers of a round permanently."""

    def end(self, ending: Ending) -> None:
        """End a job."""


class TensorBoard:
    """Event files in one folder per job, rewritten whenever the job continues."""

    setting = "tensorboard"

    def __init__(self, folder: Path) -> None:
        with needs_extra("tensorboard", "track"):
            from torch.utils.tensorboard import SummaryWriter
        self._folder, self._make = folder, SummaryWriter
        self._writer: Any = None

    def begin(self, job: Job, key: str, past: Sequence[Point]) -> None:
        """Replace the job's event files by one with the rounds so far."""
        folder = self._folder / job.folder
        if folder.is_dir():
            shutil.rmtree(folder)
        self._writer = self._make(str(folder))
        as_code = textwrap.indent(
            job.config.to_yaml(), "    ", lambda _: True
        )  # which Markdown shows unchanged
        self._writer.add_text("experiment", as_code, 0)
        for round, numbers in past:
            self._write(round, numbers)
        self._writer.flush()

    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        """Write a scalar for each number."""
        self._write(round, numbers)
        self._writer.flush()

    def end(self, ending: Ending) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, round: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)


class MLflow:
    """One run per job, in an MLflow experiment with the name of ours."""

    setting = "mlflow"

    def __init__(self, address: str) -> None:
        with needs_extra("mlflow", "track"):
            from mlflow import MlflowClient
        self._address, self._make = address, MlflowClient
        self._client: Any = None
        self._run = ""

    def begin(self, job: Job, key: str, past: Sequence[Point]) -> None:
        """Continue the job's run if it has exactly the recorded rounds, else replace it by a new one."""
        if self._client is None:
            with _quiet("mlflow", "alembic"):
                self._client = self._connected()
        client = self._client
        stored = client.get_experiment_by_name(job.config.name)
        experiment = stored.experiment_id if stored else client.create_experiment(job.config.name)
        for run in client.search_runs([experiment], f"tags.`tailorfl.job` = '{key}'"):
            if self._has(run.info.run_id, past):
                self._run = run.info.run_id
                client.update_run(self._run, status="RUNNING")
                return
            client.delete_run(run.info.run_id)
        tags = {"tailorfl.job": key, "method": job.method.name}
        self._run = client.create_run(experiment, run_name=job.name, tags=tags).info.run_id
        for name, value in _settings(job):
            client.log_param(self._run, name, value)
        for round, numbers in past:
            self.add(round, numbers)

    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        """Write a metric for each number, with the round as its step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_metric(name), value, now, round) for name, value in numbers.items()]
        for start in range(0, len(metrics), AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + AT_ONCE])

    def end(self, ending: Ending) -> None:
        """Report how the run ended, with MLflow's status."""
        words = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._run, words[ending])

    def _connected(self) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            client = self._make(tracking_uri=self._address)
            client.search_experiments(max_results=1)  # the address is not used before
        except ImportError as error:  # mlflow-skinny has no database
            raise MissingExtraError(error.name or "sqlalchemy", "track") from error
        except MlflowException as error:
            raise ConfigError(
                f"track.mlflow: '{self._address}' cannot be used: {str(error).strip()}"
            ) from error
        return client

    def _has(self, run: str, past: Sequence[Point]) -> bool:
        """Return whether a run has exactly the numbers of these rounds, ignoring values of measured times."""
        expected: dict[str, list[tuple[int, float]]] = {}
        for round, numbers in past:
            for name, value in numbers.items():
                expected.setdefault(_metric(name), []).append((round, value))
        if self._client.get_run(run).data.metrics.keys() != expected.keys():
            return False

        def is_there(name: str, points: list[tuple[int, float]]) -> bool:
            history = sorted((m.step, m.value) for m in self._client.get_metric_history(run, name))
            return [r for r, _ in history] == [r for r, _ in points] if name in TIMED else history == points

        return all(is_there(name, points) for name, points in expected.items())


class Wandb:
    """One run per job, in a project with the experiment's name; offline in a folder per job, rewritten on resuming."""

    setting = "wandb"

    def __init__(self, folder: Path, mode: WandbMode) -> None:
        with needs_extra("wandb", "track"):
            import wandb
        self._folder, self._mode, self._wandb = folder, mode, wandb
        self._run: Any = None

    def begin(self, job: Job, key: str, past: Sequence[Point]) -> None:
        """Open the job's run; online, an existing run is continued."""
        folder = self._folder / job.folder
        if folder.is_dir() and self._mode == "offline":
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=_allowed(job.config.name),
            name=job.name,
            group=job.method.label,
            id=key,
            dir=str(folder),
            mode=self._mode,
            resume="allow" if self._mode == "online" else None,
            reinit="create_new",  # the caller may have another run
            config={**job.config.to_dict(), "method": job.method.label, "seed": job.seed},
            settings=self._wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        begin = self._run.step  # of a continued run: the first step that it lacks
        for round, numbers in past:
            if round >= begin:
                self.add(round, numbers)

    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        """Write a line of the run's history; it is open until the next one, since a round may get metrics later."""
        self._run.log(dict(numbers), step=round)

    def end(self, ending: Ending) -> None:
        """Close the run."""
        self._run.finish(exit_code=0 if ending == "finished" else 1)


def _settings(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the settings that distinguish a job from others, as MLflow parameters."""
    yield "label", job.method.label
    yield "seed", str(job.seed)
    yield "data", job.config.data.name
    yield "model", job.config.model_of(job.method).name
    yield "rounds", str(job.rounds)
    for name, value in job.method.options.items():
        yield f"option.{name}", str(value)[:500]


def _metric(name: str) -> str:
    """Return the name of a metric without characters that MLflow refuses."""
    return REFUSED.sub("-", name)


def _allowed(name: str) -> str:
    """Return a name without characters that W&B refuses in project names, cut to its largest length."""
    return "".join("-" if c in "/\\#?%:," else c for c in name)[:128]


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Suppress packages' messages about creating a database; warnings and errors are still shown."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class Tracking(Observer):
    """Sends the records in each job's rounds.jsonl to trackers."""

    def __init__(self, out: Path, trackers: Sequence[Tracker]) -> None:
        self._out, self._trackers = out, trackers
        self._open = False

    def job_started(self, job: Job, position: int, total: int, rounds: int, resumed_from: int) -> None:
        """Send the records of rounds that are done already."""
        self.close("failed")  # a job that diverged has not been closed
        key, past = self._key(job), self._past(job)
        self._open = True
        for tracker in self._trackers:
            with _telling(tracker):
                tracker.begin(job, key, past)

    def recorded(self, job: Job, record: Mapping[str, Any]) -> None:
        """Send one record, or later additions to it."""
        for tracker in self._trackers:
            with _telling(tracker):
                tracker.add(*_point(record))

    def job_done(self, job: Job, summary: dict[str, Any]) -> None:
        """Close the job."""
        self.close("finished")

    def job_kept(self, job: Job) -> None:
        """Send all records of a job that was finished before: trackers may be new, or have missed its end."""
        self.job_started(job, 0, 0, job.rounds, job.rounds)
        self.close("finished")

    def close(self, ending: Ending) -> None:
        """Close the open job, if there is one."""
        if self._open:
            self._open = False
            for tracker in self._trackers:
                with _telling(tracker):
                    tracker.end(ending)

    def _past(self, job: Job) -> list[Point]:
        file = self._out / job.folder / "rounds.jsonl"
        return [_point(record) for record in parsed(file, read_lines(file))]

    def _key(self, job: Job) -> str:
        """Return an id of the job that is unique over all result folders."""
        mark = self._out / MARK
        if not mark.is_file():
            write_text(mark, encode({"id": uuid.uuid4().hex[:12]}))
        try:
            folder = str(decode(mark.read_bytes())["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"'{mark}' is damaged ({error!r}); delete it, and trackers start again with a new id"
            ) from error
        digest = hashlib.blake2b(job.folder.as_posix().encode(), digest_size=4).hexdigest()
        return f"{folder}-{digest}"


@contextmanager
def tracked(config: ExperimentConfig, out: Path) -> Iterator[tuple[Observer, ...]]:
    """Yield the observers that send to the trackers of an experiment in the folder `out`; empty without trackers.

    Raises:
        MissingExtraError: the package of a tracker is not installed.
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
        with contextlib.suppress(TailorflError):  # the first error is the one to report
            tracking.close("interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed")
        raise


def forget(out: Path) -> None:
    """Delete the files of trackers in a result folder whose experiment is replaced."""
    if not (out / MARK).is_file():
        return
    with reporting(out, "delete the files of trackers in"):
        for name in PLACES:
            path = out / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (out / MARK).unlink()


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record by name; the round, lists and texts are left out."""
    return {
        key: float(value)
        for key, value in record.items()
        if key != "round" and isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    }


def _point(record: Mapping[str, Any]) -> Point:
    return int(record["round"]), numbers(record)


@contextmanager
def _telling(tracker: Tracker) -> Iterator[None]:
    """Turn any error of a tool into a RunError that names the setting: each tool has its own error types."""
    try:
        yield
    except TailorflError:
        raise
    except Exception as error:
        raise RunError(
            f"track.{tracker.setting}: cannot write there ({type(error).__name__}: {error}); all records are in the "
            "result folder; continue with --resume RESULTS, or without this tracker: tailorfl run RESULTS/config.yaml "
            f"track.{tracker.setting}={'null' if tracker.setting == 'wandb' else 'false'} --resume RESULTS"
        ) from error
