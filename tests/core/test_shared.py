"""Blocks of memory that processes share: in memory or in a file that nobody else can open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tailorfl.core.shared import ALIGNMENT, Block, aligned


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
