"""The result of a task in a worker: a value or the error that it met, and what it would have written to the log."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tailorfl import errors
from tailorfl.engines.pool import Task


@dataclass(frozen=True)
class TaskResult:
    """A value or an error, and what the worker would have written to the log."""

    value: Any = None
    error: Exception | None = None
    records: list[logging.LogRecord] = field(default_factory=list)

    def get(self) -> Any:
        """Return the value.

        Raises:
            the error, of the type that it had in the worker.
        """
        for record in self.records:
            logging.getLogger(record.name).handle(record)
        if self.error is not None:
            raise self.error
        return self.value


class _Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        self.records.append(record)


def logged_records() -> Callable[[], list[logging.LogRecord]]:
    """Take this process's log away from its handlers, whose locks another thread may have held when it was forked.

    Return a function that gives what was logged since it was last asked.
    """
    root, kept = logging.getLogger(), _Records()
    root.handlers = [kept]
    for name in list(logging.Logger.manager.loggerDict):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True

    def taken() -> list[logging.LogRecord]:
        records, kept.records = kept.records, []
        return records

    return taken


def result_of(received: Callable[[], Task], logged: Callable[[], list[logging.LogRecord]]) -> TaskResult:
    """Run the task that `received` gives, and return its result, error or not."""
    try:
        with torch.no_grad():
            value = received().run()
        return TaskResult(value, records=logged())
    except Exception as error:
        return TaskResult(error=_portable(error), records=logged())


def _portable(error: Exception) -> Exception:
    """Return an error that another process can be sent: itself with its traceback as a note, or its words."""
    note = f"In a worker process:\n{''.join(traceback.format_exception(error))}"
    try:
        sent: Exception = pickle.loads(pickle.dumps(error))
    except Exception:  # many errors of libraries cannot be pickled
        sent = errors.ClientError(f"{type(error).__name__}: {error}")
    sent.add_note(note)
    return sent
