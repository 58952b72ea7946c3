"""Partitions that promise a number of classes: counts, supports, every set of classes can come up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailorfl.errors import ConfigError, DataError
from tailorfl.partition import Deal, partition
from tailorfl.partition.classes import _distinct_classes

Ints = NDArray[np.int64]


def balanced(samples: int, classes: int) -> Ints:
    return np.arange(samples, dtype=np.int64) % classes


def dealt(
    name: str, strata: Ints, clients: int, seed: int = 0, test: Ints | None = None, **options: int
) -> Deal:
    return partition(name, strata, clients, np.random.default_rng(seed), test=test, options=options)


def supports(strata: Ints, positions: Iterable[Ints] | None) -> list[set[int]]:
    return [set(strata[rows].tolist()) for rows in positions or ()]


def table_of(strata: Ints, deal: Deal) -> Ints:
    """Samples of each of ten classes `[clients, classes]`."""
    return np.stack([np.bincount(strata[positions], minlength=10) for positions in deal.train])


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 25), st.integers(1, 40), st.integers(0, 2**32))
def test_distinct_classes_never_runs_into_a_dead_end(
    data: st.DataObject, count: int, clients: int, seed: int
) -> None:
    classes = data.draw(st.integers(1, count))
    owners = _distinct_classes(count, clients, classes, np.random.default_rng(seed))
    assert (owners.sum(axis=0) == classes).all()
    assert owners.sum(axis=1).max() - owners.sum(axis=1).min() <= 1


def test_distinct_classes_treats_clients_alike() -> None:
    """Any client holds any class with probability classes/count, the first dealt as much as the last."""
    total = sum(_distinct_classes(5, 5, 2, np.random.default_rng(seed)).astype(float) for seed in range(2000))
    np.testing.assert_allclose(np.asarray(total) / 2000, 0.4, atol=0.05)


@pytest.mark.parametrize("name", ["labels_per_client", "classes_prob"])
@pytest.mark.parametrize(("clients", "count", "classes"), [(100, 10, 3), (20, 10, 2), (7, 10, 4), (12, 5, 5)])
def test_exactly_the_promised_classes_in_both_parts(
    name: str, clients: int, count: int, classes: int
) -> None:
    strata, test = balanced(6000, count), balanced(2000, count)
    deal = dealt(name, strata, clients, test=test, classes=classes)
    assert {len(held) for held in supports(strata, deal.train)} == {classes}
    assert supports(strata, deal.train) == supports(test, deal.test)


def test_labels_per_client_shares_every_class_equally() -> None:
    """PLGU's CIFAR-10 layout: 100 clients of 3 classes, so every class has 30 owners of 1/30 each."""
    strata = balanced(45_000, 10)
    for counts in table_of(strata, dealt("labels_per_client", strata, 100, classes=3)):
        assert sorted(counts)[-3:] == [150, 150, 150]


@pytest.mark.parametrize(("clients", "groups", "classes"), [(40, 4, 3), (41, 4, 3), (10, 5, 2), (3, 3, 4)])
def test_clients_of_a_group_hold_the_same_classes(clients: int, groups: int, classes: int) -> None:
    """Groups as large as each other, and each class shared equally by all clients of the groups that hold it."""
    strata, test = balanced(6000, 10), balanced(2000, 10)
    for seed in range(5):
        deal = dealt("class_groups", strata, clients, seed, test, groups=groups, classes=classes)
        held = supports(strata, deal.train)
        assert held == supports(test, deal.test)
        assert {len(mine) for mine in held} == {classes}
        together = Counter(map(frozenset, held))
        assert len(together) <= groups
        assert sum(together.values()) == clients
        if len(together) == groups:  # by chance two may hold the same
            assert max(together.values()) - min(together.values()) <= 1
        table = table_of(strata, deal)
        for share in table.T:
            assert (share > 0).sum() == 0 or np.ptp(share[share > 0]) <= 1
        assert table.sum() == (6000 if groups * classes >= 10 else 600 * len(set().union(*held)))


def test_which_clients_are_a_group_is_drawn() -> None:
    seen = set()
    for seed in range(20):
        held = supports(balanced(400, 10), dealt("class_groups", balanced(400, 10), 8, seed).train)
        seen.add(tuple(i for i in range(1, 8) if held[i] == held[0]))
    assert len(seen) > 5


def test_more_groups_than_clients_are_refused() -> None:
    with pytest.raises(DataError, match="3 clients into 4 groups"):
        dealt("class_groups", balanced(400, 10), 3)
    with pytest.raises(ConfigError, match="'groups' must be a whole number"):
        dealt("class_groups", balanced(400, 10), 3, groups=0)


def test_all_45_pairs_of_ten_classes_come_up_about_equally_often() -> None:
    """Some libraries deal neighbouring classes only and reach 5 of the 45 pairs."""
    strata, counts = balanced(400, 10), np.zeros((10, 10))
    for seed in range(300):
        for pair in supports(strata, dealt("labels_per_client", strata, 20, seed, classes=2).train):
            counts[min(pair), max(pair)] += 1
    np.testing.assert_allclose(counts[np.triu_indices(10, 1)] / (300 * 20), 1 / 45, rtol=0.4)


class TestShards:
    @pytest.mark.parametrize(("clients", "classes"), [(100, 2), (30, 4), (7, 3)])
    def test_at_most_the_promised_classes_and_equal_supports(self, clients: int, classes: int) -> None:
        strata, test = balanced(10_000, 10), balanced(3000, 10)
        deal = dealt("shards", strata, clients, test=test, classes=classes)
        assert max(len(held) for held in supports(strata, deal.train)) <= classes
        assert supports(strata, deal.train) == supports(test, deal.test)

    def test_shards_of_a_class_are_equal(self) -> None:
        """100 clients with 2 of 200 shards of 10 classes: 20 shards of 50 samples a class."""
        strata = balanced(10_000, 10)
        for counts in table_of(strata, dealt("shards", strata, 100)):
            assert set(counts) <= {0, 50, 100}
            assert counts.sum() == 100

    def test_fewer_shards_than_classes_leave_classes_out(self) -> None:
        strata = balanced(100, 10)
        assert sum(map(len, dealt("shards", strata, 3, classes=2).train)) == 60


class TestClassesProb:
    def test_shares_lie_between_the_bounds_of_the_recipe(self) -> None:
        """Shares of a class are U(0.4, 0.6) normalised, so no owner has more than 1.5 times another's."""
        strata = balanced(100_000, 10)
        for column in table_of(strata, dealt("classes_prob", strata, 50, classes=2)).T:
            held = column[column > 0]
            assert held.max() / held.min() <= 1.5 * 1.01
            assert held.max() > 1.1 * held.min()

    def test_shares_are_as_wide_as_the_recipe(self) -> None:
        """U(0.4, 0.6) has a standard deviation of (0.2/√12)/0.5 = 11.5 % of its mean; of 1,000 shares here."""
        strata = balanced(1_000_000, 10)
        table = table_of(strata, dealt("classes_prob", strata, 500, classes=2))
        relative = np.concatenate([column[column > 0] / column[column > 0].mean() for column in table.T])
        assert relative.std() == pytest.approx(0.2 / np.sqrt(12) / 0.5, rel=0.05)

    def test_both_parts_use_the_same_shares(self) -> None:
        strata, test = balanced(20_000, 10), balanced(10_000, 10)
        deal = dealt("classes_prob", strata, 10, test=test)
        assert deal.test is not None
        for train, tested in zip(deal.train, deal.test, strict=True):
            counts = np.bincount(strata[train], minlength=10), np.bincount(test[tested], minlength=10)
            assert np.abs(counts[0] / 2 - counts[1]).max() <= 1


class TestFedclup:
    def test_equal_numbers_of_every_class(self) -> None:
        """60,000 samples, 300 virtual clients of 2 classes: 100 samples of each class."""
        strata = balanced(60_000, 10)
        for counts in table_of(strata, dealt("fedclup_classes", strata, 10, classes=2)):
            assert sorted(counts) == [0] * 8 + [100, 100]

    def test_official_test_part_follows_in_proportion(self) -> None:
        strata, test = balanced(60_000, 10), balanced(10_000, 10)
        deal = dealt("fedclup_classes", strata, 10, test=test, classes=6)
        assert deal.test is not None
        assert supports(strata, deal.train) == supports(test, deal.test)
        assert {len(positions) for positions in deal.test} == {6 * (1000 * 33 // 6000)}

    def test_a_used_up_class_drops_clients_only(self) -> None:
        """Class 1 has room for two of ten virtual clients of all classes, so exactly two survive."""
        strata = np.repeat([0, 1], [380, 20])
        deal = dealt("fedclup_classes", strata, 1, classes=2, virtual=20)
        assert [np.bincount(strata[positions]).tolist() for positions in deal.train] == [[10, 10]]
