"""The state store: a dictionary of states whose unwritten entries are all the shared start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tailorfl.engines.state import StateStore
from tailorfl.errors import TailorflError
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
@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True), max_size=8))
def test_the_store_is_a_dictionary(tmp_path_factory, rounds):
    memory = StateStore(start_state())
    mapped = StateStore(start_state(), tmp_path_factory.mktemp("store"))
    truth: dict[int, TensorDict] = {}
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
    with pytest.raises(
        TailorflError, match=r"other entries than client_state\(\): u, v; return the same names"
    ):
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


def test_a_shared_store_is_the_same_store():
    store = StateStore(start_state())
    store.put([1, 2], states_of([1, 2]))
    store.share()
    store.put([2, *range(10, 40)], states_of([2, *range(10, 40)], round=1))
    assert equal(store.get([1])[0], states_of([1])[0])
    assert equal(store.get([2, 39]), states_of([2, 39], round=1))


def test_a_forked_process_reads_and_writes_the_rows_of_a_shared_store():
    import os

    store = StateStore(start_state())
    store.share()
    store.put([1], states_of([1]))
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
