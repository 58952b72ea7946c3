"""Runs commands in this process."""

from __future__ import annotations

from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from tailorfl.cli.main import app


def invoke(*words: Any, code: int = 0, columns: int = 300) -> Result:
    """What a command that ends with `code` writes, in lines of so many columns."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": str(columns)})
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result
