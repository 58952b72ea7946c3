"""`python -m tailorfl` is the command `tailorfl`."""

from __future__ import annotations

from tailorfl.cli.main import run

run()
