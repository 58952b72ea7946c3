"""When records are on the disk: once for fast rounds together, always before a checkpoint and at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tailorfl.runs import checkpoints, store
from tailorfl.runs.store import RunStore

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


def append(run: RunStore, round: int) -> None:
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
        append(run, 2)
        append(run, 3)
        assert len(waited) == 2
        assert run.clients()["round"].tolist() == [1, 2, 3]  # they are in the file all the same
        now += store.SYNC_SECONDS
        append(run, 4)
        assert len(waited) == 4
        now += store.SYNC_SECONDS
        append(run, 5)
        assert len(waited) == 6


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
