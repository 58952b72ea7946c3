"""Result folders that were changed, cut, exchanged or lost a file: noticed, named, never a wrong number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import tailorfl
from tailorfl.cli.main import app
from tailorfl.errors import RunError, TailorflError
from tailorfl.report.document import write_report
from tailorfl.report.result import ExperimentResult
from tailorfl.runs import fingerprint
from tailorfl.runs.fingerprint import FORCED, forced
from tailorfl.runs.job import Job, Observer, job_problems
from tailorfl.runs.trained_models import restore
from tailorfl.settings.loading import load

TINY: dict[str, Any] = {
    "methods": ["local", "ditto"],
    "rounds": 4,
    "seeds": 2,
    "model": "logistic",
    "data": {"clients": 3, "samples": 150},
    "eval": {"every": 1, "sets": ["val", "local"], "final": ["local"]},
    "checkpoint_every": 2,
    "train": {"dp": {"clip": 1.0, "noise": 1.0, "accountant": "rdp"}},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tailorfl.run(TINY, out=tmp_path_factory.mktemp("whole") / "run").path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def change_digit(file: Path) -> None:
    """Another digit somewhere in the middle of the file."""
    content = bytearray(file.read_bytes())
    digits = [k for k, byte in enumerate(content) if 48 <= byte <= 56]
    content[digits[len(digits) // 2]] += 1
    file.write_bytes(bytes(content))


def cut(file: Path) -> None:
    """Without its last line."""
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))


def checked(folder: Path) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["check", str(folder)])
    return found.exit_code, " ".join(found.output.split())


HARMS = (change_digit, cut, Path.unlink)


def harmed(*names: str) -> pytest.MarkDecorator:
    """Each file with each harm; one harm of a file is in the quick suite, in turn, the others are slow tests."""
    return pytest.mark.parametrize(
        ("name", "harm"),
        [
            pytest.param(name, harm, marks=[] if k % len(HARMS) == j else [pytest.mark.slow])
            for k, name in enumerate(names)
            for j, harm in enumerate(HARMS)
        ],
    )


@pytest.mark.slow
@harmed("summary.json", "rounds.jsonl", "clients.jsonl", "config.json", "privacy.csv")
def test_a_damaged_job_is_named_and_in_no_table(
    folder: Path, harm: Callable[[Path], None], name: str
) -> None:
    before = ExperimentResult.load(folder).table
    assert before["seeds"].tolist() == [2, 2]
    harm(folder / "ditto" / "seed-1" / name)
    result = ExperimentResult.load(folder)
    assert result.table["seeds"].tolist() == [2, 1]
    assert len(result.missing) == 1
    assert result.missing[0].startswith("ditto, seed 1: ")
    if name == "summary.json":  # what is missing is written the same way, whatever it misses
        for page in write_report(result):
            assert "Not in the table" in page.read_text()
    code, said = checked(folder)
    if not (name == "config.json" and harm is Path.unlink):  # that folder is no job any more
        assert code != 0
        assert name in said
        assert "1 jobs of" in said
    assert "local, seed 0: whole" in said


def test_resuming_does_a_damaged_job_again(folder: Path) -> None:
    change_digit(folder / "ditto" / "seed-1" / "summary.json")
    again = tailorfl.run(None, out=folder, resume=True)
    assert not again.missing
    assert checked(folder)[0] == 0
    assert again.table["seeds"].tolist() == [2, 2]


class StopAt(Observer):
    """Ctrl-C after a round of Ditto, with some seed."""

    def __init__(self, round: int, seed: int = 0) -> None:
        self.round, self.seed = round, seed

    def round_done(self, job: Job, done: Any) -> None:
        if (job.method.name, job.seed, done.round) == ("ditto", self.seed, self.round):
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(KeyboardInterrupt):
        tailorfl.run(TINY, out=out, observer=StopAt(2, seed=1))
    return out


@pytest.fixture
def interrupted(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "stopped"))


def test_facts_of_a_checkpoint_cannot_change_unnoticed(interrupted: Path) -> None:
    job = interrupted / "ditto" / "seed-1"
    (newest,) = job.glob("checkpoint-*.json")
    facts = json.loads(newest.read_text())
    facts["meta"]["round"] -= 1  # what a private step cost would be counted once less
    newest.write_text(json.dumps(facts, indent=1))
    assert checked(interrupted)[0] != 0
    with pytest.raises(RunError, match=r"checkpoint-000002\.json is not what was written"):
        tailorfl.run(None, out=interrupted, resume=True)


@pytest.mark.parametrize("name", ["rounds.jsonl", "clients.jsonl"])
def test_a_history_with_holes_is_not_continued(interrupted: Path, name: str) -> None:
    file = interrupted / "ditto" / "seed-1" / name
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(line for line in lines if b'"round": 1,' not in line))
    with pytest.raises(RunError, match=rf"{name}' has lost the records of rounds 1"):
        tailorfl.run(None, out=interrupted, resume=True)


def test_what_is_not_finished_is_said_and_is_no_damage(interrupted: Path) -> None:
    result = ExperimentResult.load(interrupted)
    assert result.missing == ["ditto, seed 1: not finished (interrupted)"]
    code, said = checked(interrupted)
    assert code == 0
    assert "ditto, seed 1: not finished (interrupted)" in said


def test_every_byte_of_every_file_may_go_without_a_wrong_table(folder: Path) -> None:
    """A library error, a named hole, or the same numbers: nothing else, whatever file of a job is emptied."""
    wanted = ExperimentResult.load(folder).table.drop(columns=["seconds", "seconds_ci"])
    job = folder / "local" / "seed-0"
    for file in sorted(job.iterdir()):
        if file.name == ".lock":
            continue
        content = file.read_bytes()
        file.write_bytes(b"")
        try:
            result = ExperimentResult.load(folder)
        except TailorflError:
            pass
        else:
            if not result.missing:
                assert result.table.drop(columns=["seconds", "seconds_ci"]).equals(wanted), file.name
        file.write_bytes(content)


def test_a_folder_without_a_finished_job_names_a_few(tmp_path: Path) -> None:
    """Hundreds of jobs would fill the screen."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(load(None, ["methods=local", "seeds=8"]).to_dict()))
    with pytest.raises(RunError) as error:
        ExperimentResult.load(tmp_path)
    assert str(error.value).count("was not started") == 5
    assert str(error.value).endswith("local, seed 4: was not started; and 3 more")


PLAIN = {**{k: v for k, v in TINY.items() if k != "train"}, "methods": ["ditto"], "seeds": 1}
PLAIN |= {"model": {"name": "mlp", "hidden": [4]}, "engine": "sequential"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tailorfl.run(PLAIN, out=tmp_path_factory.mktemp("models") / "a run").path


def exported(folder: Path, into: Path) -> tuple[int, str]:
    words = ["export", str(folder), "--client", "0", "--out", str(into), "--overwrite"]
    found = CliRunner().invoke(app, words)
    return found.exit_code, " ".join(found.output.split())


@harmed("checkpoint-000004.json", "checkpoint-000004.safetensors")
def test_a_finished_job_without_its_last_checkpoint_gives_no_older_model(
    models: Path, tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    """Refused by whoever needs the model, in the table all the same, and made again as `check` advises."""
    folder = Path(shutil.copytree(models, tmp_path / "a run"))
    job = folder / "ditto" / "seed-0"
    wanted = (job / "checkpoint-000004.safetensors").read_bytes()
    numbers = ExperimentResult.load(folder).table.drop(columns=["seconds", "seconds_ci"])
    harm(job / name)
    code, said = exported(folder, tmp_path / "out")
    assert code != 0
    assert "ditto, seed 0" in said
    assert f"--resume '{folder}'" in said
    assert not (tmp_path / "out").exists()
    with pytest.raises(RunError, match="checkpoint"):
        restore(folder)
    with pytest.raises(RunError, match="checkpoint"):
        tailorfl.predict(folder, tmp_path / "none.csv", client="0")
    assert ExperimentResult.load(folder).table["seeds"].tolist() == [1]
    code, said = checked(folder)
    assert code != 0
    assert f"--resume '{folder}'" in said
    again = tailorfl.run(None, out=folder, resume=True)
    assert checked(folder)[0] == 0
    assert (job / "checkpoint-000004.safetensors").read_bytes() == wanted
    assert again.table.drop(columns=["seconds", "seconds_ci"]).equals(numbers)
    assert exported(folder, tmp_path / "out")[0] == 0


def test_a_finished_job_of_which_every_checkpoint_is_damaged_is_done_anew(
    models: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models, tmp_path / "run"))
    job = folder / "ditto" / "seed-0"
    wanted = (job / "checkpoint-000004.safetensors").read_bytes()
    for file in job.glob("checkpoint-*.json"):
        file.write_bytes(b"")
    assert checked(folder)[0] != 0
    tailorfl.run(None, out=folder, resume=True)
    assert checked(folder)[0] == 0
    assert (job / "checkpoint-000004.safetensors").read_bytes() == wanted


def test_an_older_checkpoint_is_not_needed_and_its_damage_goes_with_resume(
    models: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models, tmp_path / "run"))
    job = folder / "ditto" / "seed-0"
    change_digit(job / "checkpoint-000002.safetensors")
    assert checked(folder)[0] != 0
    assert exported(folder, tmp_path / "out")[0] == 0
    rounds = (job / "rounds.jsonl").read_bytes()
    tailorfl.run(None, out=folder, resume=True)
    assert checked(folder)[0] == 0
    assert (job / "rounds.jsonl").read_bytes() == rounds  # nothing was trained again


def test_a_finished_job_without_any_checkpoint_is_kept(models: Path, tmp_path: Path) -> None:
    """As where they were deleted to save space."""
    folder = Path(shutil.copytree(models, tmp_path / "run"))
    for file in folder.rglob("checkpoint-*"):
        file.unlink()
    before = (folder / "ditto" / "seed-0" / "rounds.jsonl").read_bytes()
    assert checked(folder)[0] == 0
    tailorfl.run(None, out=folder, resume=True)
    assert (folder / "ditto" / "seed-0" / "rounds.jsonl").read_bytes() == before


def test_models_are_of_the_settings_that_they_were_trained_with(models: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models, tmp_path / "run"))
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["model"]["activation"] = "tanh"  # weights of the same shapes
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    code, said = exported(folder, tmp_path / "out")
    assert code != 0
    assert "model.activation" in said


def test_models_leave_a_folder_of_other_versions_and_one_that_was_resumed_by_force(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(models, tmp_path / "run"))
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "environment", lambda: {"tailorfl": "9.9", "torch": "99"})
        assert exported(folder, tmp_path / "out")[0] == 0
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["train"]["lr"] = 0.5
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    assert exported(folder, tmp_path / "out")[0] != 0
    tailorfl.run(None, out=folder, resume=True, force=True)
    assert exported(folder, tmp_path / "out")[0] == 0


DROPPING = {**PLAIN, "system": {"dropout": 0.3}}


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a trace, stopped in its third round."""
    out = tmp_path_factory.mktemp("dropping") / "run"
    with pytest.raises(KeyboardInterrupt):
        tailorfl.run(DROPPING, out=out, observer=StopAt(3))
    return out


def test_doubled_lines_are_gone_after_resuming(dropping: Path, tmp_path: Path) -> None:
    whole = tailorfl.run(DROPPING, out=tmp_path / "whole")
    out = Path(shutil.copytree(dropping, tmp_path / "run"))
    files = [out / "ditto" / "seed-0" / name for name in ("trace.jsonl", "rounds.jsonl", "clients.jsonl")]
    for file in files:
        first, *others = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join([first, first, *others]))
    again = tailorfl.run(None, out=out, resume=True)
    for file in files:
        wanted = (tmp_path / "whole" / "ditto" / "seed-0" / file.name).read_bytes()
        assert file.read_bytes().count(b"\n") == wanted.count(b"\n"), file.name
    timed = ["seconds", "seconds_ci"]
    assert again.table.drop(columns=timed).equals(whole.table.drop(columns=timed))


@pytest.mark.parametrize("name", ["trace.jsonl", "rounds.jsonl"])
def test_two_records_of_a_round_are_refused(dropping: Path, tmp_path: Path, name: str) -> None:
    out = Path(shutil.copytree(dropping, tmp_path / "run"))
    file = out / "ditto" / "seed-0" / name
    first, *others = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([first, first.replace(b"}", b', "more": 1}'), *others]))
    with pytest.raises(RunError, match=rf"{name}'.* 1\b"):
        tailorfl.run(None, out=out, resume=True)
    assert "damaged" in checked(out)[1]


def test_the_folders_of_two_methods_exchanged(folder: Path) -> None:
    one, two = folder / "local" / "seed-0", folder / "ditto" / "seed-0"
    one.rename(folder / "aside")
    two.rename(one)
    (folder / "aside").rename(two)
    result = ExperimentResult.load(folder)
    assert result.missing == [
        f"{label}, seed 0: damaged: it holds another job: {other}, seed 0; restore it from a copy, or do it again with "
        "--resume"
        for label, other in (("local", "ditto"), ("ditto", "local"))
    ]
    assert result.table["seeds"].tolist() == [1, 1]
    assert job_problems(one) == [(True, "it holds another job: ditto, seed 0")]
    with pytest.raises(
        RunError, match=r"not what was written for local, seed 0 \(it holds another job: ditto"
    ):
        tailorfl.run(None, out=folder, resume=True)


def test_one_seed_copied_over_another(folder: Path) -> None:
    shutil.rmtree(folder / "local" / "seed-1")
    shutil.copytree(folder / "local" / "seed-0", folder / "local" / "seed-1")
    (missing,) = ExperimentResult.load(folder).missing
    assert missing.startswith("local, seed 1: damaged: it holds another job: local, seed 0")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("manifest.json", None, "manifest.json is missing, though the run is finished"),
        ("status.json", b"{}", "status.json' is damaged"),
        ("status.json", b"[]", "status.json' is damaged (it holds list"),
        ("status.json", b'{"status": "perfect"}', "it says 'perfect'"),
        ("status.json", b"[" * 9999, "status.json' is damaged"),
        ("config.json", b"null", "config.json' is damaged (it holds NoneType"),
    ],
)
def test_files_that_hold_something_else(folder: Path, name: str, content: bytes | None, said: str) -> None:
    file = folder / "ditto" / "seed-1" / name
    file.unlink() if content is None else file.write_bytes(content)
    result = ExperimentResult.load(folder)
    (missing,) = result.missing
    assert missing.startswith("ditto, seed 1: damaged: ")
    assert result.table["seeds"].tolist() == [2, 1]
    assert said in missing
    found = job_problems(file.parent)
    assert found
    assert all(bad for bad, _ in found)


def test_a_job_whose_environment_is_no_group_is_not_resumed(folder: Path) -> None:
    file = folder / "ditto" / "seed-1" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "environment": []}))
    with pytest.raises(RunError, match=r"config\.json"):
        tailorfl.run(None, out=folder, resume=True)


@pytest.mark.parametrize("line", [b"[1]\n", b"1\n", b'{"round": "x"}\n', b'{"round": 1.5}\n', b"null\n"])
def test_records_that_are_none_of_a_round(folder: Path, line: bytes) -> None:
    job = folder / "local" / "seed-0"
    (job / "manifest.json").unlink()
    (job / "rounds.jsonl").write_bytes(line)
    ((bad, text),) = job_problems(job)
    assert bad
    assert "rounds.jsonl' is damaged (it is no record of a round)" in text


@pytest.mark.parametrize("content", [b"1", b"{", b"null", b"9" * 5000])
def test_what_was_forced_cannot_be_read(folder: Path, content: bytes) -> None:
    (folder / FORCED).write_bytes(content)
    with pytest.raises(RunError, match=r"forced\.json', which says what was different .* is damaged"):
        forced(folder)
