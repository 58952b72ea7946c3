"""What a worker says: what came out of a task, or the error that it met, and what it would have written to the log."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tailorfl import errors
from tailorfl.engines.failures import unsupported
from tailorfl.engines.workers.tasks import Task


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


def answer(received: Callable[[], Task], logged: Callable[[], list[logging.LogRecord]]) -> Answer:
    """Returns what came out of the task that `received` gives, error or not."""
    try:
        with torch.no_grad():
            value = received().run()
        return Answer(value, records=logged())
    except Exception as error:
        return Answer(error=Failure.of(error), records=logged())
