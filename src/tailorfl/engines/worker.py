"""What a worker does: client code on a chunk of a cohort, whatever process or machine it runs on."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl import errors
from tailorfl.core.cohort import Cohort
from tailorfl.core.ledger import Uses
from tailorfl.engines.base import Inference, Visit
from tailorfl.engines.failures import unsupported
from tailorfl.engines.in_process import InProcess
from tailorfl.engines.results import Parts, finite_clients


class States(Protocol):
    """Where a worker finds the private states of a chunk's clients."""

    def read(self) -> TensorDict:
        """Returns them, [clients, ...]."""

    def write(self, states: TensorDict) -> None:
        """Stages the next ones."""


class Work(Protocol):
    """Something that a worker is asked to do."""

    def run(self) -> Any:
        """Returns what came out."""

    def about(self) -> str:
        """Names it in a message about a worker that was lost."""


@dataclass(frozen=True)
class Train:
    """Training of a chunk; gives (replies, metrics, finite)."""

    engine: InProcess
    visit: Visit
    states: States

    def run(self) -> tuple[TensorDict, TensorDict, Tensor, Mapping[int, Uses]]:
        """Returns (replies, metrics, finite, what it used of private data)."""
        new, replies, metrics = self.engine.map(self.visit, self.states.read())
        self.states.write(new)
        return replies, metrics, finite_clients(new, replies), uses_of(self.visit.cohort)

    def about(self) -> str:
        return f"training {clients_of(self.visit.cohort)}"


@dataclass(frozen=True)
class Map:
    """What a function makes of a chunk's clients, such as the models that they deploy."""

    engine: InProcess
    visit: Visit
    states: States

    def run(self) -> tuple[Parts, Mapping[int, Uses]]:
        """Returns (what it makes of them, what it used of private data)."""
        parts = self.engine.map(self.visit, self.states.read())
        return parts, uses_of(self.visit.cohort)

    def about(self) -> str:
        return f"making the models of {clients_of(self.visit.cohort)}"


@dataclass(frozen=True)
class Predict:
    """The outputs of several models."""

    engine: InProcess
    asked: Inference

    def run(self) -> list[Tensor]:
        """Returns the outputs of each model."""
        return self.engine.predict(self.asked)

    def about(self) -> str:
        return "evaluating"


@dataclass(frozen=True)
class Answer:
    """What a worker says: a value or an error, and what it would have written to the log."""

    value: Any = None
    error: Failure | None = None
    records: list[logging.LogRecord] = field(default_factory=list)

    def get(self) -> Any:
        """Returns the value.

        Raises:
            the error, of the type that it had in the worker.
        """
        for record in self.records:
            logging.getLogger(record.name).handle(record)
        if self.error is not None:
            raise self.error.rebuilt()
        return self.value


@dataclass(frozen=True)
class Failure:
    """An error on its way to another process."""

    type: str
    message: str
    trace: str
    pickled: bytes | None
    unsupported: bool

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Returns what is sent of an error."""
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # many errors cannot be pickled; its name and text then have to do
            pickled = None
        trace = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, str(error), trace, pickled, unsupported(error))

    def rebuilt(self) -> BaseException:
        """Returns the error, with what the worker was doing as a note."""
        own = getattr(errors, self.type, None)
        if isinstance(own, type) and issubclass(own, errors.TailorflError):
            found: BaseException = own.__new__(own)
            found.args = (self.message,)
        elif self.pickled is not None:
            found = pickle.loads(self.pickled)
        else:
            found = errors.ClientError(f"{self.type}: {self.message}")
        if self.unsupported and not unsupported(found):
            found.__cause__ = NotImplementedError("vmap has no rule for something in the model")
        found.add_note(f"In a worker process:\n{self.trace}")
        return found


class _Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        self.records.append(record)


def own_log() -> Callable[[], list[logging.LogRecord]]:
    """Takes this process's log away from its handlers, whose locks another thread may have held when it was forked.

    Returns a function that gives what was logged since it was last asked.
    """
    root, kept = logging.getLogger(), _Kept()
    root.handlers = [kept]
    for name in list(logging.Logger.manager.loggerDict):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True

    def taken() -> list[logging.LogRecord]:
        records, kept.records = kept.records, []
        return records

    return taken


def answer(received: Callable[[], Work], logged: Callable[[], list[logging.LogRecord]]) -> Answer:
    """Returns what came out of the work that `received` gives, error or not."""
    try:
        with torch.no_grad():
            value = received().run()
        return Answer(value, records=logged())
    except Exception as error:
        return Answer(error=Failure.of(error), records=logged())


def clients_of(cohort: Cohort, most: int = 5) -> str:
    """Names the clients of a cohort and the round for a message."""
    ids = ", ".join(map(str, cohort.ids[:most])) + (", ..." if len(cohort.ids) > most else "")
    return f"client{'s' if len(cohort.ids) > 1 else ''} {ids} in round {cohort.round + 1}"


def uses_of(cohort: Cohort) -> Mapping[int, Uses]:
    """Returns what a cohort noted of private training."""
    return {} if cohort.record is None else cohort.record.uses
