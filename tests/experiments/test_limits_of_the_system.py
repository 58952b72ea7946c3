"""Limits of the system (memory, open files, space on the disk) end in the library's own words."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.killing import ENVIRONMENT
from tailorfl.errors import ConfigError, MemoryLimitError, RunError
from tailorfl.experiments.faults import told

LIMITED = """
import resource, sys
kind, value = sys.argv.pop(1).split("=")
resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (int(value), int(value)))
from tailorfl.cli.main import run
run()
"""
TINY = ["data.clients=4", "data.samples=200", "rounds=1", "seeds=1", "--out", "out", "--quiet"]


@pytest.mark.parametrize(
    ("limit", "settings", "said"),
    [
        ("AS=1000000000", [], "this process may use 1 GB of address space, and torch with its company needs 1.5 GB"),
        ("NOFILE=8", ["engine={name: sequential, workers: 2}"], "this process may open no more files (8 at once)"),
        (
            "FSIZE=30000",
            ["engine={name: sequential, states: disk}", "model={name: mlp, hidden: [64]}"],
            "cannot keep private states in 'out/ditto/seed-0': File too large",
        ),
    ],
)  # fmt: skip
def test_a_run_under_a_limit(tmp_path: Path, limit: str, settings: list[str], said: str) -> None:
    program = [sys.executable, "-c", LIMITED, limit, "run", *TINY, *settings]
    done = subprocess.run(
        program, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, check=False, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert f"error: {said}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (MemoryError(), MemoryLimitError, "not enough memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryLimitError, "not enough memory"),
        (ImportError("x.so: failed to map segment from shared object"), MemoryLimitError, "failed to map"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), MemoryLimitError, "DefaultCPU"),
        (OSError(errno.EMFILE, "Too many open files"), RunError, "may open no more files"),
        (RuntimeError("unable to open: Too many open files (24)"), RunError, "may open no more files"),
        (OSError(errno.ENOSPC, "No space left on device", "a"), RunError, "'a': No space left .* free some"),
        (RuntimeError("can't start new thread"), RunError, "lower engine.workers or threads"),
        (PermissionError(errno.EACCES, "Permission denied", "b"), RunError, "'b': Permission denied"),
    ],
)
def test_what_the_system_refuses_is_told(error: Exception, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said) as caught, told():
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("mine"),
        RuntimeError("size mismatch"),
        ImportError("no module"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        KeyError("a"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_all_other_errors_stay_what_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, told():
        raise error
    assert caught.value is error
