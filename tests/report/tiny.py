"""The smallest experiment that tests of reports run, of two seconds at most."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from tailorfl.cli.main import app

TINY: dict[str, Any] = {
    "methods": ["local", "fedavg"],
    "rounds": 1,
    "seeds": 1,
    "data": {"clients": 4, "samples": 200},
    "model": {"name": "mlp", "hidden": [4]},
    "engine": "sequential",
    "eval": {"every": 1},
}


def invoke(*arguments: object, code: int = 0, **options: Any) -> str:
    """Return the output of a command in one line; it ends with this exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], **options)
    assert result.exit_code == code, (result.output, result.exception)
    return " ".join(result.output.split())
