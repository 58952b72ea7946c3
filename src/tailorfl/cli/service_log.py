"""The log of `tailorfl server` and `tailorfl client` while they run: lines with time and level, or JSON, on stderr."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import typer

from tailorfl.printable import visible


class LogFormat(StrEnum):
    """The form of a line."""

    text = "text"
    json = "json"


class LogLevel(StrEnum):
    """The least that is said."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


Format = Annotated[LogFormat, typer.Option("--log-format", help="Lines for people, or an object a line.")]
Level = Annotated[LogLevel, typer.Option("--log-level", help="What is said at least.")]


class _Stamped(logging.Handler):
    """Writes a record as one line: `TIME LEVEL WHO: TEXT`, or an object with these four.

    Messages with an `extra={"once": key}` are written once for a key.
    """

    def __init__(self, form: LogFormat, name: str) -> None:
        super().__init__()
        self._form, self._name, self._written = form, name, set[object]()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        key = getattr(record, "once", None)
        if key is not None and key in self._written:
            return
        self._written.add(key)
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(
            timespec="milliseconds"
        )
        level, text = record.levelname.lower(), visible(self.format(record), but="\n\t")
        if self._form is LogFormat.json:
            line = json.dumps(
                {"time": moment, "level": level, "who": self._name, "message": text}, ensure_ascii=False
            )
        else:
            line = f"{moment} {level} {self._name}: {text}"
        print(line, file=sys.stderr, flush=True)


@contextmanager
def service_log(name: str, form: LogFormat, level: LogLevel) -> Iterator[Callable[[str], None]]:
    """Write all that the library logs meanwhile; yields what is called with a sentence for the person who looks on."""
    from tailorfl.report.progress import messages

    log = logging.getLogger("tailorfl")
    before = log.level
    log.setLevel(level.upper())
    try:
        with messages(_Stamped(form, name)):
            yield log.getChild("deploy").info
    finally:
        log.setLevel(before)
