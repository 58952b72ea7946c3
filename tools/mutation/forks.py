"""A warm process that forks: what takes seconds to import is imported once, tailorfl itself in every child anew."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tailorfl"
HEAVY = (
    "torch", "torch.func", "numpy", "scipy.optimize", "scipy.stats", "sklearn.datasets", "pandas", "pyarrow",
    "matplotlib.figure", "matplotlib.backends.backend_agg", "tensordict", "pydantic", "yaml", "rich.console",
    "typer", "pytest", "hypothesis", "safetensors.torch", "PIL.Image", "torch._dynamo", "opacus", "transformers",
)  # fmt: skip
MEMORY = 8 << 30
"""Bytes of address space of a child beyond what it starts with: a mutant must not take the machine down."""


def warm() -> None:
    """Import what the tests need apart from tailorfl; what is not installed is left out."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    assert "tailorfl" not in sys.modules


def forked(
    work: Callable[[], int], log: Path, seconds: float, processor: float | None = None
) -> tuple[int | None, float]:
    """Run `work` in a child of its own group, its output in `log`: (its exit code or None after `seconds`, wall s).

    `processor` are seconds of processor time after which the child is ended, however busy the machine is.
    """
    begin = time.monotonic()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _be_a_child(work, log, processor)
    while time.monotonic() - begin < seconds:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _end_group(child)
            return os.waitstatus_to_exitcode(status), time.monotonic() - begin
        time.sleep(0.02)
    _end_group(child)
    os.waitpid(child, 0)
    return None, time.monotonic() - begin


def _be_a_child(work: Callable[[], int], log: Path, processor: float | None) -> NoReturn:
    code = 70
    try:
        os.setpgid(0, 0)
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
        if processor is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (int(processor) + 1, int(processor) + 5))
        os.chdir(ROOT)
        code = work()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


class Replaced(importlib.abc.MetaPathFinder):
    """Finds one module of tailorfl with other source in place of the file's."""

    def __init__(self, path: Path, text: str) -> None:
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        self.package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.package else parts)
        self.path, self.text = path, text

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the changed module's spec; None of every other module."""
        if name != self.name:
            return None
        loader = _Loader(name, str(self.path))
        loader.text = self.text
        where = [str(self.path.parent)] if self.package else None
        return importlib.util.spec_from_file_location(
            name, self.path, loader=loader, submodule_search_locations=where
        )


class _Loader(importlib.machinery.SourceFileLoader):
    text = ""

    def get_code(self, fullname: str) -> object:
        return compile(self.text, self.path, "exec", dont_inherit=True)
