"""TensorBoard, MLflow and Weights & Biases as trackers; their packages are imported where one of them is wanted."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tailorfl.errors import ConfigError, MissingExtraError
from tailorfl.runs.job import Job

if TYPE_CHECKING:
    from tailorfl.settings.track import WandbMode

TIMED = ("seconds", "round_seconds")
"""Numbers that are others when a round is done again."""
AT_ONCE = 1000
"""Metrics that MLflow takes in one call."""

Ending = Literal["finished", "interrupted", "failed"]
Point = tuple[int, Mapping[str, float]]
"""A round, and named numbers of it."""


class Tracker(Protocol):
    """One tool that is told of one job at a time."""

    setting: str
    """Its key in `track`."""

    def begin(self, job: Job, key: str, past: Sequence[Point]) -> None:
        """Begin a job or go on with it; afterwards the tool has the rounds of `past` and no others under `key`."""

    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        """Note numbers of a round; they outlive this process."""

    def end(self, ending: Ending) -> None:
        """End a job."""


class TensorBoard:
    """Event files in a folder a job, written anew whenever the job goes on."""

    setting = "tensorboard"

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("tensorboard", "track") from error
        self._folder, self._make = folder, SummaryWriter
        self._writer: Any = None

    def begin(self, job: Job, key: str, past: Sequence[Point]) -> None:
        """Replace the job's event files by one of the rounds that are done."""
        folder = self._folder / job.folder
        if folder.is_dir():
            shutil.rmtree(folder)
        self._writer = self._make(str(folder))
        self._writer.add_text("experiment", _indented(job.config.to_yaml()), 0)
        for round, numbers in past:
            self._write(round, numbers)
        self._writer.flush()

    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        """Write a scalar a number."""
        self._write(round, numbers)
        self._writer.flush()

    def end(self, ending: Ending) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, round: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)


class MLflow:
    """A run a job, in an experiment of the name of ours."""

    setting = "mlflow"

    def __init__(self, address: str) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise MissingExtraError("mlflow", "track") from error
        self._address, self._make = address, MlflowClient
        self._client: Any = None
        self._run = ""

    def begin(self, job: Job, key: str, past: Sequence[Point]) -> None:
        """Go on with the job's run where it has what is recorded; else a new one takes its place."""
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
        """Write a metric a number, with the round as its step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, round) for name, value in numbers.items()]
        for start in range(0, len(metrics), AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + AT_ONCE])

    def end(self, ending: Ending) -> None:
        """Say how the run ended, in MLflow's words."""
        words = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._run, words[ending])

    def _connected(self) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            client = self._make(tracking_uri=self._address)
            client.search_experiments(max_results=1)  # only now the address is looked at
        except ImportError as error:  # mlflow-skinny alone has no database
            raise MissingExtraError(error.name or "sqlalchemy", "track") from error
        except MlflowException as error:
            raise ConfigError(
                f"track.mlflow: '{self._address}' cannot be used: {str(error).strip()}"
            ) from error
        return client

    def _has(self, run: str, past: Sequence[Point]) -> bool:
        """Whether a run has the numbers of these rounds and of no others; what a clock says aside."""
        expected: dict[str, list[tuple[int, float]]] = {}
        for round, numbers in past:
            for name, value in numbers.items():
                expected.setdefault(name, []).append((round, value))
        if self._client.get_run(run).data.metrics.keys() != expected.keys():
            return False

        def is_there(name: str, points: list[tuple[int, float]]) -> bool:
            history = sorted((m.step, m.value) for m in self._client.get_metric_history(run, name))
            return [r for r, _ in history] == [r for r, _ in points] if name in TIMED else history == points

        return all(is_there(name, points) for name, points in expected.items())


class Wandb:
    """A run a job, in a project of the experiment's name; offline in a folder a job, written anew when it goes on."""

    setting = "wandb"

    def __init__(self, folder: Path, mode: WandbMode) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("wandb", "track") from error
        self._folder, self._mode, self._wandb = folder, mode, wandb
        self._run: Any = None

    def begin(self, job: Job, key: str, past: Sequence[Point]) -> None:
        """Open the job's run; online it is the one that was begun, where there is one."""
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
            reinit="create_new",  # the caller may have a run of his own
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
        begin = self._run.step  # of a run that goes on: the first step that it does not have
        for round, numbers in past:
            if round >= begin:
                self.add(round, numbers)

    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        """One line of the run's history; a line is closed so that it is in the file at once."""
        self._run.log(dict(numbers), step=round, commit=True)

    def end(self, ending: Ending) -> None:
        """Close the run."""
        self._run.finish(exit_code=0 if ending == "finished" else 1)


def _settings(job: Job) -> Iterator[tuple[str, str]]:
    """Yield what tells the job from others, as MLflow's parameters."""
    yield "label", job.method.label
    yield "seed", str(job.seed)
    yield "data", job.config.data.name
    yield "model", job.config.model_of(job.method).name
    yield "rounds", str(job.rounds)
    for name, value in job.method.options.items():
        yield f"option.{name}", str(value)[:500]


def _allowed(name: str) -> str:
    """Return a name without what W&B refuses in those of projects, and not longer."""
    return "".join("-" if c in "/\\#?%:," else c for c in name)[:128]


def _indented(text: str) -> str:
    """Return a text as TensorBoard's Markdown shows it unchanged."""
    return "".join(f"    {line}\n" for line in text.splitlines())


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Keep what packages say of making a database out of the terminal; warnings and errors stay."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
