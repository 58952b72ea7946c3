"""Train, validation and test parts of clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailorfl.errors import ConfigError
from tailorfl.partition import splits
from tailorfl.partition.splits import (
    SplitRule,
    evenly_spaced,
    ordered,
    part_sizes,
    random_starts,
    read_split,
    split_clients,
)
from tailorfl.settings.data import SplitShares

Ints = NDArray[np.int64]


def shares(train: float, val: float, test: float, clients: int = 1) -> NDArray[np.float64]:
    return np.repeat(np.array([[train], [val], [test]]), clients, axis=1)


@pytest.mark.parametrize(
    ("split", "official", "expected"),
    [
        (None, False, SplitRule(0.7, 0.1, 0.2)),
        (None, True, SplitRule(0.9, 0.1, 0.0, "official")),
        ({"train": 0.6, "val": 0.2, "test": 0.2}, False, SplitRule(0.6, 0.2, 0.2)),
        ({"train": 0.56, "val": 0.34, "test": 0.1}, False, SplitRule(0.56, 0.34, 0.1)),  # 1 + 2⁻⁵² as floats
        ({"train": 0.5, "test": 0.25}, True, SplitRule(0.5, 0.0, 0.25)),
        ({"train": 0.75}, False, SplitRule(0.75, 0.0, 0.25)),
        ({"val": 0.25}, True, SplitRule(0.75, 0.25, 0.0, "official")),
        ({"test": "global"}, True, SplitRule(0.9, 0.1, 0.0, "global")),
        ({"train": 1.0}, True, SplitRule(1.0, 0.0, 0.0, "official")),
        ({"test": 0.5, "val": 0.25}, False, SplitRule(0.25, 0.25, 0.5)),
    ],
)
def test_missing_shares_are_filled_in(split: Any, official: bool, expected: SplitRule) -> None:
    assert read_split(None if split is None else SplitShares(**split), official) == expected


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ({"train": 0.8, "test": 0.3}, "test=0.3 .*at most 1"),
        ({"train": 0.6, "val": 0.5}, "val=0.5.*at most 1"),
        ({"test": 0.9, "val": 0.1}, "train=0"),
        ({"test": "official"}, "test='official' needs"),
    ],
)
def test_refusals(split: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_split(SplitShares(**split), official=False)


def test_perfed_ckt_draws_every_train_share_uniformly() -> None:
    train, val, test = read_split("perfed_ckt", official=True).shares(3000, np.random.default_rng(0))
    values, counts = np.unique(train, return_counts=True)
    assert (values.tolist(), set(val), set(test)) == ([0.1, 0.3, 0.4], {0.1}, {0.5})
    np.testing.assert_allclose(counts / 3000, 1 / 3, atol=0.04)


DEFAULT, HALF, ALL, CKT = (0.7, 0.1, 0.2), (0.25, 0.25, 0.5), (1.0, 0.0, 0.0), (0.1, 0.1, 0.5)


@pytest.mark.parametrize(
    ("of", "samples", "expected"),
    [
        # train comes before test before val
        *(
            (DEFAULT, n, sizes)
            for n, sizes in ((0, [0, 0, 0]), (1, [1, 0, 0]), (2, [1, 0, 1]), (3, [1, 1, 1]))
        ),
        (DEFAULT, 10, [7, 1, 2]),
        (DEFAULT, 15, [10, 2, 3]),  # a half is rounded up
        *((HALF, n, sizes) for n, sizes in ((1, [1, 0, 0]), (2, [1, 0, 1]), (3, [1, 1, 1]), (4, [1, 1, 2]))),
        *((ALL, n, [n, 0, 0]) for n in (1, 7)),
        *((CKT, n, [n // 10, n // 10, n // 2]) for n in (10, 100)),  # the rest is discarded
    ],
)
def test_sizes_of_parts(of: tuple[float, float, float], samples: int, expected: list[int]) -> None:
    assert part_sizes(np.array([samples, 50]), shares(*of, 2))[:, 0].tolist() == expected


@given(st.integers(3, 500), st.floats(0.01, 0.9), st.floats(0.01, 0.5), st.floats(0.01, 0.5))
def test_every_part_gets_a_sample(samples: int, train: float, val: float, test: float) -> None:
    total = max(1.0, train + val + test)
    sizes = part_sizes(np.array([samples]), shares(train / total, val / total, test / total))[:, 0]
    assert (sizes >= 1).all()
    assert sizes.sum() <= samples
    if train + val + test >= 1.0:
        assert sizes.sum() == samples


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=20), st.integers(0, 2**32), st.integers(1, 6))
def test_cut_is_disjoint_complete_and_stratified(sizes: list[int], seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.split(rng.permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    strata = rng.integers(0, classes, sum(sizes))
    train, val, test = split_clients(rows, strata, shares(0.7, 0.1, 0.2, len(sizes)), rng)
    for client, mine in enumerate(rows):
        parts = [train[client], val[client], test[client]]
        assert sorted(np.concatenate(parts)) == sorted(mine)
        for stratum in range(classes):
            held = int((strata[mine] == stratum).sum())
            exact = held * len(test[client]) / max(1, len(mine))
            tested = int((strata[test[client]] == stratum).sum())
            assert np.floor(exact) <= tested <= np.ceil(exact)


def test_clients_are_cut_alike_in_pieces_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    sizes = rng.integers(0, 40, 25)
    rows = np.split(rng.permutation(sizes.sum()), np.cumsum(sizes)[:-1])
    strata = rng.integers(0, 4, sizes.sum())
    found = []
    for block in (1, 50, 10**6):
        monkeypatch.setattr(splits, "_BLOCK", block)
        parts = split_clients(rows, strata, shares(0.5, 0.2, 0.2, 25), np.random.default_rng(0))
        found.append([part.flat().tolist() + part.sizes.tolist() for part in parts])
    assert found[0] == found[1] == found[2]


def test_order_of_a_clients_rows_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.permutation(30), 30 + rng.permutation(20)]
    strata, of = rng.integers(0, 3, 50), shares(0.7, 0.1, 0.2, 2)
    one, two = (
        [r.tolist() for part in split_clients(mine, strata, of, np.random.default_rng(1)) for r in part]
        for mine in (rows, [np.sort(r) for r in rows])
    )
    assert one == two


def test_class_ordered_samples_are_not_cut_in_order() -> None:
    """FedCLUP's released code cuts 90/10 in class order, which leaves a test part of one class."""
    strata, of = np.repeat([0, 1], 50), shares(0.9, 0.0, 0.1)
    _, _, test = split_clients([np.arange(100)], strata, of, np.random.default_rng(0))
    assert np.bincount(strata[test[0]]).tolist() == [5, 5]


def test_every_sample_is_equally_likely_to_be_tested() -> None:
    strata, clients = np.tile([0] * 7 + [1] * 4 + [2], 2000), np.arange(24_000).reshape(2000, 12)
    tested = split_clients([*clients], strata, shares(0.75, 0.0, 0.25, 2000), np.random.default_rng(0))[2]
    np.testing.assert_allclose(np.bincount(tested.flat() % 12) / 2000, 0.25, atol=0.04)


@given(st.integers(1, 50), st.data())
def test_evenly_spaced_takes_exactly_as_many_as_wanted(samples: int, data: st.DataObject) -> None:
    wanted = data.draw(st.integers(0, samples))
    start = random_starts(np.array([samples]), np.random.default_rng(samples))
    chosen = evenly_spaced(np.zeros(samples, dtype=np.int64), np.array([wanted]), start)
    assert chosen.sum() == wanted


@given(
    st.integers(0, 2**32),
    st.integers(1, 300),
    st.sampled_from([1, 10**6]),
    st.sampled_from([0.0, 1e-16, 1e-12, 1.0]),
)
def test_one_number_orders_as_three_keys_do(seed: int, samples: int, clients: int, spread: float) -> None:
    """Also where so many clients or so close numbers leave the rounded sums of keys undecided."""
    rng = np.random.default_rng(seed)
    client = np.sort(rng.integers(0, clients, samples))
    strata = rng.integers(0, 4, samples)
    for noise in (0.5 + spread * (rng.random(samples) - 0.5), spread * rng.integers(0, 3, samples) * 0.3):
        expected = np.lexsort((noise, strata, client))
        assert np.array_equal(ordered(client, strata, noise), expected)
