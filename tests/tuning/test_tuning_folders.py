"""Folders of tunings that were killed, damaged or filled the disk: what has ended stays, and never another tuning."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailorfl.errors import ConfigError, RunError
from tailorfl.rounds.simulation import Simulation
from tailorfl.tuning import plan as plan_module
from tailorfl.tuning.plan import EXPERIMENT, REQUEST, TUNED, TuningRequest, begin, discard, plan, plan_in
from tailorfl.tuning.run import tune
from tailorfl.tuning.samplers import Sampler
from tailorfl.tuning.trials import FILE, Ledger
from tuning.tiny import experiment, tuned, untimed

REQUESTED = TuningRequest("3x3")
SETTINGS: dict[str, Any] = {"methods": ["fedprox"], "search": {"train.lr": [0.05, 0.5, 2.0]}}


def in_a_process(work: Callable[[], object]) -> int:
    """Return how a process that does some work ends."""
    process = os.fork()
    if process == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill_at(folder: Path, owner: type, name: str, count: int) -> None:
    """Go on with a tuning in a process of its own, which is killed at the `count`-th call of a method."""
    real, calls = getattr(owner, name), []

    def call(*arguments: object, **named: object) -> object:
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    def work() -> None:
        setattr(owner, name, call)
        tune(folder, plan_in(folder))

    assert in_a_process(work) == -signal.SIGKILL, "it was not reached"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "t"
    tuned(folder, REQUESTED, **SETTINGS)
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuning that was killed in its second trial."""
    folder = tmp_path_factory.mktemp("stopped") / "t"
    begin(folder, plan(experiment(**SETTINGS), REQUESTED))
    kill_at(folder, Simulation, "step", 6)
    return folder


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "t"))


def assert_goes_on(folder: Path, finished: Path) -> None:
    """A tuning goes on to what one comes to that nothing befell."""
    tune(folder, plan_in(folder))
    assert untimed(folder / "tuning.json") == untimed(finished / "tuning.json")
    assert (folder / TUNED).read_bytes() == (finished / TUNED).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "budget"), [("tpe", "4x3x2"), pytest.param("halving", "3x9x1", marks=pytest.mark.slow)]
)
def test_killed_thrice_and_resumed_is_as_never_killed(sampler: Sampler, budget: str, tmp_path: Path) -> None:
    search = {"train.lr": {"low": 0.05, "high": 2.0, "log": True}, "method.mu": [0.1, 1.0]}
    settings = {"methods": ["fedprox"], "search": search}
    request = TuningRequest(budget, sampler, widen=True)
    tuned(tmp_path / "finished", request, **settings)
    begin(tmp_path / "killed", plan(experiment(**settings), request))
    kill_at(tmp_path / "killed", Simulation, "step", 11)  # in the middle of a trial
    kill_at(tmp_path / "killed", Simulation, "step", 5)
    kill_at(tmp_path / "killed", Ledger, "tell", 1)  # trained, and not yet written down
    assert_goes_on(tmp_path / "killed", tmp_path / "finished")


def test_trials_that_have_ended_survive_a_kill(
    stopped: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = [], Simulation.step
    monkeypatch.setattr(Simulation, "step", lambda sim: (steps.append(1), step(sim))[1])
    folder = copy(stopped, tmp_path)
    assert_goes_on(folder, finished)
    assert len(steps) == 6  # two trials of three rounds: the first had ended
    assert_goes_on(folder, finished)
    assert len(steps) == 6


def test_a_tuning_that_is_discarded_leaves_the_files_of_others(finished: Path, tmp_path: Path) -> None:
    folder = copy(finished, tmp_path)
    (folder / "notes.txt").write_text("")
    for _ in range(2):
        discard(folder)
        assert {path.name for path in folder.iterdir()} - {".lock"} == {"notes.txt"}


@pytest.mark.parametrize(
    ("text", "old"),
    [("", False), ("methods: [fedprox]\n", False), (None, False), ("", True), ("methods: [fedprox]\n", True)],
)
def test_another_experiment_is_refused(text: str | None, old: bool, finished: Path, tmp_path: Path) -> None:
    """Older requests have no digest; without text: one setting differs, which only a digest tells."""
    folder = copy(finished, tmp_path)
    if old:
        facts = json.loads((folder / REQUEST).read_text())
        (folder / REQUEST).write_text(json.dumps({k: facts[k] for k in vars(REQUESTED)}))
        plan_in(folder)
    changed = (folder / EXPERIMENT).read_text().replace("rounds: 9", "rounds: 8")
    (folder / EXPERIMENT).write_text(changed if text is None else text)
    with pytest.raises(ConfigError, match=EXPERIMENT):
        plan_in(folder)


def test_every_line_of_the_request_is_needed(finished: Path, tmp_path: Path) -> None:
    folder = copy(finished, tmp_path)
    content = (folder / REQUEST).read_text()
    lines, facts = content.splitlines(keepends=True), json.loads(content)
    harmed = ["".join(lines[:k] + lines[k + 1 :]) for k in range(len(lines))]
    harmed += [content.replace('"3x3"', '"3x2"'), "[]"]
    harmed += [json.dumps({k: facts[k] for k in vars(REQUESTED) if k != name}) for name in vars(REQUESTED)]
    for text in harmed:
        (folder / REQUEST).write_text(text)
        with pytest.raises(ConfigError, match=REQUEST):
            plan_in(folder)


def test_killed_before_there_is_a_request_it_begins_again(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, new = tmp_path / "t", plan(experiment(**SETTINGS), REQUESTED)
    write = plan_module.write_text

    def dies(path: Path, text: str) -> None:
        if path.name == REQUEST:
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(plan_module, "write_text", dies)
        assert in_a_process(lambda: begin(folder, new)) == -signal.SIGKILL
    assert [path.name for path in folder.iterdir()] == [EXPERIMENT]
    with pytest.raises(ConfigError, match=REQUEST):
        plan_in(folder)
    with pytest.raises(RunError, match="not empty"):  # somebody else's experiment.yaml is not replaced
        begin(folder, plan(experiment(**{**SETTINGS, "rounds": 8}), REQUESTED))
    begin(folder, new)
    assert_goes_on(folder, finished)


ATTRIBUTES = "trial_user_attributes"


def zero(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] + bytes(2000) + content[len(content) // 2 + 2000 :])


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])


def is_no_database(file: Path) -> None:
    file.write_bytes(b"trials\n" * 100)


def replace(key: str, old: str, new: str) -> Callable[[Path], None]:
    """A change of an attribute that damages no page of the file."""

    def harm(file: Path) -> None:
        with sqlite3.connect(file) as connection:
            sql = f"UPDATE {ATTRIBUTES} SET value_json = replace(value_json, ?, ?) WHERE key = ?"
            assert connection.execute(sql, (old, new, key)).rowcount > 0
        connection.close()

    return harm


@pytest.mark.parametrize(
    "harm",
    [
        zero,
        cut,
        is_no_database,
        replace("ended", '"score": 0.', '"score": 0.0'),
        replace("ended", '"values"', '"value"'),
        replace("begun", '"train.lr": ', '"train.lr": 1'),
    ],
)
def test_damaged_trials_are_refused_and_trained_again_without_their_file(
    harm: Callable[[Path], None], stopped: Path, finished: Path, tmp_path: Path
) -> None:
    folder = copy(stopped, tmp_path)
    harm(folder / FILE)
    with pytest.raises(RunError, match=FILE if harm is not is_no_database else f"{FILE}.*not a database"):
        tune(folder, plan_in(folder))
    (folder / FILE).unlink()
    if harm is zero:
        assert_goes_on(folder, finished)


def test_trials_of_older_versions_are_read(stopped: Path, finished: Path, tmp_path: Path) -> None:
    """They had an attribute for each fact, and kept states in a folder."""
    folder = copy(stopped, tmp_path)
    with sqlite3.connect(folder / FILE) as connection:
        rows = connection.execute(f"SELECT trial_id, key, value_json FROM {ATTRIBUTES}").fetchall()
        connection.execute(f"DELETE FROM {ATTRIBUTES}")
        old = {}
        for trial, key, text in rows:
            names = ("values",) if key == "begun" else ("values", "score", "samples", "seconds", "reason")
            facts = json.loads(text)
            old |= {(trial, name): json.dumps(facts[name]) for name in names if name in facts}
        connection.executemany(
            f"INSERT INTO {ATTRIBUTES} (trial_id, key, value_json) VALUES (?, ?, ?)",
            [(*of, text) for of, text in old.items()],
        )
    connection.close()
    (folder / "under-way" / "fedprox-1").mkdir(parents=True)
    assert_goes_on(folder, finished)
    assert not (folder / "under-way").exists()


def test_a_full_disk_is_told_and_the_tuning_goes_on_once_there_is_space(
    stopped: Path, finished: Path, tmp_path: Path
) -> None:
    """A limit on the size of files strikes in the middle of a write to the database, as a full disk does."""
    folder, message = copy(stopped, tmp_path), tmp_path / "message"

    def work() -> None:
        size = (folder / FILE).stat().st_size // 2  # with pages of records behind it
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        try:
            tune(folder, plan_in(folder))
        except BaseException as error:
            message.write_text(f"{type(error).__name__}: {error}")

    in_a_process(work)
    assert message.is_file(), "the limit was not reached"
    assert message.read_text().startswith(f"RunError: cannot write '{folder / FILE}'")
    assert_goes_on(folder, finished)
