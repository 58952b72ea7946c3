"""Stopped anywhere, an experiment goes on to the very numbers of one that nobody stopped."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import tailorfl
from runs.killing import assert_identical, ended, forked, killed, numbers
from runs.small import contents
from tailorfl.engines.choice import Auto
from tailorfl.errors import RunError
from tailorfl.runs.store import RunStore

ADAM = {"name": "fedavg", "label": "fedadam", "server": {"kind": "adam", "lr": 0.05}}
METHODS: list[Any] = [ADAM, "ditto", {"name": "fedrep", "head_epochs": 1}, "apfl", "pfedme", "fedbn"]
SMALL: dict[str, Any] = {
    "seeds": [3],
    "data": {"samples": 300, "clients": 8},
    "model": {"name": "mlp", "hidden": [8], "norm": "batch", "dropout": 0.2},
    "rounds": 4,
    "fraction": 0.5,
    "engine": "vectorized",
    "eval": {"every": 2},
    "checkpoint_every": 2,
}
LONG: dict[str, Any] = {
    **SMALL,
    "method": "ditto",
    "rounds": 60,
    "train": {"epochs": 4},
    "engine": "sequential",
    "eval": {"every": 14},
    "checkpoint_every": 3,
}
MOMENTS = [
    ("fedadam", "round", 3),
    ("ditto", "tensors", 1),
    ("fedrep", "facts", 2),
    ("apfl", "record", 4),
    ("pfedme", "summary", 1),
    ("fedbn", "create", 1),
    ("fedbn", "round", 2),
    ("fedbn", "tensors", 2),
    ("fedbn", "comparison", 1),
]
"""(label, point, count): after each the experiment is resumed, and lives until the next."""


def settings_file(folder: Path, settings: dict[str, Any]) -> str:
    file = folder / "experiment.yaml"
    file.write_text(tailorfl.load_config(settings).to_yaml())
    return str(file)


def status(job: Path) -> str:
    """How a job stands."""
    return RunStore.open(job, readonly=True).status


@pytest.mark.slow
def test_killed_at_every_kind_of_moment_it_ends_the_same(tmp_path: Path) -> None:
    tailorfl.run({**SMALL, "methods": METHODS}, out=tmp_path / "whole")
    broken = str(tmp_path / "broken")
    start = ("run", settings_file(tmp_path, {**SMALL, "methods": METHODS}), "--out", broken, "--quiet")
    for position, (label, point, count) in enumerate(MOMENTS):
        killed(label, point, count, *(start if position == 0 else ("run", "--resume", broken, "--quiet")))
        assert label == "fedbn" or status(tmp_path / "broken" / label / "seed-3") == "interrupted"
    assert "fedadam" in tailorfl.run(out=broken, resume=True).table.index
    assert_identical(numbers(tmp_path / "broken"), numbers(tmp_path / "whole"))


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The numbers of the long experiment when nobody stops it."""
    out = tmp_path_factory.mktemp("long") / "out"
    tailorfl.run(LONG, out=out)
    return numbers(out)


@pytest.mark.slow
def test_killed_at_random_it_ends_the_same(tmp_path: Path, long_run: dict[str, Any]) -> None:
    rng = random.Random(0)
    out = tmp_path / "out"
    arguments: tuple[str, ...] = ("run", settings_file(tmp_path, LONG), "--out", str(out))
    for _ in range(3):
        process, words = forked(*arguments)
        assert "Ditto seed 3: 60 rounds" in words.readline()
        time.sleep(rng.uniform(0.05, 0.5))
        os.kill(process, signal.SIGKILL)
        assert ended(process, words)[0] == -signal.SIGKILL
        assert status(out / "ditto" / "seed-3") == "interrupted"
        arguments = ("run", "--resume", str(out))
    tailorfl.run(out=out, resume=True)
    assert_identical(numbers(out), long_run)


def wait_after_round_3() -> None:
    """Let this process wait for a signal when it has recorded the third round."""
    real = RunStore.append_round

    def append(store: RunStore, record: dict[str, Any]) -> None:
        real(store, record)
        if record["round"] == 3:
            time.sleep(100)

    setattr(RunStore, "append_round", append)  # noqa: B010


def test_ctrl_c_says_how_to_go_on_and_it_does(tmp_path: Path) -> None:
    """Meanwhile no other run may write the folder."""
    out, settings = tmp_path / "my results", {**SMALL, "method": "ditto", "engine": "sequential", "rounds": 5}
    tailorfl.run(settings, out=tmp_path / "whole")
    file = settings_file(tmp_path, settings)
    process, said = forked("run", file, "--out", str(out), before=wait_after_round_3)
    assert "Ditto seed 3: 5 rounds" in said.readline()
    ways: list[dict[str, Any]] = [
        {"config": settings},
        {"config": settings, "overwrite": True},
        {"resume": True},
    ]
    for options in ways:
        with pytest.raises(RunError, match=rf"process {process} is writing to '{out}'.*choose another name"):
            tailorfl.run(out=out, **options)
    os.kill(process, signal.SIGINT)
    code, words = ended(process, said)
    assert code == 130
    assert f"tailorfl run --resume '{out}'" in words
    assert "Traceback" not in words
    job = out / "ditto" / "seed-3"
    assert status(job) == "interrupted"
    assert 0 < len(RunStore.open(job, readonly=True).rounds()) < 5
    tailorfl.run(out=out, resume=True)
    assert_identical(numbers(out), numbers(tmp_path / "whole"))


def test_resuming_a_finished_experiment_changes_nothing(tmp_path: Path) -> None:
    first = tailorfl.run({**SMALL, "methods": ["local", "ditto"]}, out=tmp_path / "out")
    before = contents(tmp_path / "out")
    again = tailorfl.run(out=tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == before
    assert again.table.equals(first.table)


@pytest.mark.parametrize(
    ("engine", "methods"),
    [
        ("sequential", METHODS[::2]),
        ("vectorized", METHODS[1::2]),
        pytest.param("sequential", METHODS[1::2], marks=pytest.mark.slow),
        pytest.param("vectorized", METHODS[::2], marks=pytest.mark.slow),
    ],
    ids=["sequential", "vectorized", "the others, sequential", "the others, vectorized"],
)
def test_the_same_command_twice_gives_the_same_bits(engine: str, methods: list[Any], tmp_path: Path) -> None:
    for out in ("one", "two"):
        tailorfl.run({**SMALL, "methods": methods, "engine": engine, "rounds": 2}, out=tmp_path / out)
    assert_identical(numbers(tmp_path / "one"), numbers(tmp_path / "two"))


def stop(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_before_the_first_checkpoint_the_chosen_engine_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which engine is faster may be measured differently the second time, and the last bits depend on it."""
    monkeypatch.setattr(Auto, "_measure", lambda auto, *_: auto.choose("vectorized"))
    settings = {**SMALL, "method": "ditto", "engine": "auto"}
    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "save_checkpoint", stop)
        with pytest.raises(KeyboardInterrupt):
            tailorfl.run(settings, out=tmp_path / "out")
    monkeypatch.setattr(Auto, "_measure", lambda auto, *_: auto._chosen or auto.choose("sequential"))
    assert set(tailorfl.run(out=tmp_path / "out", resume=True).rounds["engine"]) == {"vectorized"}


def test_overwriting_leaves_no_finished_job_of_the_old_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped replacement, resumed, would else pass old results for its own."""
    out, methods = tmp_path / "out", ["local", "ditto"]
    tailorfl.run({**SMALL, "methods": methods}, out=out)
    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "save_checkpoint", stop)
        with pytest.raises(KeyboardInterrupt):
            tailorfl.run({**SMALL, "methods": methods, "rounds": 3}, out=out, overwrite=True)
    assert not (out / "ditto").joinpath("seed-3", "summary.json").exists()
    result = tailorfl.run(out=out, resume=True)
    assert [summary["rounds"] for summary, _ in result.jobs] == [3, 3]
