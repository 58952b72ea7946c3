"""Trials and their file: one Optuna study per method, in an SQLite file of the result folder.

A trial is written before it is trained, with its values, and again when it has ended. One that a killed process left
unfinished is trained again with the same values.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from tailorfl.errors import RunError, needs_extra
from tailorfl.runs.files import digest_of
from tailorfl.tuning.space import Choice, Dimension, Space

FILE = "trials.db"
REMEDY = "restore it from a copy, or move it away and train all trials again with --resume"
UNWRITABLE = (
    "SQLITE_FULL",
    "SQLITE_IOERR",
    "SQLITE_READONLY",
    "SQLITE_CANTOPEN",
    "SQLITE_BUSY",
    "SQLITE_PERM",
)
"""Prefixes of SQLite's errors that concern the disk and not the file's content."""
SECONDS_OF_WAITING = 60
"""Seconds to wait for the file while another process of the same tuning writes."""
State = Literal["running", "complete", "pruned", "failed"]


@dataclass(frozen=True)
class Trial:
    """One set of searched values, and its outcome."""

    number: int
    values: Mapping[str, Any]
    state: State = "running"
    score: float | None = None
    """The validation metric at its last round, a mean over clients and seeds, or None if it failed."""
    samples: int = 0
    """Number of its gradients of single samples."""
    seconds: float = 0.0
    reason: str = ""
    """Why it failed."""

    @property
    def done(self) -> bool:
        """Whether the trial has ended."""
        return self.state != "running"

    def plain(self) -> dict[str, Any]:
        """Return the trial's entry in `tuning.json`."""
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
    with needs_extra("optuna", "tune"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def distribution(dimension: Dimension) -> Any:
    """Return a dimension as Optuna's distribution."""
    distributions = load_optuna().distributions
    if isinstance(dimension, Choice):
        return distributions.CategoricalDistribution(dimension.values)
    if dimension.whole:
        return distributions.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.log)


class Ledger:
    """The trials of all methods. Processes of one tuning write it; `optuna-dashboard` and others may read it."""

    def __init__(self, folder: Path) -> None:
        """Read the file; `opened` converts its errors."""
        self._optuna, self._file = load_optuna(), folder / FILE
        from sqlalchemy import URL

        url = URL.create("sqlite", database=str(self._file)).render_as_string(hide_password=False)
        waiting = {"connect_args": {"timeout": SECONDS_OF_WAITING}}
        self._storage = self._optuna.storages.RDBStorage(url, engine_kwargs=waiting)

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[Self]:
        """Yield the ledger of a folder, a new one if there is none.

        Raises:
            RunError: its file is damaged or cannot be written, now or within the block.
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
        """Return the trials of a method, in order; create its study if there is none."""
        study = self._optuna.create_study(
            storage=self._storage,
            study_name=label,
            direction="maximize" if higher_is_better else "minimize",
            load_if_exists=True,
        )
        try:
            return [_read(frozen) for frozen in study.get_trials(deepcopy=False)]
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise RunError(f"'{self._file}' is damaged ({error}); {REMEDY}") from error

    def begin(self, label: str, trial: Trial, space: Space) -> None:
        """Store a trial before it is trained."""
        self._study(label).add_trial(
            self._optuna.trial.create_trial(
                state=self._optuna.trial.TrialState.RUNNING,
                params=dict(trial.values),
                distributions={key: _extensible(space[key]) for key in trial.values},
                user_attrs={"begun": _sealed({"values": dict(trial.values)})},
            )
        )

    def stops(self, label: str, number: int, step: int, score: float, pruner: Any) -> bool:
        """Store the score of a trial at a step, and return whether the pruner stops it there."""
        study = self._study(label, pruner)
        frozen = study.get_trials(deepcopy=False)[number]
        trial = self._optuna.trial.Trial(study, frozen._trial_id)
        if step not in frozen.intermediate_values:  # it is there if the trial is trained again
            trial.report(score, step)
        return bool(trial.should_prune())

    def tell(self, label: str, trial: Trial) -> None:
        """Store the outcome of a trial."""
        study, states = self._study(label), self._optuna.trial.TrialState
        trial_id = study.get_trials(deepcopy=False)[trial.number]._trial_id
        self._storage.set_trial_user_attr(trial_id, "ended", _sealed(asdict(trial)))
        state = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}[trial.state]
        study.tell(trial.number, values=trial.score if trial.state == "complete" else None, state=state)

    def engine(self, label: str) -> str | None:
        """Return the engine that trained the first trial of a method, or None before that."""
        name: str | None = self._study(label).user_attrs.get("engine")
        return name

    def keep_engine(self, label: str, name: str) -> None:
        """Store the engine for all trials of a method: another one would round differently."""
        if self.engine(label) is None:
            self._study(label).set_user_attr("engine", name)

    def _study(self, label: str, pruner: Any = None) -> Any:
        return self._optuna.load_study(study_name=label, storage=self._storage, pruner=pruner)


def _extensible(dimension: Dimension) -> Any:
    """Return a dimension as in the file: a numeric grid as a range, which Optuna lets grow."""
    if not isinstance(dimension, Choice) or not dimension.numeric:
        return distribution(dimension)
    distributions, low, high = load_optuna().distributions, dimension.values[0], dimension.values[-1]
    if all(isinstance(value, int) for value in dimension.values):
        return distributions.IntDistribution(low, high)
    return distributions.FloatDistribution(low, high)


def _read(frozen: Any) -> Trial:
    """Return a trial of the file. Raises ValueError if it was changed."""
    facts, state = frozen.user_attrs, frozen.state.name.lower()
    if "begun" not in facts or isinstance(
        facts["begun"], str
    ):  # from older versions, which had no or other digests
        ended = {key: facts[key] for key in ("score", "samples", "seconds", "reason") if state != "running"}
        trial = Trial(frozen.number, facts["values"], **ended)
    elif state == "running":
        trial = Trial(frozen.number, **_unsealed(facts["begun"]))
    else:
        trial = Trial(**_unsealed(facts["ended"]))
    return replace(trial, state="failed" if state == "fail" else state)


def _sealed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts with their digest."""
    return {**facts, "digest": digest_of(facts)}


def _unsealed(sealed: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts without their digest. Raises ValueError if the digest does not match."""
    facts = {key: value for key, value in sealed.items() if key != "digest"}
    if sealed["digest"] != digest_of(facts):
        raise ValueError("a trial was changed after it was written")
    return facts


def _check_pages(file: Path) -> None:
    """Raise RunError if a file of trials has damaged pages, which SQLite reports only when it reads them."""
    if not file.is_file():
        return
    with closing(sqlite3.connect(file)) as connection:
        ((message, *_), *_) = connection.execute("PRAGMA integrity_check(1)")
    if message != "ok":
        raise RunError(f"'{file}' is damaged ({' '.join(str(message).split())}); {REMEDY}")


def _as_library_error(file: Path, error: BaseException) -> RunError:
    """Return the library's error for an error of the database."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, sqlite3.Error):
        cause = getattr(cause, "orig", None) or cause.__cause__
    kind = getattr(cause, "sqlite_errorname", None) or ""
    message = (str(cause or error).strip() or type(error).__name__).splitlines()[0]
    if kind.startswith(UNWRITABLE):
        return RunError(
            f"cannot write '{file}' ({message}); free some space or make the file writable, then continue with --resume"
        )
    return RunError(f"'{file}' is damaged ({message}); {REMEDY}")
