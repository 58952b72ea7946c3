"""Blocks of memory that processes share: in memory or in a file that nobody else can open."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tailorfl.engines.shared_memory import ALIGNMENT, Block, aligned
from tailorfl.engines.state import StateStore
from tailorfl.errors import RunError


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_written_is_read_by_all_and_stays_where_it_is_when_the_block_grows(
    on_disk: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "states" / "of clients" if on_disk else None
    block = Block(folder)
    block.reserve(16)
    first = block.tensor(torch.float32, (2, 2))
    first.copy_(torch.arange(4.0).reshape(2, 2))
    assert torch.equal(block.tensor(torch.float32, (2,), offset=8), torch.tensor([2.0, 3.0]))
    block.reserve(64)
    block.reserve(32)  # never smaller
    far = block.tensor(torch.int64, (2,), offset=48)
    far.fill_(7)
    assert torch.equal(block.tensor(torch.float32, (2, 2)), torch.arange(4.0).reshape(2, 2))
    first[0, 0] = 9.0
    assert block.tensor(torch.float32, (1,)).item() == 9.0
    block.release()
    assert block.tensor(torch.float32, (4,)).tolist() == [9.0, 1.0, 2.0, 3.0]
    assert block.tensor(torch.int64, (2,), offset=48).tolist() == [7, 7]
    if folder is not None:
        assert os.listdir(folder) == []  # it has no name
        Block(folder)  # a second one, where the folder exists


def test_an_empty_tensor_needs_no_block() -> None:
    assert Block().tensor(torch.float32, (0, 3)).shape == (0, 3)


def test_aligned_offsets_are_the_next_multiples() -> None:
    assert [aligned(k) for k in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [0, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]


def taken(block: Block) -> int:
    """Bytes of the disk that the block's file has, whatever its length."""
    return 512 * os.fstat(block._file.fileno()).st_blocks


@pytest.mark.parametrize("supported", [True, False])
def test_bytes_on_a_disk_are_taken_when_they_are_reserved(
    supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not supported:

        def refuse(*_: int) -> None:
            raise OSError(errno.EOPNOTSUPP, "not supported")

        monkeypatch.setattr(os, "posix_fallocate", refuse)
    block = Block(tmp_path)
    for size in (1000, 3 * 2**20 + 5):
        block.reserve(size)
        assert os.fstat(block._file.fileno()).st_size == size
        assert taken(block) >= size
        first = block.tensor(torch.uint8, (size,))
        assert int(first.sum()) == 7 * (size > 1000)
        first[0] = 7


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may be longer than 64 KiB, as on a disk that has no more place."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_and_not_written_to(tmp_path: Path, small_files: None) -> None:
    block = Block(tmp_path)
    block.reserve(2**15)
    block.tensor(torch.uint8, (2**15,)).fill_(3)
    with pytest.raises(RunError, match=r"\(983,040 more bytes are needed beside 32,768\)"):
        block.reserve(2**15 + 983_040)
    assert os.fstat(block._file.fileno()).st_size == 2**15
    assert int(block.tensor(torch.uint8, (2**15,)).sum()) == 3 * 2**15


def test_a_disk_without_space_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    store = StateStore(TensorDict({"w": torch.zeros(1000)}, batch_size=[]), tmp_path)
    with pytest.raises(RunError, match=r"No space left on device .*free some space .*engine\.states=memory"):
        store.put([0], store.get([0]))
    assert store.clients == ()


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in Linux's /proc")
def test_states_take_one_open_file_whatever_their_number_of_tensors(tmp_path: Path) -> None:
    start = TensorDict({f"w{k}": torch.full((k % 5,), float(k)) for k in range(500)}, batch_size=[])
    before = len(os.listdir("/proc/self/fd"))
    mapped, shared = StateStore(start, tmp_path), StateStore(start)
    shared.share()
    for store in (mapped, shared):
        for ids in ([3, 1], range(40)):
            store.put(ids, store.get(ids) + 1.0)
        found = store.get([1, 5, 99])
        assert all(found[f"w{k}"].tolist() == [[k + n] * (k % 5) for n in (2, 1, 0)] for k in range(500))
    # A mapping keeps a file of its own beside the block's, of the present mapping and the one before.
    assert len(os.listdir("/proc/self/fd")) - before <= 6


def test_rows_lie_side_by_side_and_start_where_torch_aligns() -> None:
    block = Block()
    block.reserve(3 * 128)
    first, second = (block.rows(torch.float32, (3, *shape), at, 128) for shape, at in (((2, 2), 0), ((), 64)))
    first.copy_(torch.arange(12.0).reshape(3, 2, 2))
    second.copy_(torch.tensor([7.0, 8.0, 9.0]))
    flat = block.tensor(torch.float32, (3, 32))
    assert flat[:, :4].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert flat[:, 16].tolist() == [7, 8, 9]
    assert block.rows(torch.float32, (3, 0), 0, 128).shape == (3, 0)
