"""Runs of the command line in processes of their own, some of which die at a chosen moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from processes import fork
from runs.dying import die
from tailorfl.cli.main import run
from tailorfl.runs.job import Job
from tailorfl.runs.store import RunStore
from tailorfl.settings.loading import load

TIMES = ("seconds", "round_seconds")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300"}


def forked(*arguments: str, before: Callable[[], None] | None = None) -> tuple[int, IO[str]]:
    """(process id, what it says) of the command line in a process that has imported all it needs."""

    def program() -> None:
        os.environ.update(ENVIRONMENT)
        if before is not None:
            before()
        sys.argv = ["tailorfl", *arguments]
        run()

    return fork(program)


def started(*arguments: str) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tailorfl.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        # a test run in the background of a shell would pass on that it ignores Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def ended(process: int, words: IO[str]) -> tuple[int, str]:
    """(exit code, minus the signal that killed it; all that it said) of a process that was forked."""
    said = words.read()
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), said


def killed(label: str, point: str, count: int, *arguments: str) -> None:
    """The command line, killed when `point` is reached for the `count`-th time in the job `label`."""
    code, said = ended(*forked(*arguments, before=lambda: die(label, point, count)))
    assert code == -signal.SIGKILL, f"{label} {point} was not reached:\n{said[-2000:]}"


def untimed(value: Any) -> Any:
    """A summary without what the clock says."""
    if isinstance(value, dict):
        return {key: untimed(item) for key, item in value.items() if key not in TIMES}
    return value


def numbers(out: Path) -> dict[str, Any]:
    """Everything an experiment found but times: tensors, records, summaries and the comparison."""
    import pandas as pd

    config = load(out / "config.yaml")
    found: dict[str, Any] = {}
    for seed in config.seeds:
        for method in config.methods:
            job = Job(config, method, seed)
            store = RunStore.open(out / job.folder, readonly=True)
            assert store.status == "finished"
            checkpoint = store.latest_checkpoint()
            assert checkpoint is not None
            round, tensors, facts = checkpoint
            assert round == job.rounds
            assert tensors
            found[str(job.folder)] = {
                "tensors": tensors,
                "facts": untimed(facts),
                "rounds": store.rounds().drop(columns=list(TIMES)).to_dict("list"),
                "clients": store.clients().to_dict("list"),
                "summary": untimed(store.summary),
                "parquet": pd.read_parquet(store.path / "clients.parquet").to_dict("list"),
            }
            rounds = found[str(job.folder)]["rounds"]["round"]
            assert rounds == list(range(1, job.rounds + 1))
    table = pd.read_csv(out / "comparison.csv")
    timed = [column for column in map(str, table) if "time" in column or "seconds" in column]
    assert timed
    return found | {"comparison": table.drop(columns=timed).to_dict("list")}


def assert_identical(found: Any, expected: Any, where: str = "") -> None:
    """Equal to the last bit; NaN equals NaN."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_identical(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for position, value in enumerate(expected):
            assert_identical(found[position], value, f"{where}[{position}]")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    else:
        assert found == expected or (found != found and expected != expected), (where, found, expected)
