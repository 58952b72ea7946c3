"""A run that is told to end says at once how it stands, leaves nothing half-written, and goes on to the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tailorfl
from processes import fork
from report.tiny import invoke
from runs.killing import assert_identical, numbers, started
from runs.small import TINY, facts
from tailorfl.report.document import write_report
from tailorfl.report.result import ExperimentResult
from tailorfl.runs import process
from tailorfl.runs.files import remove_left_over
from tailorfl.runs.job import Job, Observer
from tailorfl.runs.process import Terminated, ended_in_order

SHORT = TINY | {"rounds": 5, "data": {"clients": 3, "samples": 150}, "model": {"name": "mlp", "hidden": [4]}}


class At(Observer):
    """Does something once, after a round of Ditto."""

    def __init__(self, round: int, what: Callable[[], None]) -> None:
        self.round, self.what, self.rounds = round, what, 0

    def round_done(self, job: Job, done: Any) -> None:
        if job.method.name == "ditto":
            self.rounds += 1
            if self.rounds == self.round:
                self.what()


def told(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """A process that a script starts in the background ignores Ctrl-C; the tests are of one that does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def checked(out: Path) -> str:
    return invoke("check", out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGTERM, "stopped by SIGTERM"), (signal.SIGINT, "stopped by Ctrl-C")],
)
def test_the_folder_says_which_job_and_round_and_it_goes_on(
    number: signal.Signals, said: str, tmp_path: Path
) -> None:
    with pytest.raises((KeyboardInterrupt, Terminated)):
        tailorfl.run(SHORT, out=tmp_path / "out", observer=At(3, told(number)))
    whole = facts(tmp_path / "out" / "status.json")
    assert (whole["status"], whole["job"]) == ("interrupted", "ditto, seed 0")
    assert (whole["round"], whole["rounds"], whole["done"], whole["jobs"]) == (3, 5, 1, 2)
    assert said in whole["message"]
    job = facts(tmp_path / "out" / "ditto" / "seed-0" / "status.json")
    assert job["status"] == "interrupted"
    assert f"{said} after round 3 of 5" in job["message"]
    assert "1 of 2 jobs done, in ditto, seed 0 after round 3 of 5" in checked(tmp_path / "out")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    tailorfl.run(out=tmp_path / "out", resume=True)
    assert facts(tmp_path / "out" / "status.json")["status"] == "finished"
    assert "experiment:" not in checked(tmp_path / "out")
    tailorfl.run(SHORT, out=tmp_path / "whole")
    assert_identical(numbers(tmp_path / "out"), numbers(tmp_path / "whole"))


def test_what_swallows_exceptions_does_not_swallow_the_end(tmp_path: Path) -> None:
    """As destructors and callbacks of C do."""

    def swallow() -> None:
        with contextlib.suppress(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated):
        tailorfl.run(SHORT, out=tmp_path / "out", observer=At(3, swallow))
    assert facts(tmp_path / "out" / "status.json")["round"] == 3
    assert not process._told


def test_a_second_signal_disturbs_nothing() -> None:
    def twice() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated), ended_in_order():
        twice()


def test_signals_of_others_stay_theirs() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with ended_in_order():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    thread = threading.Thread(target=lambda: ended_in_order().__enter__())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_job_that_fails_says_so_too(tmp_path: Path) -> None:
    file = tmp_path / "out" / "status.json"
    during: dict[str, Any] = {}

    def fail() -> None:
        during.update(facts(file))
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError):
        tailorfl.run(SHORT, out=tmp_path / "out", observer=At(2, fail))
    assert (during["status"], during["job"], during["done"]) == ("running", "ditto, seed 0", 1)
    found = facts(file)
    assert (found["status"], found["job"], found["round"]) == ("failed", "ditto, seed 0", 2)
    assert "out of luck" in found["message"]


def test_a_killed_run_is_not_said_to_run(tmp_path: Path) -> None:
    tailorfl.run(SHORT, out=tmp_path / "out")
    file = tmp_path / "out" / "status.json"
    finished = facts(file)
    assert (finished["status"], finished["done"]) == ("finished", 2)
    file.write_text(json.dumps({**finished, "status": "running", "done": 1, "job": "ditto, seed 0"}))
    said = "experiment: interrupted (the process was killed): 1 of 2 jobs done, in ditto, seed 0"
    assert said in checked(tmp_path / "out")
    tailorfl.run(out=tmp_path / "out", resume=True)  # only the tables were missing
    assert (facts(file)["status"], facts(file)["done"]) == ("finished", 2)
    assert "experiment:" not in checked(tmp_path / "out")


@pytest.mark.slow
def test_the_command_ends_with_the_shells_exit_code_and_says_how_to_go_on(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(tailorfl.load_config({**SHORT, "rounds": 2000, "eval": {"every": 1}}).to_yaml())
    process = started("run", str(file), "--out", str(tmp_path / "out"))
    assert process.stderr is not None
    while "round 3/" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    words = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM
    said = f"interrupted: stopped by SIGTERM; continue with: tailorfl run --resume {tmp_path / 'out'}"
    assert said in words
    assert "Traceback" not in words
    assert facts(tmp_path / "out" / "status.json")["status"] == "interrupted"
    assert facts(tmp_path / "out" / "local" / "seed-0" / "status.json")["status"] == "interrupted"
    assert not list((tmp_path / "out").rglob("*.part"))


def test_pictures_left_half_written_are_removed_by_the_next_run(tmp_path: Path) -> None:
    """Of dead processes alone: a report may be writing its own at this moment."""
    dead, _ = fork(lambda: None)
    os.waitpid(dead, 0)
    out = tmp_path / "out"
    out.mkdir()
    left, used = out / f".per_round.png.{dead}.part", out / f".per_client.png.{os.getppid()}.part"
    for file in (left, used, out / ".hidden.part"):
        file.write_text("half")
    remove_left_over(out)
    assert not left.exists()
    assert used.exists()
    left.write_text("half")
    tailorfl.run({**SHORT, "methods": ["local"], "rounds": 1}, out=out)
    assert sorted(file.name for file in out.glob(".*.part")) == [".hidden.part", used.name]


@pytest.mark.slow
@pytest.mark.usefixtures("plotting")
def test_a_report_during_a_run_agrees_with_its_pictures(tmp_path: Path) -> None:
    """A run that ends while a report is written has the last word, and the report is of the same jobs as the plots."""
    out, made = tmp_path / "out", []

    def report() -> None:
        made.append([file.read_text() for file in write_report(ExperimentResult.load(out))])

    tailorfl.run(SHORT, out=out, observer=At(1, report))
    for text, row in zip(*made, ("| Ditto |", "<td>Ditto</td>"), strict=True):
        assert "ditto, seed 0: not finished" in text
        assert row not in text
    names = ("report.md", "report.html", "per_round.png", "per_client.png", "per_byte.png")
    late = {name: (out / name).read_bytes() for name in names}
    for name, row in (("report.md", b"| Ditto |"), ("report.html", b"<td>Ditto</td>")):
        assert row in late[name]
        assert b"not finished" not in late[name]

    whole = ExperimentResult.load(out)
    before = ExperimentResult(out, whole.jobs[:1])  # loaded when one job was finished, written after all were
    write_report(before)
    assert {name: (out / name).read_bytes() for name in names if name != "report.html"} == {
        name: content for name, content in late.items() if name != "report.html"
    }
    assert "ditto" in (out / "comparison.csv").read_text()
