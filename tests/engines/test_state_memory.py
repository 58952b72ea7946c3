"""States on disk do not pile up in memory, and giving memory back changes none of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tailorfl.engines import state
from tailorfl.engines.state import StateStore


def start(scalars: int) -> TensorDict:
    return TensorDict({"w": torch.zeros(scalars), "b": torch.zeros(2, 3)}, batch_size=[])


def test_states_are_the_same_when_their_memory_is_given_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "RESIDENT_BYTES", 0)
    held, mapped = StateStore(start(500)), StateStore(start(500), tmp_path)
    rng = torch.Generator().manual_seed(0)
    for ids in ([3, 1], [2, 9, 1], list(range(30)), [4]):
        states = held.get(ids)
        assert bool((states == mapped.get(ids)).all())
        states = states + float(torch.randn((), generator=rng))
        held.put(ids, states)
        mapped.put(ids, states)
    again = StateStore(start(500), tmp_path)
    again.load(mapped.dump())
    for store in (mapped, again):
        assert store.clients == held.clients
        assert bool((store.get(range(40)) == held.get(range(40))).all())


def mapped_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssFile"].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from Linux's /proc")
def test_many_states_on_disk_take_a_bounded_part_of_memory(tmp_path: Path) -> None:
    store = StateStore(start(2**16), tmp_path)  # 256 KiB a client, 160 MiB in all
    before, most = mapped_bytes(), 0
    for first in range(0, 640, 64):
        ids = range(first, first + 64)
        store.put(ids, store.get(ids) + 1.0)
        most = max(most, mapped_bytes() - before)
    assert len(store) == 640
    assert most < 2 * state.RESIDENT_BYTES
    assert float(store.get([639])["w"].sum()) == 2**16
