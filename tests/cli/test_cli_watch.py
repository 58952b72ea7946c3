"""`tailorfl watch` beside a process that really runs; what it prints once, and as JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from click.testing import Result

import tailorfl
from cli.commands import invoke
from runs.killing import ended, forked, started
from tailorfl.cli import watching

SETTINGS = ("seeds=1", "data.samples=300", "data.clients=4", "methods=[fedavg,local]", "eval.every=2")


def watch(*arguments: object, code: int = 0) -> Result:
    return invoke("watch", *arguments, code=code, columns=80)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished experiment."""
    out = tmp_path_factory.mktemp("watch") / "out"
    tailorfl.run(methods=["ditto", "local"], seeds=2, rounds=2, data={"samples": 300, "clients": 8}, out=out)
    return out


def test_it_follows_a_run_and_ends_with_it(tmp_path: Path) -> None:
    """Seconds of it are those of the run, which is a process of its own."""
    out = tmp_path / "out"
    process = forked("run", *SETTINGS, "rounds=40", "--out", str(out), "--quiet")
    while not (out / ".lock").is_file():
        time.sleep(0.02)
    followed = watch(out, "--every", "0.1")
    assert ended(*process)[0] == 0
    lines = followed.stderr.splitlines()
    assert any(re.match(r"FedAvg, seed 0: running, round \d+/40", line) for line in lines), lines
    assert re.match(r"LocalTrain, seed 0: finished, round 40/40, accuracy 0\.\d{4}$", lines[-1])
    assert followed.stdout.startswith("digits: 2 of 2 jobs (finished)")


def test_a_run_that_is_killed_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "CERTAIN", 0.1)
    out = tmp_path / "out"
    process, words = forked("run", *SETTINGS, "rounds=100000", "--out", str(out), "--quiet")
    file = out / "fedavg/seed-0/rounds.jsonl"
    while not file.is_file():
        time.sleep(0.02)
    now = json.loads(watch(out, "--json").stdout)
    assert (now["status"], now["jobs"][0]["status"]) == ("running", "running")
    os.kill(process, signal.SIGKILL)
    assert ended(process, words)[0] == -signal.SIGKILL
    followed = watch(out, "--every", "0.1", code=1)
    assert followed.stdout.startswith("digits: 0 of 2 jobs (interrupted: the process was killed)")
    assert "stopped, " in followed.stdout


def test_once_prints_a_row_a_job(done: Path) -> None:
    printed = watch(done, "--once")
    for name in ("Ditto, seed 0", "LocalTrain, seed 0", "Ditto, seed 1", "LocalTrain, seed 1"):
        assert name in printed.stdout
    assert printed.stdout.count("2/2") == 4
    found = json.loads(watch(done, "--json").stdout)
    assert f"{found['jobs'][0]['score']:.3f}" in printed.stdout


def test_as_many_rows_as_a_terminal_has_room_for() -> None:
    """Those around the job that runs."""
    jobs = [{"name": str(k), "status": "finished" if k < 10 else "waiting"} for k in range(20)]
    assert [job["name"] for job in watching._nearest(jobs, 4)] == ["8", "9", "10", "11"]
    assert [job["name"] for job in watching._nearest(jobs[:3], 4)] == ["0", "1", "2"]
    assert [job["name"] for job in watching._nearest(jobs[:10], 4)] == ["6", "7", "8", "9"]


def test_a_folder_without_an_experiment_is_an_error(tmp_path: Path) -> None:
    for command in ("watch", "board"):
        assert "nothing" in invoke(command, tmp_path / "nothing", code=2).output


def test_the_board_says_where_it_is(done: Path) -> None:
    """In a process of its own, told to end."""
    process = started("board", str(done), "--port", "0")
    assert process.stdout is not None
    assert re.match(r"board: http://127\.0\.0\.1:\d+/ \(Ctrl-C closes it\)", process.stdout.readline())
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "board: closed" in said
