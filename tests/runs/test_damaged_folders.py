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
from runs.small import StopAt, facts, untimed
from tailorfl.cli.main import app
from tailorfl.errors import RunError, TailorflError
from tailorfl.report.document import write_report
from tailorfl.report.result import ExperimentResult
from tailorfl.runs import fingerprint
from tailorfl.runs.fingerprint import FORCED, forced
from tailorfl.runs.job import job_problems
from tailorfl.runs.trained_models import restore
from tailorfl.settings.loading import load

PLAIN: dict[str, Any] = {
    "methods": ["ditto"],
    "rounds": 4,
    "seeds": 1,
    "model": {"name": "mlp", "hidden": [4]},
    "data": {"clients": 3, "samples": 150},
    "engine": "sequential",
    "eval": {"every": 1, "sets": ["val", "local"], "final": ["local"]},
    "checkpoint_every": 2,
}
PRIVATE = {"dp": {"clip": 1.0, "noise": 1.0, "accountant": "rdp"}}
TINY = {
    **PLAIN,
    "methods": ["local", "ditto"],
    "seeds": 2,
    "rounds": 2,
    "model": "logistic",
    "train": PRIVATE,
}
DROPPING = {**PLAIN, "methods": ["local", "ditto"], "system": {"dropout": 0.3}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds; one model; and a run with a trace, stopped after two rounds of its last job."""
    here = tmp_path_factory.mktemp("folders")
    tailorfl.run(TINY, out=here / "whole")
    tailorfl.run(PLAIN, out=here / "model")
    with pytest.raises(KeyboardInterrupt):
        tailorfl.run(DROPPING, out=here / "stopped", observer=StopAt("ditto, seed 0", 2))
    return here


@pytest.fixture
def folder(folders: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders / "whole", tmp_path / "run"))


@pytest.fixture
def model(folders: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders / "model", tmp_path / "a run"))


@pytest.fixture
def stopped(folders: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders / "stopped", tmp_path / "run"))


def change_digit(file: Path) -> None:
    """Another digit somewhere in the middle of the file."""
    content = bytearray(file.read_bytes())
    digits = [k for k, byte in enumerate(content) if 48 <= byte <= 56]
    content[digits[len(digits) // 2]] += 1
    file.write_bytes(bytes(content))


def cut(file: Path) -> None:
    """Without its last line."""
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))


def lose_round_1(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(line for line in lines if b'"round": 1,' not in line))


def record_round_1_twice(file: Path) -> None:
    """With other numbers."""
    first, *others = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([first, first.replace(b"}", b', "more": 1}'), *others]))


def count_a_round_less(file: Path) -> None:
    """So that what a private step cost would be counted once less."""
    checkpoint = facts(file)
    checkpoint["meta"]["round"] -= 1
    file.write_text(json.dumps(checkpoint, indent=1))


HARMS = (change_digit, cut, Path.unlink)


def shown(*words: object) -> tuple[int, str]:
    """(exit code, output) of a command."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, " ".join(result.output.split())


def exported(folder: Path) -> tuple[int, str]:
    return shown("export", folder, "--client", "0", "--out", folder.parent / "out", "--overwrite")


# -- of a finished run ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(
    "name", ["summary.json", "rounds.jsonl", "clients.jsonl", "config.json", "privacy.csv"]
)
def test_a_damaged_job_is_named_and_in_no_table(
    folder: Path, harm: Callable[[Path], None], name: str
) -> None:
    harm(folder / "ditto" / "seed-1" / name)
    result = ExperimentResult.load(folder)
    assert result.table["seeds"].tolist() == [2, 1]
    (missing,) = result.missing
    assert missing.startswith("ditto, seed 1: ")
    if name == "summary.json":  # what is missing is written the same way, whatever it misses
        assert all("Not in the table" in page.read_text() for page in write_report(result))
    code, said = shown("check", folder)
    if not (name == "config.json" and harm is Path.unlink):  # that folder is no job any more
        assert code != 0
        assert name in said
        assert "1 jobs of" in said
    assert "local, seed 0: whole" in said


def test_resuming_does_a_damaged_job_again(folder: Path) -> None:
    change_digit(folder / "ditto" / "seed-1" / "summary.json")
    again = tailorfl.run(None, out=folder, resume=True)
    assert not again.missing
    assert shown("check", folder)[0] == 0
    assert again.table["seeds"].tolist() == [2, 2]


def test_every_byte_of_every_file_may_go_without_a_wrong_table(folder: Path) -> None:
    """A library error, a named hole, or the same numbers: nothing else, whatever file of a job is emptied."""
    wanted = untimed(ExperimentResult.load(folder))
    for file in sorted((folder / "local" / "seed-0").iterdir()):
        if file.name == ".lock":
            continue
        content = file.read_bytes()
        file.write_bytes(b"")
        try:
            result = ExperimentResult.load(folder)
        except TailorflError:
            pass
        else:
            assert result.missing or untimed(result).equals(wanted), file.name
        file.write_bytes(content)


def test_a_folder_without_a_finished_job_names_a_few(tmp_path: Path) -> None:
    """Hundreds of jobs would fill the screen."""
    (tmp_path / "config.yaml").write_text(load(None, ["methods=local", "seeds=8"]).to_yaml())
    with pytest.raises(RunError, match=r"local, seed 4: was not started; and 3 more$") as error:
        ExperimentResult.load(tmp_path)
    assert str(error.value).count("was not started") == 5


def test_the_folders_of_two_methods_exchanged(folder: Path) -> None:
    one, two = folder / "local" / "seed-0", folder / "ditto" / "seed-0"
    one.rename(folder / "aside")
    two.rename(one)
    (folder / "aside").rename(two)
    shutil.rmtree(folder / "local" / "seed-1")
    shutil.copytree(two, folder / "local" / "seed-1")
    result = ExperimentResult.load(folder)
    held = {
        "local, seed 0": "ditto, seed 0",
        "ditto, seed 0": "local, seed 0",
        "local, seed 1": "local, seed 0",
    }
    assert sorted(missing.partition("; ")[0] for missing in result.missing) == sorted(
        f"{job}: damaged: it holds another job: {other}" for job, other in held.items()
    )
    assert result.table["seeds"].to_dict() == {"ditto": 1}
    assert job_problems(one) == [(True, "it holds another job: ditto, seed 0")]
    with pytest.raises(
        RunError, match=r"config.json' was changed .* for local, seed 0 \(it holds another job: ditto"
    ):
        tailorfl.run(None, out=folder, resume=True)


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
    problems = job_problems(file.parent)
    assert problems
    assert all(bad for bad, _ in problems)


def test_a_job_whose_environment_is_no_group_is_not_resumed(folder: Path) -> None:
    file = folder / "ditto" / "seed-1" / "config.json"
    file.write_text(json.dumps({**facts(file), "environment": []}))
    with pytest.raises(RunError, match=r"config\.json"):
        tailorfl.run(None, out=folder, resume=True)


@pytest.mark.parametrize("line", [b"[1]\n", b"1\n", b'{"round": "x"}\n', b'{"round": 1.5}\n', b"null\n"])
def test_records_that_are_none_of_a_round(folder: Path, line: bytes) -> None:
    job = folder / "local" / "seed-0"
    (job / "manifest.json").unlink()
    (job / "rounds.jsonl").write_bytes(line)
    ((bad, text),) = job_problems(job)
    assert bad
    assert "rounds.jsonl' is damaged (it is not a record of a round)" in text


@pytest.mark.parametrize("content", [b"1", b"{", b"null", b"9" * 5000])
def test_what_was_forced_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FORCED).write_bytes(content)
    with pytest.raises(RunError, match=r"forced\.json', .* is damaged"):
        forced(tmp_path)


# -- of a run that was stopped -------------------------------------------------------------------------------


def test_what_is_not_finished_is_said_and_is_no_damage(stopped: Path) -> None:
    assert ExperimentResult.load(stopped).missing == ["ditto, seed 0: not finished (interrupted)"]
    code, said = shown("check", stopped)
    assert code == 0
    assert "ditto, seed 0: not finished (interrupted)" in said


@pytest.mark.parametrize(
    ("name", "harm", "said", "checked"),
    [
        ("checkpoint-000002.json", count_a_round_less, r" was changed after", True),
        ("rounds.jsonl", lose_round_1, "' has lost the records of rounds 1", False),
        ("clients.jsonl", lose_round_1, "' has lost the records of rounds 1", False),
        ("trace.jsonl", record_round_1_twice, r"'.* 1\b", True),
        ("rounds.jsonl", record_round_1_twice, r"'.* 1\b", True),
    ],
)
def test_a_changed_history_is_not_continued(
    stopped: Path, name: str, harm: Callable[[Path], None], said: str, checked: bool
) -> None:
    harm(stopped / "ditto" / "seed-0" / name)
    assert not checked or shown("check", stopped)[0] != 0
    with pytest.raises(RunError, match=name.replace(".", r"\.") + said):
        tailorfl.run(None, out=stopped, resume=True)


def test_doubled_lines_are_gone_after_resuming(stopped: Path, tmp_path: Path) -> None:
    whole = tailorfl.run(DROPPING, out=tmp_path / "whole")
    files = [Path("ditto/seed-0", name) for name in ("trace.jsonl", "rounds.jsonl", "clients.jsonl")]
    for file in files:
        first, *others = (stopped / file).read_bytes().splitlines(keepends=True)
        (stopped / file).write_bytes(b"".join([first, first, *others]))
    again = tailorfl.run(None, out=stopped, resume=True)
    for file in files:
        counts = [(out / file).read_bytes().count(b"\n") for out in (stopped, tmp_path / "whole")]
        assert counts[0] == counts[1], file
    assert untimed(again).equals(untimed(whole))


# -- of a model ----------------------------------------------------------------------------------------------


def empty_all(newest: Path) -> None:
    for file in newest.parent.glob("checkpoint-*.json"):
        file.write_bytes(b"")


@pytest.mark.parametrize(
    ("ending", "harm"),
    [
        ("safetensors", cut),
        ("json", empty_all),
        *(pytest.param("json", harm, marks=pytest.mark.slow) for harm in HARMS),
        *(pytest.param("safetensors", harm, marks=pytest.mark.slow) for harm in (change_digit, Path.unlink)),
    ],
)
def test_a_finished_job_without_its_last_checkpoint_gives_no_older_model(
    model: Path, ending: str, harm: Callable[[Path], None]
) -> None:
    """Refused by whoever needs the model, in the table all the same, and made again as `check` advises."""
    job = model / "ditto" / "seed-0"
    wanted = (job / "checkpoint-000004.safetensors").read_bytes()
    numbers = untimed(ExperimentResult.load(model))
    harm(job / f"checkpoint-000004.{ending}")
    for code, said in (exported(model), shown("check", model)):
        assert code != 0
        assert "ditto, seed 0" in said
        assert f"--resume '{model}'" in said
    assert not (model.parent / "out").exists()
    with pytest.raises(RunError, match="checkpoint"):
        restore(model)
    with pytest.raises(RunError, match="checkpoint"):
        tailorfl.predict(model, model.parent / "none.csv", client="0")
    assert ExperimentResult.load(model).table["seeds"].tolist() == [1]
    again = tailorfl.run(None, out=model, resume=True)
    assert shown("check", model)[0] == 0
    assert (job / "checkpoint-000004.safetensors").read_bytes() == wanted
    assert untimed(again).equals(numbers)
    assert exported(model)[0] == 0


def test_checkpoints_that_are_not_needed_may_be_damaged_or_deleted(model: Path) -> None:
    """Nothing is trained again where an older one is damaged, or all were deleted to save space."""
    job = model / "ditto" / "seed-0"
    rounds = (job / "rounds.jsonl").read_bytes()
    change_digit(job / "checkpoint-000002.safetensors")
    assert shown("check", model)[0] != 0
    assert exported(model)[0] == 0
    tailorfl.run(None, out=model, resume=True)
    assert shown("check", model)[0] == 0
    for file in job.glob("checkpoint-*"):
        file.unlink()
    assert shown("check", model)[0] == 0
    tailorfl.run(None, out=model, resume=True)
    assert (job / "rounds.jsonl").read_bytes() == rounds


def test_models_are_of_the_settings_that_they_were_trained_with(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave a folder of other versions, and one that was resumed by force."""
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "environment", lambda: {"tailorfl": "9.9", "torch": "99"})
        assert exported(model)[0] == 0
    settings = yaml.safe_load((model / "config.yaml").read_text())
    settings["model"]["activation"] = "tanh"  # weights of the same shapes
    (model / "config.yaml").write_text(yaml.safe_dump(settings))
    code, said = exported(model)
    assert code != 0
    assert "model.activation" in said
    tailorfl.run(None, out=model, resume=True, force=True)
    assert exported(model)[0] == 0
