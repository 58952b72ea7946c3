"""The state store is a dictionary of states, in memory or on disk, in blocks of memory that processes share."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tailorfl.engines import state
from tailorfl.engines.memory import ALIGNMENT, Block, aligned
from tailorfl.engines.state import StateStore
from tailorfl.errors import RunError, TailorflError
from tailorfl.training import tree


def start_state() -> TensorDict:
    """Nested, with a scalar, a counter and an empty part."""
    inner = TensorDict(
        {"fc.weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(7)}, batch_size=[]
    )
    return TensorDict({"v": inner, "alpha": torch.tensor(0.5)}, batch_size=[])


def states_of(ids: list[int], round: int = 0) -> TensorDict:
    """Different states for every client and round, [clients, ...]."""
    mark = torch.tensor([100.0 * i + round for i in ids])
    inner = TensorDict(
        {"fc.weight": mark[:, None, None].expand(-1, 2, 3).clone(), "count": mark.long()},
        batch_size=[len(ids)],
    )
    return TensorDict({"v": inner, "alpha": mark + 0.25}, batch_size=[len(ids)])


def equal(a: TensorDict, b: TensorDict) -> bool:
    left, right = dict(tree.leaves(a)), dict(tree.leaves(b))
    return left.keys() == right.keys() and all(
        torch.equal(t, right[p]) and t.dtype == right[p].dtype for p, t in left.items()
    )


@pytest.fixture(params=["memory", "mapped"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "states"


def test_writing_to_what_was_got_or_put_does_not_reach_the_store(folder):
    start = start_state()
    store = StateStore(start, folder)
    given = states_of([1])
    store.put([1], given)
    given["alpha"] += 1.0
    for ids in ([1], [8], [1, 8]):
        got = store.get(ids)
        got["alpha"] += 1.0
        got["v"]["fc.weight"].zero_()
    assert equal(store.get([1])[0], states_of([1])[0])
    assert equal(store.get([8])[0], start_state())
    assert equal(start, start_state())


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True), max_size=8), st.booleans())
def test_the_store_is_a_dictionary(tmp_path_factory, rounds, given_back):
    """Also where memory is given back at once."""
    memory = StateStore(start_state())
    mapped = StateStore(start_state(), tmp_path_factory.mktemp("store"))
    truth: dict[int, TensorDict] = {}
    with pytest.MonkeyPatch.context() as patch:
        if given_back:
            patch.setattr(state, "RESIDENT_BYTES", 0)
        for number, ids in enumerate(rounds):
            for store in (memory, mapped):
                store.put(ids, states_of(ids, number))
            truth.update({i: states_of([i], number)[0] for i in ids})
        everyone = list(range(31))
        for store in (memory, mapped):
            got = store.get(everyone)
            assert all(equal(got[i], truth.get(i, start_state())) for i in everyone)
            assert store.clients == tuple(sorted(truth))


def test_a_dump_loads_into_any_kind_of_store(folder, tmp_path):
    store = StateStore(start_state(), folder)
    for round in range(3):
        store.put([9, 1 + round], states_of([9, 1 + round], round))
    saved = {p: t.clone() for p, t in store.dump().items()}
    assert {len(t) for t in saved.values()} == {4}
    for target in (None, tmp_path / "other"):
        again = StateStore(start_state(), target)
        again.put([77], states_of([77]))
        again.load(saved)
        ids = [1, 2, 3, 9, 77]
        assert equal(again.get(ids), store.get(ids))
        assert again.clients == (1, 2, 3, 9)
        again.put([50], states_of([50]))
        assert equal(again.get([50, 9])[1], store.get([9])[0])


def test_methods_without_private_state_store_nothing(folder):
    store = StateStore(tree.empty(), folder)
    nothing = TensorDict({}, batch_size=[2])
    store.put([1, 2], nothing)
    assert store.get([1, 2]).batch_size == torch.Size([2])
    assert len(store) == 0
    store.load(store.dump())


def test_mapped_states_lie_in_the_folder_and_not_in_memory(tmp_path):
    start = TensorDict({"w": torch.zeros(1000)}, batch_size=[])
    store = StateStore(start, tmp_path / "states")
    store.put([0], TensorDict({"w": torch.ones(1, 1000)}, batch_size=[1]))
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "states") in mapped
    # The file has no name any more, so a crash leaves nothing behind; its bytes are freed with the store.
    assert list((tmp_path / "states").iterdir()) == []
    assert store.get([0])["w"].sum() == 1000.0


def test_a_state_with_other_entries_is_refused(folder):
    store = StateStore(TensorDict({"v": torch.zeros(2)}, batch_size=[]), folder)
    with pytest.raises(TailorflError, match=r"client_state\(\): u, v"):
        store.put([0], TensorDict({"u": torch.zeros(1, 2)}, batch_size=[1]))


def test_what_is_staged_counts_from_the_commit_on(folder):
    store = StateStore(start_state(), folder)
    store.put([1, 2], states_of([1, 2]))
    store.stage([2, 3, 4], states_of([2, 3, 4], round=1))
    assert equal(store.get([2])[0], states_of([2])[0])
    assert equal(store.get([3])[0], start_state())
    assert (store.clients, len(store)) == ((1, 2), 2)
    store.commit([2, 3])
    assert equal(store.get([1, 2, 3])[1], states_of([2], round=1)[0])
    assert equal(store.get([3, 4])[0], states_of([3], round=1)[0])
    assert equal(store.get([4])[0], start_state())
    assert store.clients == (1, 2, 3)


def test_a_rollback_leaves_no_trace_and_rows_are_used_again(folder):
    store = StateStore(start_state(), folder)
    store.put(list(range(8)), states_of(list(range(8))))
    for round in range(1, 20):
        store.stage([0, 1, 9], states_of([0, 1, 9], round))
        store.rollback()
        store.put([2, 3], states_of([2, 3], round))
    assert store.capacity == (11 if store.on_disk else 16)
    assert all(equal(store.get([i])[0], states_of([i], 19 if i in (2, 3) else 0)[0]) for i in range(8))
    assert store.clients == tuple(range(8))


def test_a_dump_does_not_depend_on_which_rows_are_in_use(folder):
    """Rows that were free in between, first or last; a dump holds states and nothing else."""
    store = StateStore(start_state(), folder)
    for round in range(5):
        store.put([0, 5, 7, 2][: round + 1], states_of([0, 5, 7, 2][: round + 1], round))
    store.forget([5])
    again = StateStore(start_state())
    again.load({p: t.clone() for p, t in store.dump().items()})
    assert again.clients == store.clients == (0, 2, 7)
    assert equal(again.get([7, 0, 2, 5]), store.get([7, 0, 2, 5]))
    store.put([0, 9], states_of([0, 9], 9))
    assert equal(store.get([9, 7]), TensorDict.cat([states_of([9], 9), states_of([7], 4)]))


def test_a_forked_process_reads_and_writes_the_rows_of_a_shared_store():
    store = StateStore(start_state())
    store.put([1, 2], states_of([1, 2]))
    store.share()
    child = os.fork()
    if not child:
        store.write(store.reserve([1]), states_of([1], round=3))
        os._exit(0 if equal(store.get([1])[0], states_of([1])[0]) else 1)
    rows = store.reserve([1])
    assert os.waitpid(child, 0)[1] == 0
    assert equal(store.get([1])[0], states_of([1])[0])
    store.commit([1])
    assert store.rows([1]) == rows
    assert equal(store.get([1])[0], states_of([1], round=3)[0])
    store.put([2, *range(10, 40)], states_of([2, *range(10, 40)], round=1))
    assert equal(store.get([2, 39]), states_of([2, 39], round=1))


def mapped_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssFile"].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from Linux's /proc")
def test_many_states_on_disk_take_a_bounded_part_of_memory(tmp_path: Path) -> None:
    start = TensorDict({"w": torch.zeros(2**16)}, batch_size=[])  # 256 KiB a client, 160 MiB in all
    store = StateStore(start, tmp_path)
    before, most = mapped_bytes(), 0
    for first in range(0, 640, 64):
        ids = range(first, first + 64)
        store.put(ids, store.get(ids) + 1.0)
        most = max(most, mapped_bytes() - before)
    assert len(store) == 640
    assert most < 2 * state.RESIDENT_BYTES
    assert float(store.get([639])["w"].sum()) == 2**16


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


def test_aligned_offsets_are_the_next_multiples() -> None:
    assert [aligned(k) for k in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [0, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]


def taken(block: Block) -> int:
    """Bytes of the disk that the block's file has, whatever its length."""
    return 512 * os.fstat(block._file.fileno()).st_blocks


def refusing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the system refuse to reserve bytes of a disk."""

    def refuse(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)


@pytest.mark.parametrize("supported", [True, False])
def test_bytes_on_a_disk_are_taken_when_they_are_reserved(
    supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not supported:
        refusing(monkeypatch, errno.EOPNOTSUPP)
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
    with pytest.raises(RunError, match=r"\(983,040 more bytes are needed .* 32,768\)"):
        block.reserve(2**15 + 983_040)
    assert os.fstat(block._file.fileno()).st_size == 2**15
    assert int(block.tensor(torch.uint8, (2**15,)).sum()) == 3 * 2**15


def test_a_disk_without_space_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, errno.ENOSPC)
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
    assert Block().tensor(torch.float32, (0, 3)).shape == (0, 3)  # which needs no block
