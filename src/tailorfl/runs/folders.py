"""Result folders: the choice of a new one, its lock, and its files other than jobs.

`config.yaml` is the experiment. `status.json` is its status:

    {"status": "interrupted", "message": "stopped by SIGTERM", "done": 3, "jobs": 12,
     "job": "ditto, seed 1", "round": 17, "rounds": 30, "process": 4711, "updated": "2026-01-01T12:00:00+00:00"}

It is written when a job begins and when the experiment ends in any way; a killed process leaves "running", and the
folder's lock shows whether the process is alive. `round` is the last finished round; the job is continued from its last
checkpoint, which may be of an earlier round.

`tuning.json` describes the tuning of the settings. It is stored next to the tuned experiment's file; a comparison with
tuned settings has a copy in its own folder, and its report lists the budget of every method. `tailorfl.tuning.run`
defines its content.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tailorfl.errors import ConfigError, RunError
from tailorfl.printable import harmful, quoted
from tailorfl.runs.files import FolderLock, decode, encode, is_locked, reporting, write_text
from tailorfl.runs.job import Job
from tailorfl.runs.process import why
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig, MethodConfig
from tailorfl.settings.loading import is_file, load, read
from tailorfl.settings.names import slug

if TYPE_CHECKING:
    from tailorfl.rounds.simulation import Simulation

ROOT = Path("runs")
ALWAYS = ("seeds", "data", "model", "methods", "train", "rounds")
"""Settings that every config.yaml of a result folder has, whatever version wrote it."""
RESULTS = ("comparison.csv", "comparison.md", "report.md", "report.html")
"""Tables and reports of an experiment, which are written at its end."""
CERTIFICATE = "certificate.json"
"""Of an unlearning."""
MEMBERSHIP = ("federation.json", "left", "joining")
"""Of a deployment's server."""
STATUS = "status.json"
TUNING = "tuning.json"


def new_folder(config: ExperimentConfig, overwrite: bool = False) -> Path:
    """Return runs/NAME or, if that exists and must stay, the first free one of runs/NAME-2, runs/NAME-3, ...

    For a scale of a recipe, NAME is NAME-SCALE.
    """
    folder = first = ROOT / slug(config.name if config.scale is None else f"{config.name}-{config.scale}")
    number = 2
    while folder.exists() and not overwrite:
        folder = first.with_name(f"{first.name}-{number}")
        number += 1
    return folder


def experiment_in(folder: Path) -> ExperimentConfig:
    """Return the experiment with which a result folder was started.

    Raises:
        ConfigError: there is none, or its file lacks settings that every such file has.
    """
    check_name(folder)
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"'{folder}' is not a result folder: it has no config.yaml; check the name")
    return whole_experiment(file)


def whole_experiment(file: Path) -> ExperimentConfig:
    """Return the experiment in a file that this library wrote.

    Raises:
        ConfigError: it cannot be read, or lacks settings that every such file has.
    """
    written = read(file)
    lost = [key for key in ALWAYS if key not in written]
    if lost:
        raise ConfigError(
            f"'{file}' lacks {', '.join(lost)}, which every experiment writes; it is damaged or was edited, so restore "
            "it from a copy"
        )
    return load(file)


def with_traces_in(folder: Path, config: ExperimentConfig) -> ExperimentConfig:
    """Return the experiment of a result folder, with the copies in its jobs if the traces it replays have moved."""
    if config.system.trace is None or Path(config.system.trace).exists():
        return config
    system = config.system.model_copy(update={"trace": str(folder)})
    return config.model_copy(update={"system": system})


def check_name(folder: Path) -> None:
    """Check that a folder can have its name.

    Raises:
        ConfigError: the name has control characters, or is longer than file systems allow.
    """
    character = harmful(str(folder))
    if character is not None:
        raise ConfigError(
            f"the folder {str(folder)!r} has the character {character!r} in its name; leave it out"
        )
    with reporting(folder, "use the folder"):
        folder.exists()


def experiment_to_resume(folder: Path) -> ExperimentConfig:
    """Return the experiment with which a result folder was started; the ConfigError also says how to begin one."""
    check_name(folder)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"'{folder}' cannot be resumed: it has no config.yaml; check the name, or give the experiment too (CONFIG, "
            "KEY=VALUE) to start it there"
        )
    return experiment_in(folder)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of the result folder, which is created first, and removed if it stays empty."""
    check_name(out)
    with reporting(out, "create the result folder"):
        out.mkdir(parents=True, exist_ok=True)
    with FolderLock(out):
        try:
            yield
        finally:
            if not (out / "config.yaml").exists():
                with suppress(OSError):  # other files keep the folder
                    (out / ".lock").unlink()
                    out.rmdir()


def check_folder(out: Path, resume: bool, overwrite: bool) -> None:
    """Raise RunError if `out` holds no experiment to resume, or one that may not be replaced."""
    check_name(out)
    exists = (out / "config.yaml").exists()
    if resume and not exists:
        raise RunError(f"'{out}' cannot be resumed: it has no config.yaml; start it without --resume")
    if exists and not resume and not overwrite:
        raise RunError(
            f"'{out}' already holds an experiment; continue it with --resume {quoted(out)}, replace it with "
            "--overwrite, or choose another folder with --out"
        )
    # A merged report, or files of somebody's own.
    if not exists and not overwrite and (others := [name for name in RESULTS if (out / name).exists()]):
        raise RunError(
            f"'{out}' holds {', '.join(others)}, which the results of an experiment would replace; choose another "
            "folder with --out, or allow it with --overwrite"
        )


def discard_jobs(out: Path) -> None:
    """Delete the jobs of an earlier experiment, which would be mistaken for finished ones of the next.

    Raises:
        RunError: one of them is a link to another folder, in which nothing is deleted.
    """
    for file in out.glob("*/seed-*/config.json"):
        for folder in (file.parent, file.parent.parent):
            if folder.is_symlink():
                raise RunError(
                    f"'{folder}' is a link to a folder outside the result folder, where nothing is deleted; remove the "
                    "link, or choose another folder with --out"
                )
        RunStore.discard(file.parent)


def check_source(out: Path, source: Any) -> None:
    """Raise ConfigError if an experiment that was started on the caller's own data would be continued on others."""
    for file in sorted(out.glob("*/seed-*/config.json")):
        if RunStore.open(file.parent, readonly=True).config.get("own_source", False) != (source is not None):
            raise ConfigError(
                f"'{out}' was not started on data passed from Python; leave out source"
                if source is not None
                else f"'{out}' was started on data passed from Python; pass them again, as tailorfl.run(out=..., "
                "resume=True, source=...) or tailorfl.export_models(..., source=...)"
            )


class StatusFile:
    """Writes the status of the experiment in a folder while jobs are done in its block.

    If no job begins, it writes only that an interrupted experiment is now finished.
    """

    def __init__(self, out: Path, jobs: int) -> None:
        self._out, self._jobs, self._done = out, jobs, 0
        self._job: Job | None = None
        self._sim: Simulation | None = None

    def begin(self, job: Job, sim: Simulation, position: int) -> None:
        """Note that job number `position` (from 1) begins."""
        self._job, self._sim, self._done = job, sim, position - 1
        self._write("running")

    def end(self) -> None:
        """Note that the job is over, and release its simulation."""
        self._sim, self._done = None, self._done + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._job is None and (error is not None or not status_sentence(self._out)):
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
        write_text(
            self._out / STATUS, encode({**facts, "process": os.getpid(), "updated": updated}, indent=1)
        )


def status_sentence(out: Path) -> str:
    """Return a readable status of the experiment in a folder, "" if it is finished or unknown."""
    file = out / STATUS
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
        return f"{STATUS} cannot be read ({error!r})"
    return "" if status == "finished" else f"{status}{message}: {progress}"


def value_of(config: ExperimentConfig, method: MethodConfig, setting: str) -> Any:
    """Return the value of a setting like `train.lr`, `method.lam` or `method.distil.lr` in a line of an experiment.

    Raises:
        KeyError: the line has no such setting.
    """
    from tailorfl.core.method import (
        make_method,  # imports torch, which most callers need later or not at all
    )

    group, _, path = setting.partition(".")
    value: Any = {
        "train": {**config.train.model_dump(mode="json"), **method.train},
        "method": make_method(method.name, method.options).all_options(),
    }[group]
    for step in path.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(setting)
        value = value[step]
    return value


def tuning_beside(file: str | Path | None, config: ExperimentConfig) -> Path | None:
    """Return the tuning.json next to an experiment's file, if the experiment has the settings chosen there.

    Raises:
        RunError: it cannot be read.
    """
    if file is None or not is_file(Path(file)):  # it may be the first KEY=VALUE of a command
        return None
    tuning = Path(file).parent / TUNING
    if not tuning.is_file():
        return None
    lines, chosen = {m.label: m for m in config.methods}, read_tuning(tuning)["methods"]
    return (
        tuning
        if set(lines) == set(chosen) and all(_has(config, lines[n], chosen[n]) for n in lines)
        else None
    )


def _has(config: ExperimentConfig, method: MethodConfig, row: Mapping[str, Any]) -> bool:
    try:
        return all(value_of(config, method, key) == value for key, value in row["chosen"].items())
    except KeyError:
        return False


def read_tuning(file: Path) -> dict[str, Any]:
    """Return the content of a tuning.json. Raises RunError if the file is not one."""
    try:
        content = decode(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not {"budget", "sampler", "metric", "methods"} <= content.keys():
            raise ValueError("it lacks budget, sampler, metric or methods")
    except (OSError, ValueError) as error:
        raise RunError(f"'{file}' is damaged: {error}; restore it from a copy, or tune again") from error
    return content


def tunings(folders: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """Return the tunings of result folders by their file; folders that hold the same one count once.

    Raises:
        RunError: a file is damaged.
    """
    distinct: dict[Path, dict[str, Any]] = {}
    for file in (folder / TUNING for folder in folders):
        if file.is_file() and (content := read_tuning(file)) not in distinct.values():
            distinct[file] = content
    return distinct


def best_score(row: Mapping[str, Any]) -> float | None:
    """Return the score of the chosen settings of a method, or None if no trial was completed."""
    scores = [t["score"] for t in row["trials"] if t["state"] == "complete" and t["values"] == row["chosen"]]
    return scores[0] if scores else None


def as_words(values: Mapping[str, Any]) -> str:
    """Return settings in the syntax of the command line: `train.lr=0.1 method.lam=1`."""
    return " ".join(f"{key}={_plain(value)}" for key, value in values.items())


def _plain(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else {None: "null"}.get(value, str(value))
