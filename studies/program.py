"""Commands of studies, run as `python -m studies.NAME`: errors of the package become messages and exit codes."""

from __future__ import annotations

import sys

import typer

from tailorfl.cli.screen import remark, stderr
from tailorfl.errors import TailorflError


def program() -> typer.Typer:
    """Return an empty command line that leaves errors to `run`."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def run(app: typer.Typer) -> None:
    """Run a command line; exit with the error's code once its message is printed."""
    try:
        app()
    except TailorflError as error:
        stderr().print(remark("error:", str(error), "bold red"), soft_wrap=True)
        sys.exit(error.exit_code)
