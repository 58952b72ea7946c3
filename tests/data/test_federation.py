"""The Federation object: sizes, tables and the union of test sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.errors import DataError


def rows(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def source() -> Source:
    return Source("tiny", torch.arange(12.0).view(12, 1), torch.arange(12) % 3, "classification", 3)


def tiny() -> Federation:
    return Federation(
        source=source(),
        train=(rows(0, 3, 1), rows(4), rows(8, 9)),
        val=(rows(2), rows(), rows()),
        test=(rows(7, 5), rows(6), rows(10)),
        names=("a", "b", "late"),
        num_clients=2,
    )


def test_sizes_are_those_of_all_clients() -> None:
    assert tiny().sizes().tolist() == [3, 1, 2]
    assert tiny().sizes("val").tolist() == [1, 0, 0]
    assert tiny().sizes("test").tolist() == [2, 1, 1]
    assert len(tiny()) == 3


def test_global_test_is_the_sorted_union_without_held_out_clients() -> None:
    assert tiny().global_test().tolist() == [5, 6, 7]


def test_global_test_of_a_shared_test_set_holds_each_row_once() -> None:
    shared = rows(9, 10)
    federation = Federation(
        source(), (rows(0), rows(1)), (rows(), rows()), (shared, shared), ("a", "b"), num_clients=2
    )
    assert federation.global_test().tolist() == [9, 10]
    assert federation.describe("test").tolist() == [[1, 1, 0], [1, 1, 0]]


def test_describe_counts_classes_by_client() -> None:
    assert tiny().describe().tolist() == [[2, 1, 0], [0, 1, 0], [1, 0, 1]]


def test_summary_has_a_row_per_client() -> None:
    first, _, last = tiny().summary()
    assert first == {
        "client": 0,
        "name": "a",
        "role": "train",
        "train": 3,
        "val": 1,
        "test": 2,
        "classes": 2,
        "largest_class": pytest.approx(2 / 3),
    }
    assert last["role"] == "held out"


def test_lists_must_fit_together() -> None:
    with pytest.raises(DataError, match="one train, val and test list and one name per client"):
        Federation(source(), (rows(0),), (), (rows(1),), ("a",), num_clients=1)
    with pytest.raises(DataError, match="num_clients=2"):
        Federation(source(), (rows(0),), (rows(),), (rows(1),), ("a",), num_clients=2)
