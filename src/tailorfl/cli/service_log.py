"""What `tailorfl server` and `tailorfl client` say while they run: lines with time and level, or JSON, on stderr."""

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
    """How a line is written."""

    text = "text"
    json = "json"


class LogLevel(StrEnum):
    """What is said at least."""

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

    def __init__(self, form: LogFormat, who: str) -> None:
        super().__init__()
        self._form, self._who, self._written = form, who, set[object]()

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
                {"time": moment, "level": level, "who": self._who, "message": text}, ensure_ascii=False
            )
        else:
            line = f"{moment} {level} {self._who}: {text}"
        print(line, file=sys.stderr, flush=True)


@contextmanager
def service_log(who: str, form: LogFormat, level: LogLevel) -> Iterator[Callable[[str], None]]:
    """Write all that the library logs meanwhile; yields what is called with a sentence for the person who looks on."""
    from tailorfl.report.progress import messages

    log = logging.getLogger("tailorfl")
    before = log.level
    log.setLevel(level.upper())
    try:
        with messages(_Stamped(form, who)):
            yield log.getChild("deploy").info
    finally:
        log.setLevel(before)
