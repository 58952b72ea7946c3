"""Trials, and where they are written down: one Optuna study a method, in an SQLite file of the result folder.

A trial is written before it is trained, with its values, and again when it is told. A process that is killed in between
leaves it as begun, and it is trained on with the same values.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from tailorfl.errors import MissingExtraError, RunError
from tailorfl.runs.files import digest_of
from tailorfl.tuning.space import Choice, Dimension, Space

FILE = "trials.db"
REMEDY = "restore it from a copy, or move it away and --resume, and all trials are trained again"
UNWRITABLE = (
    "SQLITE_FULL",
    "SQLITE_IOERR",
    "SQLITE_READONLY",
    "SQLITE_CANTOPEN",
    "SQLITE_BUSY",
    "SQLITE_PERM",
)
"""How the names of SQLite's errors begin that are of the disk and not of the file's content."""
State = Literal["running", "complete", "pruned", "failed"]


@dataclass(frozen=True)
class Trial:
    """One setting of everything that is searched, and what became of it."""

    number: int
    values: Mapping[str, Any]
    state: State = "running"
    score: float | None = None
    """The validation metric at its last round, a mean over clients and seeds; None where it failed."""
    samples: int = 0
    """Gradients of single samples that it took."""
    seconds: float = 0.0
    reason: str = ""
    """Why it failed."""
    scores: Mapping[int, float] = field(default_factory=dict)
    """Step of successive halving (1, 3, 9) -> the metric there."""
    rungs: Mapping[str, float] = field(default_factory=dict)
    """What the pruner noted of it."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.state != "running"

    def plain(self) -> dict[str, Any]:
        """As `tuning.json` has it."""
        return {
            "number": self.number,
            "values": dict(self.values),
            "score": self.score,
            "samples": self.samples,
            "seconds": round(self.seconds, 3),
            "state": self.state,
        }


def load_optuna() -> Any:
    """Return the package optuna, quiet.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise MissingExtraError("optuna", "tune") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def distribution(dimension: Dimension) -> Any:
    """Return a dimension as Optuna has it."""
    of = load_optuna().distributions
    if isinstance(dimension, Choice):
        return of.CategoricalDistribution(dimension.values)
    if dimension.whole:
        return of.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return of.FloatDistribution(dimension.low, dimension.high, log=dimension.log)


class Ledger:
    """The trials of all methods. One process writes it; `optuna-dashboard` and others may read it."""

    def __init__(self, folder: Path) -> None:
        """Read the file for `opened`, which says what is wrong with it."""
        self._optuna, self._file = load_optuna(), folder / FILE
        from sqlalchemy import URL

        place = URL.create("sqlite", database=str(self._file)).render_as_string(hide_password=False)
        self._storage = self._optuna.storages.RDBStorage(place)
        self._studies: dict[str, Any] = {}

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[Self]:
        """Yield the ledger of a folder, which is begun where there is none.

        Raises:
            RunError: its file is damaged, or cannot be written, now or while the block runs.
        """
        optuna = load_optuna()
        from sqlalchemy.exc import SQLAlchemyError

        try:
            _check_pages(folder / FILE)
            ledger = cls(folder)
            try:
                yield ledger
            finally:
                ledger._storage.remove_session()
                ledger._storage.engine.dispose()
        except (SQLAlchemyError, sqlite3.Error, optuna.exceptions.OptunaError) as error:
            raise _as_library_error(folder / FILE, error) from error

    def open(self, label: str, higher_is_better: bool) -> list[Trial]:
        """Return the trials of a method, in order; its study is begun where there is none."""
        self._studies[label] = self._optuna.create_study(
            storage=self._storage,
            study_name=label,
            direction="maximize" if higher_is_better else "minimize",
            load_if_exists=True,
        )
        try:
            return [_read(frozen) for frozen in self._studies[label].get_trials(deepcopy=False)]
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise RunError(f"'{self._file}' is damaged ({error}); {REMEDY}") from error

    def begin(self, label: str, trial: Trial, space: Space) -> None:
        """Write a trial down before it is trained."""
        kinds = {key: _shown(space[key]) for key in trial.values}
        self._studies[label].add_trial(
            self._optuna.trial.create_trial(
                state=self._optuna.trial.TrialState.RUNNING,
                params=dict(trial.values),
                distributions=kinds,
                user_attrs={"values": dict(trial.values), "begun": _digest(trial)},
            )
        )

    def note(self, label: str, trial: Trial) -> None:
        """Write down, at once, what a trial has that goes on."""
        scores = {str(step): score for step, score in trial.scores.items()}
        so_far = {"scores": scores, "rungs": dict(trial.rungs), "seconds": trial.seconds}
        so_far["digest"] = _digest(replace(trial, score=None, samples=0, reason=""))
        self._live(label, trial.number).set_user_attr("so_far", so_far)

    def tell(self, label: str, trial: Trial) -> None:
        """Write down how a trial has ended."""
        live = self._live(label, trial.number)
        for key in ("samples", "seconds", "reason", "score", "rungs"):
            live.set_user_attr(key, getattr(trial, key))
        live.set_user_attr("digest", _digest(trial))
        reported: Mapping[int, float] = (
            self._studies[label].get_trials(deepcopy=False)[trial.number].intermediate_values
        )
        for step, value in trial.scores.items():
            if step not in reported:
                live.report(value, step)
        states = self._optuna.trial.TrialState
        kind = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}[trial.state]
        score = trial.score if trial.state == "complete" else None
        self._studies[label].tell(trial.number, values=score, state=kind)

    def engine(self, label: str) -> str | None:
        """Return the engine that trained the first trial of a method; None before."""
        found: str | None = self._studies[label].user_attrs.get("engine")
        return found

    def keep_engine(self, label: str, name: str) -> None:
        """Note the engine that all trials of a method are trained by: another one rounds in another way."""
        if self.engine(label) is None:
            self._studies[label].set_user_attr("engine", name)

    def _live(self, label: str, number: int) -> Any:
        study = self._studies[label]
        return self._optuna.trial.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)


def _shown(dimension: Dimension) -> Any:
    """How the file holds a dimension: numbers as numbers, since a grid may be widened and a list of Optuna's not."""
    of = load_optuna().distributions
    if not isinstance(dimension, Choice) or not dimension.numeric:
        return distribution(dimension)
    low, high = dimension.values[0], dimension.values[-1]
    whole = all(isinstance(value, int) for value in dimension.values)
    return of.IntDistribution(low, high) if whole else of.FloatDistribution(low, high)


def _read(frozen: Any) -> Trial:
    """Return a trial of the file.

    ValueError where it is not what was written; older ones have no digest to tell that.
    """
    said = frozen.user_attrs
    name = frozen.state.name.lower()
    trial = Trial(frozen.number, said["values"])
    if name == "running":
        so_far = said.get("so_far", {"scores": {}, "rungs": {}, "seconds": 0.0})
        scores = {int(step): score for step, score in so_far["scores"].items()}
        trial = replace(trial, scores=scores, rungs=so_far["rungs"], seconds=so_far["seconds"])
        digest = so_far.get("digest") if "so_far" in said else said.get("begun")
    else:
        trial = replace(
            trial,
            state="failed" if name == "fail" else name,
            score=said["score"],
            samples=said["samples"],
            seconds=said["seconds"],
            reason=said["reason"],
            scores=dict(frozen.intermediate_values),
            rungs=said["rungs"],
        )
        digest = said.get("digest")
    if digest not in (None, _digest(trial)):
        raise ValueError(f"trial {trial.number} is not what was written")
    return trial


def _digest(trial: Trial) -> str:
    return digest_of(asdict(trial))


def _check_pages(file: Path) -> None:
    """Raise RunError where a file of trials has damaged pages, of which SQLite tells only when it comes to them."""
    if not file.is_file():
        return
    with closing(sqlite3.connect(file)) as connection:
        ((said, *_), *_) = connection.execute("PRAGMA integrity_check(1)")
    if said != "ok":
        raise RunError(f"'{file}' is damaged ({' '.join(str(said).split())}); {REMEDY}")


def _as_library_error(file: Path, error: BaseException) -> RunError:
    """Return what a database refused, as the library says it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, sqlite3.Error):
        cause = getattr(cause, "orig", None) or cause.__cause__
    kind = getattr(cause, "sqlite_errorname", None) or ""
    said = (str(cause or error).strip() or type(error).__name__).splitlines()[0]
    if kind.startswith(UNWRITABLE):
        return RunError(
            f"cannot write '{file}' ({said}); free some space, or see that it may be written, then go on with --resume"
        )
    return RunError(f"'{file}' is damaged ({said}); {REMEDY}")
