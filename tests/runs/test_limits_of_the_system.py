"""Limits of the system (memory, open files, space on the disk) end in the library's own words."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from runs.killing import ENVIRONMENT, ended, forked
from tailorfl.errors import ConfigError, MemoryLimitError, RunError
from tailorfl.runs.process import as_library_error

TOO_LITTLE = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (10**9, 10**9))
from tailorfl.cli.main import run
run()
"""
TINY = ["data.clients=4", "data.samples=200", "rounds=1", "seeds=1", "--out", "out", "--quiet"]


def assert_told(said: str, code: int, errors: str) -> None:
    assert code == 1, errors
    assert f"error: {said}" in errors
    assert "Traceback" not in errors


def test_a_process_that_torch_does_not_fit_into(tmp_path: Path) -> None:
    program = [sys.executable, "-c", TOO_LITTLE, "run", *TINY]
    done = subprocess.run(
        program, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, check=False, timeout=120
    )
    said = "this process may use 1 GB of address space, but torch and its libraries need 1.5 GB"
    assert_told(said, done.returncode, done.stderr)


NO_FILES = "this process cannot open more files (at most 8 at once)"
NO_SPACE = "cannot keep private states in 'out/ditto/seed-0': File too large"
ON_DISK = ["engine={name: sequential, states: disk}", "model={name: mlp, hidden: [64]}"]


@pytest.mark.parametrize(
    ("kind", "value", "settings", "said"),
    [
        (resource.RLIMIT_NOFILE, 8, ["engine={name: sequential, workers: 2}"], NO_FILES),
        (resource.RLIMIT_FSIZE, 30_000, ON_DISK, NO_SPACE),
    ],
    ids=["files", "space"],
)
def test_a_run_under_a_limit(tmp_path: Path, kind: int, value: int, settings: list[str], said: str) -> None:
    def limited() -> None:
        os.chdir(tmp_path)
        resource.setrlimit(kind, (value, value))

    assert_told(said, *ended(*forked("run", *TINY, *settings, before=limited)))


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (MemoryError(), MemoryLimitError, "not enough memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryLimitError, "not enough memory"),
        (ImportError("x.so: failed to map segment from shared object"), MemoryLimitError, "failed to map"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), MemoryLimitError, "DefaultCPU"),
        (OSError(errno.EMFILE, "Too many open files"), RunError, "cannot open more files"),
        (RuntimeError("unable to open: Too many open files (24)"), RunError, "cannot open more files"),
        (OSError(errno.ENOSPC, "No space left on device", "a"), RunError, "'a': No space left .* free some"),
        (RuntimeError("can't start new thread"), RunError, "lower engine.workers or threads"),
        (PermissionError(errno.EACCES, "Permission denied", "b"), RunError, "'b': Permission denied"),
    ],
)
def test_what_the_system_refuses_is_told(error: Exception, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said) as caught, as_library_error():
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
    with pytest.raises(type(error)) as caught, as_library_error():
        raise error
    assert caught.value is error
