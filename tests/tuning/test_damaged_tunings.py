"""Folders of tunings that were damaged, killed at their beginning or filled the disk: named, never another tuning."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tailorfl.errors import ConfigError, RunError
from tailorfl.rounds.simulation import Simulation
from tailorfl.tuning import run
from tailorfl.tuning.outcome import TUNED
from tailorfl.tuning.run import EXPERIMENT, REQUEST, TuningRequest, begin, plan, plan_in, tune
from tailorfl.tuning.training import UNDER_WAY
from tailorfl.tuning.trials import FILE
from tuning.test_killed import killed
from tuning.tiny import experiment, tuned, untimed

ASKED = TuningRequest("3x3")
SETTINGS = {"methods": ["fedprox"], "search": {"train.lr": [0.05, 0.5, 2.0]}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "t"
    tuned(folder, ASKED, **SETTINGS)
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuning that was killed in its second trial."""
    folder = tmp_path_factory.mktemp("stopped") / "t"
    begin(folder, plan(experiment(**SETTINGS), ASKED))
    killed(folder, (Simulation, "step"), 6)
    return folder


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "t"))


def without_line(file: Path, line: int) -> None:
    lines = file.read_text().splitlines(keepends=True)
    del lines[line]
    file.write_text("".join(lines))


def assert_same(folder: Path, whole: Path) -> None:
    assert untimed(folder / "tuning.json") == untimed(whole / "tuning.json")
    assert (folder / TUNED).read_bytes() == (whole / TUNED).read_bytes()


def test_a_sound_folder_goes_on(stopped: Path, whole: Path, tmp_path: Path) -> None:
    folder = copy(stopped, tmp_path)
    assert list((folder / UNDER_WAY).glob("*/*/checkpoint-*"))
    tune(folder, plan_in(folder))
    assert_same(folder, whole)


@pytest.mark.parametrize("text", ["", "methods: [fedprox]\n"])
@pytest.mark.parametrize("old", [False, True], ids=["with digests", "from before digests"])
def test_an_emptied_experiment_is_not_the_default_one(
    text: str, old: bool, whole: Path, tmp_path: Path
) -> None:
    folder = copy(whole, tmp_path)
    if old:
        facts = json.loads((folder / REQUEST).read_text())
        (folder / REQUEST).write_text(json.dumps({k: facts[k] for k in vars(ASKED)}))
        plan_in(folder)
    (folder / EXPERIMENT).write_text(text)
    with pytest.raises(ConfigError, match=rf"{EXPERIMENT}'.*restore it"):
        plan_in(folder)


def test_another_experiment_is_not_gone_on_with(whole: Path, tmp_path: Path) -> None:
    folder = copy(whole, tmp_path)
    (folder / EXPERIMENT).write_text((folder / EXPERIMENT).read_text().replace("rounds: 9", "rounds: 8"))
    with pytest.raises(ConfigError, match=rf"{EXPERIMENT}' is not what"):
        plan_in(folder)


def test_every_line_of_the_request_is_needed(whole: Path, tmp_path: Path) -> None:
    folder = copy(whole, tmp_path)
    content = (folder / REQUEST).read_text()
    for line in range(len(content.splitlines())):
        (folder / REQUEST).write_text(content)
        without_line(folder / REQUEST, line)
        with pytest.raises(ConfigError, match=rf"{REQUEST}' is damaged"):
            plan_in(folder)
    (folder / REQUEST).write_text(content.replace('"3x3"', '"3x2"'))
    with pytest.raises(ConfigError, match=rf"{REQUEST}' is damaged"):
        plan_in(folder)
    facts = json.loads(content)
    for name in vars(ASKED):  # as it was before it had digests
        old = {key: facts[key] for key in vars(ASKED) if key != name}
        (folder / REQUEST).write_text(json.dumps(old))
        with pytest.raises(ConfigError, match=rf"{REQUEST}' is damaged: .*{name}"):
            plan_in(folder)


def test_killed_before_there_is_a_request_it_begins_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, made = tmp_path / "t", plan(experiment(**SETTINGS), ASKED)
    process = os.fork()
    if process == 0:
        write = run.write_text

        def dies(path: Path, text: str) -> None:
            if path.name == REQUEST:
                os.kill(os.getpid(), signal.SIGKILL)
            write(path, text)

        monkeypatch.setattr(run, "write_text", dies)
        try:
            begin(folder, made)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert [path.name for path in folder.iterdir()] == [EXPERIMENT]
    with pytest.raises(ConfigError, match=f"has no {REQUEST}.*--out"):
        plan_in(folder)
    with pytest.raises(RunError, match="is not empty"):  # somebody else's experiment.yaml is not replaced
        begin(folder, plan(experiment(**{**SETTINGS, "rounds": 8}), ASKED))
    begin(folder, made)
    tune(folder, plan_in(folder))
    assert_same(folder, whole)


def zeroed(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] + bytes(2000) + content[len(content) // 2 + 2000 :])


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])


def no_database(file: Path) -> None:
    file.write_bytes(b"trials\n" * 100)


def other_score(file: Path) -> None:
    """One digit of one number, where no page of the file is damaged."""
    with sqlite3.connect(file) as opened:
        row, text = opened.execute(
            "SELECT trial_user_attribute_id, value_json FROM trial_user_attributes WHERE key = 'score'"
        ).fetchone()
        changed = text.replace(text[2], str((int(text[2]) + 1) % 10), 1)
        opened.execute(
            "UPDATE trial_user_attributes SET value_json = ? WHERE trial_user_attribute_id = ?",
            (changed, row),
        )
    opened.close()


def other_values(file: Path) -> None:
    """Of the trial that is under way."""
    with sqlite3.connect(file) as opened:
        opened.execute(
            "UPDATE trial_user_attributes SET value_json = '{\"train.lr\": 0.25}' WHERE key = 'values' AND trial_id = "
            "(SELECT MAX(trial_id) FROM trials)"
        )
    opened.close()


def lost_facts(file: Path) -> None:
    with sqlite3.connect(file) as opened:
        opened.execute("DELETE FROM trial_user_attributes WHERE key = 'values'")
    opened.close()


@pytest.mark.parametrize("harm", [zeroed, cut, no_database, other_score, other_values, lost_facts])
def test_damaged_trials_are_refused_and_trained_again_without_their_file(
    harm: Callable[[Path], None], stopped: Path, whole: Path, tmp_path: Path
) -> None:
    folder = copy(stopped, tmp_path)
    harm(folder / FILE)
    with pytest.raises(RunError, match=rf"{FILE}'.* move it away"):
        tune(folder, plan_in(folder))
    (folder / FILE).unlink()
    tune(folder, plan_in(folder))
    assert_same(folder, whole)


@pytest.mark.parametrize(
    "name", ["checkpoint-*.json", "checkpoint-*.safetensors", "config.json", "status.json"]
)
def test_a_trial_whose_state_is_damaged_is_trained_again(
    name: str, stopped: Path, whole: Path, tmp_path: Path
) -> None:
    folder = copy(stopped, tmp_path)
    files = list((folder / UNDER_WAY).glob(f"*/*/{name}"))
    assert files
    for file in files:
        file.write_bytes(b"")
    tune(folder, plan_in(folder))
    assert_same(folder, whole)


def test_the_state_of_a_trial_with_other_values_is_not_gone_on_with(
    stopped: Path, whole: Path, tmp_path: Path
) -> None:
    folder = copy(stopped, tmp_path)
    (place,) = (folder / UNDER_WAY).iterdir()
    place.rename(folder / UNDER_WAY / "fedprox-2")
    tune(folder, plan_in(folder))
    assert_same(folder, whole)


def test_a_full_disk_is_told_and_the_tuning_goes_on_once_there_is_space(
    stopped: Path, whole: Path, tmp_path: Path
) -> None:
    """A limit on the size of files strikes in the middle of a write to the database, as a full disk does."""
    folder = copy(stopped, tmp_path)
    told = tmp_path / "told"
    process = os.fork()
    if process == 0:
        size = (folder / FILE).stat().st_size // 2  # with pages of records behind it
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        try:
            tune(folder, plan_in(folder))
        except BaseException as error:
            told.write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    assert told.is_file(), "the limit was not reached"
    assert told.read_text().startswith("RunError: ")
    assert FILE in told.read_text()
    assert "free some space" in told.read_text()
    tune(folder, plan_in(folder))
    assert_same(folder, whole)
