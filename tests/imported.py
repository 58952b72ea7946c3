"""The modules that a process has imported, told by the interpreter itself."""

from __future__ import annotations

import re
import subprocess
import sys

_LINE = re.compile(r"^import time:\s+\d+ \|\s+\d+ \|\s+(\S+)$", re.MULTILINE)


def imported_modules(said: str) -> set[str]:
    """Return the modules in the errors of a process that ran with `-X importtime` or PYTHONPROFILEIMPORTTIME.

    Those whose import failed are among them.
    """
    return set(_LINE.findall(said))


def imported_by(*words: str) -> set[str]:
    """Run Python with `words` and return the modules that it has imported. Raises where it fails."""
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return imported_modules(done.stderr)
