"""The smallest experiment that tests of reports run, of two seconds at most."""

from __future__ import annotations

from typing import Any

from cli import commands

TINY: dict[str, Any] = {
    "methods": ["local", "fedavg"],
    "rounds": 1,
    "seeds": 1,
    "data": {"clients": 4, "samples": 200},
    "model": {"name": "mlp", "hidden": [4]},
    "engine": "sequential",
    "eval": {"every": 1},
}


def invoke(*words: object, code: int = 0, columns: int = 80) -> str:
    """Return the output of a command in one line; it ends with this exit code."""
    return " ".join(commands.invoke(*words, code=code, columns=columns).output.split())
