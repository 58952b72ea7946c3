"""Memory of large tensors that is used again, and cohorts that are cut into parts alike."""

from __future__ import annotations

import pickle

import pytest
import torch

from tailorfl.engines import memory
from tailorfl.engines.in_process import evenly
from tailorfl.engines.memory import Room
from tailorfl.engines.results import Stacked


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LARGEST_MMAP_THRESHOLD", 1000)


def test_memory_is_used_again_when_its_last_tensor_is_gone():
    room = Room()
    first = room.empty((100, 20), torch.float32)
    place, part = first.data_ptr(), first[50:].transpose(0, 1)
    del first
    part.fill_(3.0)
    other = room.empty((100, 20), torch.float32).fill_(1.0)
    assert other.data_ptr() != place  # a part of the first one still lies there
    assert torch.equal(part, torch.full((20, 50), 3.0))
    del part
    again = room.empty((2000,), torch.int32)
    assert (again.data_ptr(), again.dtype, again.shape) == (place, torch.int32, (2000,))


def test_memory_that_does_not_fit_is_given_back():
    room = Room()
    del_me = room.empty((400,), torch.float64)
    del del_me
    assert len(room._free) == 1
    small = room.empty((5,), torch.float64)
    assert len(room._free) == 1  # small tensors are none of its business
    large = room.empty((500,), torch.float64)
    assert not room._free
    assert (len(small), len(large)) == (5, 500)


def test_tensors_outlive_their_room():
    room = Room()
    kept = room.empty((3000,), torch.float32).fill_(2.0)
    del room
    assert float(kept.sum()) == 6000.0


def test_a_room_that_is_sent_is_empty():
    room = Room()
    used = room.empty((3000,), torch.float32)
    del used
    assert len(room._free) == 1
    assert not pickle.loads(pickle.dumps(room))._free


def test_results_of_a_round_are_not_those_of_the_next():
    room, kept = Room(), []
    for turn in range(3):
        out = Stacked(400, room, AssertionError)
        for start in (0, 200):
            out.put(torch.arange(start, start + 200), [{"w": torch.full((200, 7), float(turn))}])
        kept.append(out.parts()[0]["w"][:100])
    assert [float(t.mean()) for t in kept] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("clients", "most", "sizes"),
    [(100, 9, [9] * 4 + [8] * 8), (5, 9, [5]), (9, 8, [5, 4]), (3, 1, [1, 1, 1])],
)
def test_parts_are_alike(clients, most, sizes):
    found, left = [], clients
    while left:
        found.append(evenly(left, most))
        left -= found[-1]
    assert found == sizes
