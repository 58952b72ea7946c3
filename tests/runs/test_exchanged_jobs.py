"""Jobs whose folders were exchanged, or whose files hold something else, are named and go into no table."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import tailorfl
from tailorfl.errors import RunError
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.fingerprint import FORCED, forced
from tailorfl.runs.job import job_problems

TINY: dict[str, Any] = {
    "methods": ["local", "fedavg"],
    "rounds": 2,
    "seeds": 2,
    "model": "logistic",
    "data": {"clients": 3, "samples": 60},
    "train": {"steps": 1},
    "eval": {"every": 1, "sets": ["local"], "final": ["local"]},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tailorfl.run(TINY, out=tmp_path_factory.mktemp("whole") / "run").path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_the_folders_of_two_methods_exchanged(folder: Path) -> None:
    one, two = folder / "local" / "seed-0", folder / "fedavg" / "seed-0"
    one.rename(folder / "aside")
    two.rename(one)
    (folder / "aside").rename(two)
    result = ExperimentResult.load(folder)
    assert result.missing == [
        f"{label}, seed 0: damaged: it holds another job: {other}, seed 0; restore it from a copy, or do it again with "
        "--resume"
        for label, other in (("local", "fedavg"), ("fedavg", "local"))
    ]
    assert result.table["seeds"].tolist() == [1, 1]
    assert job_problems(one) == [(True, "it holds another job: fedavg, seed 0")]
    with pytest.raises(
        RunError, match=r"not what was written for local, seed 0 \(it holds another job: fedavg"
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
    file = folder / "fedavg" / "seed-1" / name
    file.unlink() if content is None else file.write_bytes(content)
    result = ExperimentResult.load(folder)
    (missing,) = result.missing
    assert missing.startswith("fedavg, seed 1: damaged: ")
    assert result.table["seeds"].tolist() == [2, 1]
    assert said in missing
    found = job_problems(file.parent)
    assert found
    assert all(bad for bad, _ in found)


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
