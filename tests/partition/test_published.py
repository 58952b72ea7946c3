"""Partitions of published benchmarks against references written from their protocols, and what follows from them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from partition.dealing import Ints, dealt, supports
from tailorfl.errors import ConfigError, DataError

MNIST = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
"""Images of each digit in MNIST's training part."""


def labels(sizes: tuple[int, ...], seed: int = 0) -> Ints:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


def iid_of_the_protocol(strata: Ints, clients: int, options: dict[str, Any]) -> list[set[int]]:
    random = np.random.default_rng(42)
    order = random.choice(len(strata), len(strata), replace=False)
    return [set(part.tolist()) for part in np.array_split(order, clients)]


def dirichlet_of_the_protocol(strata: Ints, clients: int, options: dict[str, Any]) -> list[set[int]]:
    random = np.random.default_rng(42)
    people: list[set[int]] = [set()] * clients
    while min(map(len, people)) < options.get("min_size", 10):
        people = [set() for _ in range(clients)]
        for digit in sorted(set(strata.tolist())):
            rows = np.array([row for row, label in enumerate(strata.tolist()) if label == digit])
            random.shuffle(rows)
            shares = random.dirichlet([options["alpha"]] * clients)
            for client, rows_so_far in enumerate(people):
                if len(rows_so_far) >= len(strata) / clients:
                    shares[client] = 0.0
            shares = shares / shares.sum()
            edges = [0, *(int(edge * len(rows)) for edge in np.cumsum(shares)[:-1]), len(rows)]
            for client in range(clients):
                people[client] |= set(rows[edges[client] : edges[client + 1]].tolist())
    return people


def labels_of_the_protocol(strata: Ints, clients: int, options: dict[str, Any]) -> list[set[int]]:
    random = np.random.default_rng(42)
    hands: list[list[int]] = []
    for client in range(clients):
        hand = [client % 10]
        while len(hand) < options["classes"]:
            drawn = int(random.choice(10, 1)[0])
            if drawn not in hand:
                hand.append(drawn)
        hands.append(hand)
    people: list[set[int]] = [set() for _ in range(clients)]
    for digit in range(10):
        rows = np.array([row for row, label in enumerate(strata.tolist()) if label == digit])
        random.shuffle(rows)
        holders = [client for client, hand in enumerate(hands) if digit in hand]
        for client, part in zip(holders, np.array_split(rows, len(holders)), strict=True):
            people[client] |= set(part.tolist())
    return people


@pytest.mark.parametrize(
    ("reference", "options"),
    [
        (iid_of_the_protocol, {"kind": "iid"}),
        (dirichlet_of_the_protocol, {"kind": "dirichlet", "alpha": 0.5}),
        (dirichlet_of_the_protocol, {"kind": "dirichlet", "alpha": 0.05}),  # drawn more than once
        (dirichlet_of_the_protocol, {"kind": "dirichlet", "alpha": 0.05, "min_size": 1}),
        *((labels_of_the_protocol, {"classes": classes}) for classes in (1, 2, 10)),
        (labels_of_the_protocol, {"kind": "labels", "classes": 3}),
    ],
)
@pytest.mark.parametrize("sizes", [(37, 42, 40, 35, 44, 31, 38, 41, 36, 39), MNIST])
def test_niid_bench_deals_what_a_reference_deals(reference: Any, options: Any, sizes: Any) -> None:
    strata = labels(sizes)
    deal = dealt("niid_bench", strata, 10, seed=42, **options)
    assert [set(rows.tolist()) for rows in deal.train] == reference(strata, 10, options)


def test_niid_bench_has_its_own_seed_or_that_of_the_data() -> None:
    strata = labels(MNIST)
    fixed, other, free = (
        [rows.tolist() for rows in dealt("niid_bench", strata, 10, rng, kind="iid", seed=seed).train]
        for rng, seed in ((0, 42), (1, 42), (42, None))
    )
    assert fixed == other == free


def test_sorted_shards_deal_what_a_reference_deals() -> None:
    """Two of 200 consecutive shards of 300 for each of 100 clients, none dealt twice."""
    strata = labels(MNIST)
    sorted_rows = sorted(range(len(strata)), key=lambda row: (strata[row], row))
    shard_of = {row: place // 300 for place, row in enumerate(sorted_rows)}
    owners: Counter[int] = Counter()
    for rows in dealt("sorted_shards", strata, 100).train:
        shards = Counter(shard_of[row] for row in rows.tolist())
        assert sorted(shards.values()) == [300, 300]
        owners.update(shards.keys())
    assert owners == Counter(range(200))


def test_every_pair_of_shards_is_equally_likely() -> None:
    strata = np.arange(4, dtype=np.int64)
    pairs = Counter(tuple(dealt("sorted_shards", strata, 2, seed).train[0].tolist()) for seed in range(3000))
    assert len(pairs) == 6  # 4 over 2
    assert max(pairs.values()) - min(pairs.values()) < 150


def test_sorted_shards_deal_the_test_part_by_the_same_numbers() -> None:
    strata, test = np.repeat(np.arange(10), 60), np.repeat(np.arange(10), 10)
    deal = dealt("sorted_shards", strata, 10, test=test)
    assert {(len(train), len(test)) for train, test in zip(deal.train, deal.test, strict=True)} == {(60, 10)}
    assert supports(strata, deal.train) == supports(test, deal.test)


@pytest.mark.parametrize(
    ("name", "options", "error", "key"),
    [
        ("niid_bench", {"kind": "lables"}, ConfigError, "labels"),
        ("niid_bench", {"classes": 7}, DataError, "classes"),
        ("niid_bench", {"classes": 0}, ConfigError, "classes"),
        ("niid_bench", {"seed": -1}, ConfigError, "seed"),
        ("niid_bench", {"kind": "dirichlet", "alpha": 0.0}, ConfigError, "alpha"),
        ("niid_bench", {"kind": "dirichlet", "alpha": 1e-6}, DataError, "alpha"),
        ("niid_bench", {"kind": "dirichlet", "min_size": 0}, ConfigError, "min_size"),
        ("niid_bench", {"kind": "dirichlet", "min_size": 41}, DataError, "min_size"),
        ("sorted_shards", {"shards": 0}, ConfigError, "shards"),
        ("sorted_shards", {"shards": 500}, DataError, "fewer clients"),
    ],
)
def test_what_is_refused(name: str, options: dict[str, Any], error: type[Exception], key: str) -> None:
    with pytest.raises(error, match=key):
        dealt(name, labels((80,) * 3), 6, **options)


def test_classes_that_nobody_holds_are_left_out() -> None:
    strata, test = labels((40,) * 6), labels((5,) * 6)
    deal = dealt("niid_bench", strata, 2, test=test, classes=1)
    assert supports(strata, deal.train) == supports(test, deal.test) == [{0}, {1}]
    assert [len(rows) for rows in deal.test] == [5, 5]
