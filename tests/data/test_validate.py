"""What `validate` refuses and what it warns about; sizes, tables and test sets of a federation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tailorfl.data.federation import PARTS, Federation, validate, weaknesses
from tailorfl.data.remote_federation import remote_federation, remote_source, source_facts
from tailorfl.data.source import Source
from tailorfl.errors import DataError
from tailorfl.evaluation.leading import dominated

Ints = NDArray[np.int64]


def rows(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def healthy() -> Federation:
    """Three clients of both classes in every part, the last held out; rows 18 and 19 belong to nobody."""
    starts = (0, 6, 12)
    return Federation(
        source=Source("tiny", torch.zeros(20, 2), torch.arange(20) % 2, "classification", 2),
        train=tuple(np.arange(start, start + 2) for start in starts),
        val=tuple(np.arange(start + 2, start + 4) for start in starts),
        test=tuple(np.arange(start + 4, start + 6) for start in starts),
        names=("anna", "ben", "late"),
        num_clients=2,
    )


def test_sizes_and_counts_are_those_of_all_clients() -> None:
    uneven = replace(healthy(), train=(rows(0, 18, 1), rows(6), rows(12, 13)), val=(rows(2), rows(), rows()))
    assert (len(uneven), uneven.sizes().tolist(), uneven.sizes("val").tolist()) == (3, [3, 1, 2], [1, 0, 0])
    assert uneven.describe().tolist() == [[2, 1], [1, 0], [1, 1]]


def test_the_global_test_set_is_the_sorted_union_without_held_out_clients() -> None:
    assert healthy().global_test().tolist() == [4, 5, 10, 11]
    shared = replace(healthy(), test=(rows(19, 18),) * 3)
    assert shared.global_test().tolist() == [18, 19]
    assert shared.describe("test").tolist() == [[1, 1]] * 3
    validate(shared)
    assert weaknesses(shared) == weaknesses(healthy()) == []


@pytest.mark.parametrize("change", [{"val": ()}, {"num_clients": 4}, {"num_clients": 0}, {"names": ("a",)}])
def test_lists_must_fit_together(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="num_clients="):
        replace(healthy(), **change)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("row", "holder"), [(7, "client 'ben'"), (18, "the server")])
def test_not_finite_features_are_named(value: float, row: int, holder: str) -> None:
    """Sample 19 is nobody's, and ignored."""
    federation = replace(healthy(), server=rows(18))
    federation.source.x[19] = value
    validate(federation)
    federation.source.x[row, 1] = value
    with pytest.raises(DataError, match=rf"1 samples .* features of sample {row} of {holder}"):
        validate(federation)


def target_of(value: float) -> Source:
    """A source whose sample 13 has this target."""
    return Source(
        "tiny", torch.zeros(20, 2), torch.tensor([[0.0]] * 13 + [[value]] + [[0.0]] * 6), "regression", 1
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source": target_of(float("nan"))}, "target of sample 13 of client 'late'"),
        ({"train": (rows(), rows(6), rows())}, "2 clients .* 'anna', 'late'"),
        ({"test": (rows(0, 4), rows(10), rows(16))}, "row 0 .* test part .*'anna' .* train part"),
        ({"test": (rows(16, 17), rows(17, 18), rows(19))}, "row 17 is in the test part"),
        ({"train": (rows(0, 1), rows(1, 6), rows(12))}, "row 1 .* train part .* 'anna', 'ben'"),
        ({"server": rows(2)}, "row 2 .* server's .* 'anna'"),
        ({"test": (rows(4), rows(20), rows(16))}, r"test rows .* 0\.\.19.* 'ben' has row 20"),
    ],
)
def test_rows_that_are_none_or_used_twice(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        validate(replace(healthy(), **change))


def test_two_clients_may_have_one_test_row_where_it_is_official() -> None:
    data = replace(healthy(), test=(rows(16, 17), rows(17, 18), rows(19)))
    validate(replace(data, source=replace(data.source, test=torch.arange(20) >= 16)))


def test_samples_of_a_server_say_nothing_of_its_clients() -> None:
    samples = Source("server", torch.ones(9, 2), torch.zeros(9, dtype=torch.int64), "classification", 2)
    data, sizes = remote_source(source_facts(healthy().source)), dict.fromkeys(PARTS, (2, 3))
    federation = remote_federation(data, ("anna", "ben"), sizes, server=samples)
    assert (federation.source.name, federation.sizes().tolist()) == ("tiny", [2, 3])
    assert torch.equal(federation.source.x[federation.server], samples.x)
    assert "100%" in dominated(samples)
    assert dominated(federation.source) == ""


GUESSABLE, OF_ONE_CLASS = "only one class, so", "training samples of only one class"


@pytest.mark.parametrize(
    ("change", "words", "client"),
    [
        ({"train": (rows(0), rows(6, 7), rows(12, 13))}, "a single training sample", "anna"),
        ({"test": (rows(), rows(10), rows(16))}, "no test samples", "anna"),
        ({"val": (rows(2), rows(), rows(14))}, "no validation samples", "ben"),
    ],
)
def test_clients_with_little_are_counted_and_named(change: dict[str, Any], words: str, client: str) -> None:
    (warning,) = weaknesses(replace(healthy(), **change))
    assert warning.startswith("1 of 3 clients")
    assert words in warning
    assert warning.endswith(f"client '{client}'")


@pytest.mark.parametrize(
    ("test", "expected", "unseen"),
    [
        (rows(4), GUESSABLE, False),  # class 0, as in training
        (rows(4, 5), OF_ONE_CLASS, False),
        (rows(5), OF_ONE_CLASS, True),
        (rows(), OF_ONE_CLASS, False),
    ],
)
def test_guessing_is_perfect_if_the_test_part_has_the_class(test: Ints, expected: str, unseen: bool) -> None:
    train = (rows(0, 18), rows(6, 7), rows(12, 13))
    warnings = "\n".join(weaknesses(replace(healthy(), train=train, test=(test, rows(10), rows(16)))))
    assert [words for words in (GUESSABLE, OF_ONE_CLASS) if words in warnings] == [expected]
    assert ("tested mostly on classes" in warnings) == unseen


def test_warnings_are_short() -> None:
    assert len(weaknesses(replace(healthy(), val=(rows(),) * 3))) == 1  # no validation at all is said once
    train, val, test = (tuple(rows(9 * part + client) for client in range(9)) for part in range(3))
    source = Source("tiny", torch.zeros(27, 2), torch.arange(27) % 2, "classification", 2)
    many = Federation(source, train, val, test, tuple(f"c{client}" for client in range(9)), 9)
    assert weaknesses(many)[0].endswith("clients 'c0', 'c1', 'c2', 'c3', 'c4' and 4 more")
