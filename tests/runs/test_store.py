"""RunStore in one process: records, resuming, refusals, results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from tailorfl.errors import RunError
from tailorfl.runs.store import RunStore


def write_rounds(store: RunStore, *rounds: int) -> None:
    for round in rounds:
        store.append_round({"round": round, "loss": 1 / (round + 3)})
        store.append_clients(
            [{"round": round, "client": client, "accuracy": client / 7} for client in range(3)]
        )
        store.save_checkpoint(round, {"w": torch.tensor([float(round)])}, {"seed": 1})


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name not in (".lock", "status.json") and path.suffix != ".parquet"
    }


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    with RunStore.create(tmp_path / "new" / "run", {"method": "ditto", "epsilon": math.inf}) as store:
        assert str(store.status) == "running"
        write_rounds(store, 1, 2)
        assert len(store.rounds()) == 2
        assert store.summary is None
        store.finish({"accuracy": np.float32(0.5), "auc": math.nan})
        assert str(store.status) == "finished"
    found = RunStore.open(tmp_path / "new" / "run", readonly=True)
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
    assert frame["a"][0] == 0.1 + 0.2
    assert math.isnan(frame["b"][0])
    assert frame["c"][0] == math.inf
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
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_truncating_drops_checkpoints_and_results_too(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, {}) as store:
        write_rounds(store, 1, 2, 3)
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
def test_a_file_cut_anywhere_loses_only_the_cut_line(tmp_path: Path, name: str) -> None:
    with RunStore.create(tmp_path, {}) as store:
        write_rounds(store, 1, 2)
    whole = (tmp_path / name).read_bytes()
    for size in range(len(whole)):
        (tmp_path / name).write_bytes(whole[:size])
        complete = whole[:size].count(b"\n")
        reader = RunStore.open(tmp_path, readonly=True)
        assert len(reader.rounds() if name == "rounds.jsonl" else reader.clients()) == complete
        assert (tmp_path / name).stat().st_size == size  # a reader repairs nothing
    with RunStore.open(tmp_path) as store:
        write_rounds(store, 3)
    for line in (tmp_path / name).read_bytes().splitlines():
        json.loads(line)


def test_damage_inside_a_file_is_told(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, {}) as store:
        write_rounds(store, 1, 2)
    lines = (tmp_path / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "rounds.jsonl").write_bytes(lines[0][:9] + b"\n" + lines[1])
    with pytest.raises(RunError, match=r"line 1 of .*rounds\.jsonl' is damaged"):
        RunStore.open(tmp_path, readonly=True).rounds()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config\.json' is damaged"):
        _ = RunStore.open(tmp_path, readonly=True).config


def test_create_refuses_a_folder_in_use(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, {"a": 1}) as store:
        write_rounds(store, 1)
    before = contents(tmp_path)
    with pytest.raises(RunError, match=r"already holds a run.*--resume.*another name"):
        RunStore.create(tmp_path, {"a": 2})
    assert contents(tmp_path) == before
    with RunStore.create(tmp_path, {"a": 2}, overwrite=True) as store:
        assert store.config == {"a": 2}
        assert store.rounds().empty
        assert store.latest_checkpoint() is None


@pytest.mark.parametrize("overwrite", [False, True])
def test_create_never_empties_a_folder_that_is_no_run(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match=r"not a run \(thesis.tex"):
        RunStore.create(tmp_path, {}, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_overwriting_leaves_other_files_alone(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, {}) as store:
        write_rounds(store, 1)
    (tmp_path / "notes.txt").write_text("mine")
    RunStore.create(tmp_path, {}, overwrite=True).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


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


def test_opening_to_write_removes_temporary_files(tmp_path: Path) -> None:
    RunStore.create(tmp_path, {}).close()
    part = tmp_path / ".rounds.parquet.77.part"
    part.write_text("half")
    RunStore.open(tmp_path, readonly=True).close()
    assert part.exists()
    RunStore.open(tmp_path).close()
    assert not part.exists()


def test_reader_cannot_write(tmp_path: Path) -> None:
    RunStore.create(tmp_path, {}).close()
    reader = RunStore.open(tmp_path, readonly=True)
    writes: list[Callable[[], None]] = [
        lambda: reader.append_round({"round": 1}),
        lambda: reader.append_clients([]),
        lambda: reader.save_checkpoint(1, {}, {}),
        lambda: reader.truncate_after(1),
        lambda: reader.finish({}),
        lambda: reader.mark("failed"),
    ]
    for write in writes:
        with pytest.raises(RunError, match="reading only"):
            write()


def test_status_follows_what_happens(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunStore.create(tmp_path / "a", {}):
        raise ZeroDivisionError("sum of nothing")
    assert RunStore.open(tmp_path / "a", readonly=True).status == "failed"
    assert "sum of nothing" in (tmp_path / "a" / "status.json").read_text()
    with RunStore.open(tmp_path / "a") as store:
        assert str(store.status) == "failed"  # opening alone changes nothing
        store.append_round({"round": 1})
        assert str(store.status) == "running"
    assert (
        RunStore.open(tmp_path / "a", readonly=True).status == "interrupted"
    )  # neither finished nor running
    with pytest.raises(KeyboardInterrupt), RunStore.create(tmp_path / "b", {}):
        raise KeyboardInterrupt
    assert RunStore.open(tmp_path / "b", readonly=True).status == "interrupted"


def test_finished_run_stays_finished_when_later_code_fails(tmp_path: Path) -> None:
    def run() -> None:
        with RunStore.create(tmp_path, {}) as store:
            store.finish({})
            raise ZeroDivisionError("in a plot")

    with pytest.raises(ZeroDivisionError):
        run()
    assert RunStore.open(tmp_path, readonly=True).status == "finished"


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run folder"):
        RunStore.open(tmp_path / "absent")
    with RunStore.create(tmp_path / "run", {}) as store:
        with pytest.raises(ValueError, match="integer 'round'"):
            store.append_round({"loss": 1.0})
        with pytest.raises(ValueError, match="status is one of"):
            store.mark("done")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="cannot store a set"):
            store.append_clients([{"round": 1}, {"round": 1, "x": {1}}])
        assert store.clients().empty  # all records of a call or none


def test_discard_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    with RunStore.create(tmp_path / "run", {}) as store:
        store.append_round({"round": 1})
        with pytest.raises(RunError, match="is writing"):
            RunStore.discard(tmp_path / "run")
    RunStore.discard(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    RunStore.create(tmp_path / "run", {}).close()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    RunStore.discard(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]
