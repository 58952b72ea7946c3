"""Exports that were damaged, half written or made by an older version: noticed before anything is predicted."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import tailorfl
from export.exporting import QUICK, table
from tailorfl.cli.main import app
from tailorfl.errors import RunError, TailorflError
from tailorfl.export.folder import FACTS, export, loaded
from tailorfl.export.predict import predict
from tailorfl.runs.files import MANIFEST, PART, write_manifest
from tailorfl.runs.trained_models import restore


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its export `models/ash` and data `new.csv`."""
    home = tmp_path_factory.mktemp("home")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"town": ["ash", "elm"] * 30, "age": rng.normal(60, 9, 60).round(1)})
    frame["pain"] = rng.choice(["dull", "sharp"], 60)
    frame["sick"] = np.where(frame["age"] > 60, "yes", "no")
    frame.to_csv(home / "towns.csv", index=False)
    frame.drop(columns="sick").head(7).to_csv(home / "new.csv", index=False)
    data = table(home / "towns.csv", "sick", "classification", normalise="federated")
    tailorfl.run(QUICK, data=data, method="local", model="logistic", out=home / "run")
    export(home / "run", home / "models", clients=["ash"])
    assert restore(home / "run").store.problems() == []
    folder = home / "models" / "ash"
    names = {path.name for path in folder.iterdir() if path.name != MANIFEST}
    assert set(json.loads((folder / MANIFEST).read_text())["files"]) == names - {"__pycache__"}
    assert predicted(folder, home, home)[0] == 0
    loaded(folder).load()
    return home


def copy(home: Path, to: Path) -> Path:
    return Path(shutil.copytree(home / "models" / "ash", to / "my models" / "ash"))


def predicted(folder: Path, home: Path, to: Path) -> tuple[int, str]:
    words = ["predict", str(folder), "--data", str(home / "new.csv"), "--out", str(to / "out.csv")]
    found = CliRunner().invoke(app, words)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, " ".join(found.output.split())


def flip(file: Path, random_: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
    file.write_bytes(bytes(content))


def cut(file: Path, random_: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: random_.randrange(len(content))])


def empty(file: Path, _: random.Random) -> None:
    file.write_bytes(b"")


def delete(file: Path, _: random.Random) -> None:
    file.unlink()


def doubled(file: Path, random_: random.Random) -> None:
    file.write_bytes(file.read_bytes() * 2)


CHANCE = (flip, cut)
"""Harms that are others each time."""


@pytest.mark.parametrize("harm", [flip, cut, empty, delete, doubled])
@pytest.mark.parametrize("name", [FACTS, "model.py", "model.safetensors", MANIFEST])
def test_nothing_is_predicted_by_a_damaged_export_nor_does_its_own_code_load_it(
    name: str, harm: Callable[[Path, random.Random], None], home: Path, tmp_path: Path
) -> None:
    for attempt in range(3 if harm in CHANCE else 1):
        folder = copy(home, tmp_path / str(attempt))
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        harm(folder / name, random.Random(f"{name} {harm.__name__} {attempt}"))
        code, said = predicted(folder, home, tmp_path)
        assert not (tmp_path / "out.csv").exists()
        if name == FACTS and harm is delete:  # no export any more
            assert code != 0
            continue
        assert code == 1, said
        assert name in said or (name == MANIFEST and "was changed after" in said)
        assert "tailorfl export" in said
        if name != FACTS:  # which its code does not need
            with pytest.raises(Exception):  # noqa: B017, PT011  whatever the damaged code raises
                loaded(folder).load()


@pytest.mark.slow
def test_the_printed_lines_stop_at_a_damaged_export(home: Path, tmp_path: Path) -> None:
    (one,) = export(home / "run", tmp_path / "it's", clients=["ash"])
    words = [sys.executable, "-c", one.lines]
    whole = subprocess.run(words, capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    flip(one.path / "model.safetensors", random.Random(0))
    damaged = subprocess.run(words, capture_output=True, text=True)
    assert damaged.returncode != 0
    assert not damaged.stdout
    assert "model.safetensors" in damaged.stderr.splitlines()[-1]


def older(folder: Path) -> dict[str, object]:
    """Make an export what it was before there were digests."""
    facts: dict[str, object] = {**json.loads((folder / FACTS).read_text()), "format": 1}
    (folder / FACTS).write_text(json.dumps(facts))
    code = (folder / "model.py").read_text()
    assert "    check(folder)\n" in code
    (folder / "model.py").write_text(code.replace("    check(folder)\n", ""))
    (folder / MANIFEST).unlink()
    return facts


def test_an_export_of_before_there_were_digests_is_used_with_a_warning(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = predict(home / "models" / "ash", home / "new.csv")
    folder = copy(home, tmp_path)
    facts = older(folder)
    with caplog.at_level(logging.WARNING, "tailorfl"):
        pd.testing.assert_frame_equal(predict(folder, home / "new.csv"), wanted)
    assert "damage" in caplog.text
    for name in ("model.py", "model.safetensors"):  # noticed where it can be
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(TailorflError):
            predict(folder, home / "new.csv")
        (folder / name).write_bytes(content)
    for text in ("{", "[]", json.dumps({k: v for k, v in facts.items() if k != "inputs"})):
        (folder / FACTS).write_text(text)
        with pytest.raises(RunError, match=FACTS):
            predict(folder, home / "new.csv")


def test_an_export_of_a_newer_version_is_refused(home: Path, tmp_path: Path) -> None:
    folder = copy(home, tmp_path)
    facts = json.loads((folder / FACTS).read_text())
    (folder / FACTS).write_text(json.dumps({**facts, "format": facts["format"] + 1}))
    write_manifest(folder, list(json.loads((folder / MANIFEST).read_text())["files"]))
    with pytest.raises(RunError, match="newer"):
        predict(folder, home / "new.csv")


@pytest.mark.parametrize(("exists", "limit"), [(False, 100), (True, 1000)], ids=["new", "replaced"])
def test_a_full_disk_leaves_no_half_export(exists: bool, limit: int, home: Path, tmp_path: Path) -> None:
    """A limit on the size of files strikes in the middle of a write, as a full disk does."""
    out, told = tmp_path / "models", tmp_path / "told"
    if exists:
        shutil.copytree(home / "models", out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    process = os.fork()
    if process == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            export(home / "run", out, clients=["ash"], overwrite=True)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            told.write_text(text[:limit])
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    assert told.read_text().startswith("RunError: ")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert out.exists() == exists
    (one,) = export(home / "run", out, clients=["ash"], overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["ash"]
    assert predicted(one.path, home, tmp_path)[0] == 0


def test_what_a_killed_export_left_is_removed_by_the_next(home: Path, tmp_path: Path) -> None:
    left = tmp_path / f".ash.{2**22 + 1}{PART}"  # of a process that cannot be
    (left / "base").mkdir(parents=True)
    export(home / "run", tmp_path, clients=["ash"])
    assert [path.name for path in tmp_path.iterdir()] == ["ash"]
