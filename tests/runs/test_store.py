"""RunStore in one process: records, when they are on the disk, resuming, refusals, results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from runs.small import contents
from tailorfl.errors import RunError
from tailorfl.runs import checkpoints, store
from tailorfl.runs.store import RunStore


def write_rounds(store: RunStore, *rounds: int) -> None:
    for round in rounds:
        store.append_round({"round": round, "loss": 1 / (round + 3)})
        store.append_clients(
            [{"round": round, "client": client, "accuracy": client / 7} for client in range(3)]
        )
        store.save_checkpoint(round, {"w": torch.tensor([float(round)])}, {"seed": 1})


def reader(folder: Path) -> RunStore:
    return RunStore.open(folder, readonly=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two rounds that is not finished."""
    with RunStore.create(tmp_path / "run", {"a": 1}) as store:
        write_rounds(store, 1, 2)
    return tmp_path / "run"


# -- records and results -------------------------------------------------------------------------------------


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    with RunStore.create(tmp_path / "new" / "run", {"method": "ditto", "epsilon": math.inf}) as store:
        assert str(store.status) == "running"
        write_rounds(store, 1, 2)
        assert len(store.rounds()) == 2
        assert store.summary is None
        store.finish({"accuracy": np.float32(0.5), "auc": math.nan})
        assert str(store.status) == "finished"
    found = reader(tmp_path / "new" / "run")
    assert str(found.status) == "finished"
    assert found.config == {"method": "ditto", "epsilon": math.inf}
    assert found.summary == {"accuracy": 0.5, "auc": None}
    for name, frame in (("rounds", found.rounds()), ("clients", found.clients())):
        pd.testing.assert_frame_equal(pd.read_parquet(found.path / f"{name}.parquet"), frame)
    assert found.rounds()["loss"].tolist() == [1 / 4, 1 / 5]
    assert found.clients().query("round == 2")["client"].tolist() == [0, 1, 2]


def test_records_are_strict_json_with_exact_numbers(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, {}) as store:
        record = {"round": np.int64(1), "a": 0.1 + 0.2, "b": math.nan, "c": math.inf, "d": torch.tensor(2)}
        store.append_round(record)
        frame = store.rounds()
    line = (tmp_path / "rounds.jsonl").read_text()
    assert line == '{"round": 1, "a": 0.30000000000000004, "b": null, "c": "Infinity", "d": 2}\n'
    assert (frame["a"][0], frame["c"][0]) == (0.1 + 0.2, math.inf)
    assert math.isnan(frame["b"][0])
    assert [frame[name].dtype.kind for name in ("round", "a", "b", "c", "d")] == ["i", "f", "f", "f", "i"]


def test_frames_of_a_run_without_records(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, {}) as store:
        store.append_clients([])
        assert store.rounds().empty
        assert list(store.clients()) == ["round"]
        store.finish({})
    assert list(pd.read_parquet(tmp_path / "clients.parquet")) == ["round"]


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """Stopped after the records of round 5 and before its checkpoint, in the middle of writing round 6."""
    with RunStore.create(tmp_path / "whole", {"lr": 0.1}) as store:
        write_rounds(store, 1, 2, 3, 4, 5, 6)
        store.finish({"rounds": 6})
    with RunStore.create(tmp_path / "stopped", {"lr": 0.1}) as store:
        write_rounds(store, 1, 2, 3, 4)
        store.append_round({"round": 5, "loss": 99})
    with (tmp_path / "stopped" / "clients.jsonl").open("a") as file:
        file.write('{"round": 5, "client": 0, "accuracy": 0.3}\n{"round": 5, "cl')
    with RunStore.open(tmp_path / "stopped") as store:
        latest = store.latest_checkpoint()
        assert latest is not None
        assert (latest[0], latest[1]["w"].tolist()) == (4, [4.0])
        store.truncate_after(4)
        write_rounds(store, 5, 6)
        store.finish({"rounds": 6})
    whole, stopped = (contents(tmp_path / name) for name in ("whole", "stopped"))
    assert whole.keys() == stopped.keys()
    timed = ("status.json", "rounds.parquet", "clients.parquet")
    assert all(stopped[name] == content for name, content in whole.items() if name not in timed)


def test_truncating_drops_checkpoints_and_results_too(folder: Path) -> None:
    with RunStore.open(folder) as store:
        write_rounds(store, 3)
        store.finish({})
        store.truncate_after(2)
        assert store.rounds()["round"].tolist() == [1, 2]
        assert store.clients()["round"].unique().tolist() == [1, 2]
        assert store.summary is None
        latest = store.latest_checkpoint()
        assert latest is not None
        assert latest[0] == 2
        store.truncate_after(0)
        assert store.rounds().empty
        assert store.latest_checkpoint() is None


@pytest.mark.parametrize("name", ["rounds.jsonl", "clients.jsonl"])
def test_a_file_cut_anywhere_loses_only_the_cut_line(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    for size in range(len(whole)):
        (folder / name).write_bytes(whole[:size])
        found = reader(folder)
        lines = found.rounds() if name == "rounds.jsonl" else found.clients()
        assert len(lines) == whole[:size].count(b"\n")
        assert (folder / name).stat().st_size == size  # a reader repairs nothing
    with RunStore.open(folder) as store:
        write_rounds(store, 3)
    for line in (folder / name).read_bytes().splitlines():
        json.loads(line)


def test_damage_inside_a_file_is_told(folder: Path) -> None:
    lines = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_bytes(lines[0][:9] + b"\n" + lines[1])
    with pytest.raises(RunError, match=r"line 1 of .*rounds\.jsonl' is damaged"):
        reader(folder).rounds()
    (folder / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config\.json' is damaged"):
        _ = reader(folder).config


# -- folders -------------------------------------------------------------------------------------------------


def test_create_refuses_a_folder_in_use_and_leaves_other_files_alone(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    before = contents(folder)
    with pytest.raises(RunError, match=r"already holds a run.*--resume.*another name"):
        RunStore.create(folder, {"a": 2})
    assert contents(folder) == before
    with RunStore.create(folder, {"a": 2}, overwrite=True) as store:
        assert store.config == {"a": 2}
        assert store.rounds().empty
        assert store.latest_checkpoint() is None
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_create_never_empties_a_folder_that_is_no_run(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match=r"not a run \(thesis.tex"):
        RunStore.create(tmp_path, {}, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_create_that_was_killed_half_way_does_not_block_the_folder(tmp_path: Path) -> None:
    for name in (".lock", "status.json", ".config.json.12.part"):
        (tmp_path / name).write_text("")
    with RunStore.create(tmp_path, {}) as store:
        assert sorted(path.name for path in store.path.iterdir()) == [".lock", "config.json", "status.json"]


def test_a_closed_store_gives_its_lock_back_at_once(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, {})
    held = store._lock  # or it would go with the last reference to it
    store.close()
    RunStore.open(tmp_path).close()
    assert held is not None


def test_opening_to_write_removes_temporary_files(folder: Path) -> None:
    part = folder / ".rounds.parquet.77.part"
    part.write_text("half")
    reader(folder).close()
    assert part.exists()
    RunStore.open(folder).close()
    assert not part.exists()


def test_discard_deletes_the_run_and_nothing_else(folder: Path) -> None:
    with RunStore.open(folder), pytest.raises(RunError, match="is writing"):
        RunStore.discard(folder)
    RunStore.discard(folder)
    assert not folder.exists()
    RunStore.create(folder, {}).close()
    (folder / "notes.txt").write_text("mine")
    RunStore.discard(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_reader_cannot_write(folder: Path) -> None:
    found = reader(folder)
    writes: list[Callable[[], None]] = [
        lambda: found.append_round({"round": 1}),
        lambda: found.append_clients([]),
        lambda: found.save_checkpoint(1, {}, {}),
        lambda: found.truncate_after(1),
        lambda: found.finish({}),
        lambda: found.mark("failed"),
    ]
    for write in writes:
        with pytest.raises(RunError, match="only for reading"):
            write()


@pytest.mark.parametrize(
    ("error", "finished", "status"),
    [
        (ZeroDivisionError("sum of nothing"), False, "failed"),
        (KeyboardInterrupt(), False, "interrupted"),
        (ZeroDivisionError("in a plot"), True, "finished"),
    ],
)
def test_status_follows_what_happens(
    tmp_path: Path, error: BaseException, finished: bool, status: str
) -> None:
    def run() -> None:
        with RunStore.create(tmp_path, {}) as store:
            if finished:
                store.finish({})
            raise error

    with pytest.raises(type(error)):
        run()
    assert reader(tmp_path).status == status
    assert finished or str(error) in (tmp_path / "status.json").read_text()
    with RunStore.open(tmp_path) as store:
        assert str(store.status) == status  # opening alone changes nothing
        store.append_round({"round": 1})
        assert str(store.status) == "running"
    assert reader(tmp_path).status == "interrupted"  # neither finished nor running


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run folder"):
        RunStore.open(tmp_path / "absent")
    with RunStore.create(tmp_path / "run", {}) as store:
        with pytest.raises(ValueError, match="integer 'round'"):
            store.append_round({"loss": 1.0})
        with pytest.raises(ValueError, match="status 'done'"):
            store.mark("done")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="cannot store a set"):
            store.append_clients([{"round": 1}, {"round": 1, "x": {1}}])
        assert store.clients().empty  # all records of a call or none


# -- waiting for the disk: once for fast rounds together, always before a checkpoint and at the end ------------

RECORDS = {"rounds.jsonl", "clients.jsonl"}


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the disk was waited for, in order: the names of record files, and `checkpoint`."""
    told: list[str] = []
    wait, save = store.sync, checkpoints.save

    def spied_wait(path: Path) -> None:
        told.append(path.name)
        wait(path)

    def spied_save(*arguments: Any) -> None:
        told.append("checkpoint")
        save(*arguments)

    monkeypatch.setattr(store, "sync", spied_wait)
    monkeypatch.setattr(checkpoints, "save", spied_save)
    return told


def append(run: RunStore, *rounds: int) -> None:
    for round in rounds:
        run.append_clients([{"round": round, "client": 0}])
        run.append_round({"round": round})


def test_fast_rounds_wait_together_and_slow_ones_each(
    tmp_path: Path, waited: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(store.time, "monotonic", lambda: now)
    with RunStore.create(tmp_path, {}) as run:
        append(run, 1)
        assert set(waited) == RECORDS
        append(run, 2, 3)
        assert len(waited) == 2
        assert run.clients()["round"].tolist() == [1, 2, 3]  # they are in the file all the same
        for round, times in ((4, 4), (5, 6)):
            now += store.SYNC_SECONDS
            append(run, round)
            assert len(waited) == times


def test_records_are_on_the_disk_before_a_checkpoint_and_at_the_end(
    tmp_path: Path, waited: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.time, "monotonic", lambda: 100.0)
    with RunStore.create(tmp_path / "run", {}) as run:
        append(run, 1)
        waited.clear()
        append(run, 2)
        run.save_checkpoint(2, {"w": torch.zeros(1)}, {})
        assert set(waited[:2]) == RECORDS
        assert waited[2:] == ["checkpoint"]
        waited.clear()
        append(run, 3)
        run.finish({})
        assert set(waited) == RECORDS
        append(run, 4)
        waited.clear()
    assert set(waited) == RECORDS
