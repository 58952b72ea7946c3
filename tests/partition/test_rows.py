"""Rows of many clients in one array: the same as a tuple of arrays wherever one may be given."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation, weaknesses
from tailorfl.data.scaling import standardised
from tailorfl.data.source import Source
from tailorfl.engines.choice import make_engine
from tailorfl.errors import DataError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.partition.rows import Rows
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

Ints = NDArray[np.int64]


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def arrays() -> tuple[Ints, ...]:
    return ints(3, 1), ints(), ints(7, 8, 9), ints(5)


def same(rows: Rows, wanted: tuple[Ints, ...]) -> None:
    assert len(rows) == len(wanted)
    assert [r.tolist() for r in rows] == [w.tolist() for w in wanted]
    assert [rows[i].tolist() for i in range(len(rows))] == [w.tolist() for w in wanted]
    assert rows.sizes.tolist() == [len(w) for w in wanted]
    assert rows.flat().tolist() == [r for w in wanted for r in w.tolist()]
    assert rows.owners().tolist() == [i for i, w in enumerate(wanted) for _ in w]
    assert all(r.dtype == np.int64 for r in rows)


def test_rows_hold_what_the_tuple_holds() -> None:
    rows = Rows.of(arrays())
    same(rows, arrays())
    same(Rows.cut(ints(3, 1, 7, 8, 9, 5), ints(2, 0, 3, 1)), arrays())
    same(Rows.of(()), ())
    same(Rows.of((np.array([2, 1], dtype=np.int32), np.array([]))), (ints(2, 1), ints()))
    assert Rows.of(rows) is rows
    once, which = rows.once()  # arrays that never overlap are all different
    assert once is rows
    assert which.tolist() == [0, 1, 2, 3]
    with pytest.raises(IndexError):
        rows[4]


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 50), max_size=4), max_size=6), st.lists(st.integers(0, 5), max_size=8)
)
def test_clients_in_any_order_and_slices_are_of_the_tuple(lists: list[list[int]], order: list[int]) -> None:
    wanted = tuple(ints(*values) for values in lists)
    rows = Rows.of(wanted)
    order = [i for i in order if i < len(wanted)]
    same(rows.of_clients(ints(*order)), tuple(wanted[i] for i in order))
    same(rows[1:3], wanted[1:3])
    same(rows[:-1], wanted[:-1])
    same(rows.with_client(ints(4, 2)), (*wanted, ints(4, 2)))
    names = np.arange(51)[::-1].copy()
    same(rows.of_clients(ints(*order)).named_by(names), tuple(names[wanted[i]] for i in order))
    same(pickle.loads(pickle.dumps(rows)), wanted)


def test_an_array_that_clients_share_is_held_once() -> None:
    test = ints(4, 6)
    for rows in (Rows.of((test, ints(1), test)), Rows(ints(4, 6, 1), ints(0, 2, 0), ints(2, 3, 2))):
        assert len(rows.values) == 3
        once, which = rows.once()
        assert [r.tolist() for r in once] == [[4, 6], [1]]
        assert which.tolist() == [0, 1, 0]
    shared = Rows.shared(test, 3)
    same(shared, (test, test, test))
    assert len(shared.once()[0]) == 1
    # Equal arrays that are not the same one are a mistake that the checks of a federation must still see.
    assert len(Rows.of((test, test.copy())).once()[0]) == 2


@pytest.mark.parametrize("wrong", [np.array([0.5]), np.array([True, False]), np.array([[1], [2]])])
def test_rows_are_whole_numbers(wrong: NDArray[Any]) -> None:
    with pytest.raises(DataError, match="list of whole numbers"):
        Rows.of((ints(1), wrong))


def federation(convert: Any) -> Federation:
    """Four clients, the last of them held out, whose rows go through `convert` first."""
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    source = Source("tiny", x, torch.arange(24) % 3, "classification", 3)
    return Federation(
        source,
        convert((ints(3, 0, 8), ints(4), ints(9, 1), ints(13, 12))),
        convert((ints(2), ints(), ints(5, 6), ints())),
        convert((ints(7), ints(10, 11), ints(17), ints(14, 15, 16))),
        tuple("abcd"),
        num_clients=3,
        server=ints(20, 21),
    )


def scattered(rows: tuple[Ints, ...]) -> Rows:
    """The same rows, lying in another order with others between them."""
    backwards = Rows.of((ints(99, 99), *rows[::-1], ints(99)))
    return backwards.of_clients(np.arange(len(rows), 0, -1))


@pytest.mark.parametrize("convert", [Rows.of, scattered, list])
def test_a_federation_of_rows_is_one_of_tuples(convert: Any) -> None:
    one, two = federation(tuple), federation(convert)
    for part in ("train", "val", "test"):
        same(two.part(part), tuple(one.part(part)))
        assert two.sizes(part).tolist() == one.sizes(part).tolist()
        assert np.array_equal(two.describe(part), one.describe(part))
    assert two.global_test().tolist() == one.global_test().tolist() == [7, 10, 11, 17]
    assert weaknesses(two) == weaknesses(one)
    assert torch.equal(standardised(two, "client").source.x, standardised(one, "client").source.x)


@pytest.mark.parametrize("name", ["ditto", "fedavg", "centralized"])
def test_training_and_evaluation_are_the_same_to_the_bit(name: str) -> None:
    records = []
    for data in (federation(tuple), federation(scattered)):
        model = Model(lambda data=data: build("logistic", data.source.input_shape, data.source.outputs))
        train, engine = TrainConfig(batch_size=2, lr=0.1), make_engine("vectorized")
        sampling: dict[str, Any] = {"fraction": 0.7, "sampling": "proportional"}
        sim = Simulation(make_method(name), data, model, train, engine=engine, **sampling)
        results = [sim.step() for _ in range(3)]
        assert all(type(i) is int for r in results for i in r.clients)
        found = evaluate(sim, Protocol(("val", "local", "global", "heldout")))
        records.append(([(r.clients, r.losses) for r in results], [str(r) for r in found]))
    assert records[0] == records[1]
