"""Partitions that promise a number of classes: counts, supports, every set of classes can come up."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.dealing import balanced, dealt, supports, table_of
from tailorfl.errors import ConfigError, DataError
from tailorfl.partition.classes import _distinct_classes


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 25), st.integers(1, 40), st.integers(0, 2**32))
def test_distinct_classes_never_runs_into_a_dead_end(data: Any, count: int, clients: int, seed: int) -> None:
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
def test_exactly_the_promised_classes_in_each_part(name: str, clients: int, count: int, classes: int) -> None:
    strata, test = balanced(6000, count), balanced(2000, count)
    deal = dealt(name, strata, clients, test=test, classes=classes)
    assert {len(held) for held in supports(strata, deal.train)} == {classes}
    assert supports(strata, deal.train) == supports(test, deal.test)


def test_labels_per_client_shares_every_class_equally() -> None:
    """PLGU's CIFAR-10 layout: 100 clients of 3 classes, so every class has 30 owners of 1/30 each."""
    strata = balanced(45_000, 10)
    for counts in table_of(strata, dealt("labels_per_client", strata, 100, classes=3).train):
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
        if len(together) == groups:  # by chance two may hold the same
            assert max(together.values()) - min(together.values()) <= 1
        table = table_of(strata, deal.train)
        assert all(np.ptp(share[share > 0]) <= 1 for share in table.T if share.any())
        assert table.sum() == 600 * len(set().union(*held))


def test_which_clients_are_a_group_is_drawn() -> None:
    strata, seen = balanced(400, 10), set()
    for seed in range(20):
        held = supports(strata, dealt("class_groups", strata, 8, seed).train)
        seen.add(tuple(mine == held[0] for mine in held))
    assert len(seen) > 5


def test_all_45_pairs_of_ten_classes_come_up_about_equally_often() -> None:
    """Some libraries deal neighbouring classes only and reach 5 of the 45 pairs."""
    strata, counts = balanced(400, 10), np.zeros((10, 10))
    for seed in range(300):
        for pair in supports(strata, dealt("labels_per_client", strata, 20, seed, classes=2).train):
            counts[min(pair), max(pair)] += 1
    np.testing.assert_allclose(counts[np.triu_indices(10, 1)] / (300 * 20), 1 / 45, rtol=0.4)


@pytest.mark.parametrize(("clients", "classes"), [(100, 2), (30, 4), (7, 3)])
def test_shards_hold_at_most_the_promised_classes_and_equal_supports(clients: int, classes: int) -> None:
    strata, test = balanced(10_000, 10), balanced(3000, 10)
    deal = dealt("shards", strata, clients, test=test, classes=classes)
    assert max(map(len, supports(strata, deal.train))) <= classes
    assert supports(strata, deal.train) == supports(test, deal.test)


def test_shards_of_a_class_are_equal_and_too_few_leave_classes_out() -> None:
    """100 clients with 2 of 200 shards of 10 classes: 20 shards of 50 samples a class."""
    table = table_of(balanced(10_000, 10), dealt("shards", balanced(10_000, 10), 100).train)
    assert set(table.flat) <= {0, 50, 100}
    assert set(table.sum(axis=1)) == {100}
    assert sum(map(len, dealt("shards", balanced(100, 10), 3, classes=2).train)) == 60


def test_shares_of_classes_prob_are_as_wide_as_the_recipe() -> None:
    """Shares are U(0.4, 0.6) normalised: at most 1.5 times another's, deviation (0.2/√12)/0.5 = 11.5 % of the mean."""
    strata = balanced(400_000, 10)
    columns = [c[c > 0] for c in table_of(strata, dealt("classes_prob", strata, 500, classes=2).train).T]
    assert all(1.1 < held.max() / held.min() <= 1.5 * 1.01 for held in columns)
    relative = np.concatenate([held / held.mean() for held in columns])
    assert relative.std() == pytest.approx(0.2 / np.sqrt(12) / 0.5, rel=0.05)


def test_both_parts_of_classes_prob_use_the_same_shares() -> None:
    strata, test = balanced(20_000, 10), balanced(10_000, 10)
    deal = dealt("classes_prob", strata, 10, test=test)
    assert np.abs(table_of(strata, deal.train) / 2 - table_of(test, deal.test)).max() <= 1


def test_fedclup_deals_equal_numbers_of_every_class() -> None:
    """60,000 samples, 300 virtual clients of 2 classes: 100 samples of each class."""
    strata = balanced(60_000, 10)
    for counts in table_of(strata, dealt("fedclup_classes", strata, 10, classes=2).train):
        assert sorted(counts) == [0] * 8 + [100, 100]


def test_the_official_test_part_of_fedclup_follows_in_proportion() -> None:
    strata, test = balanced(60_000, 10), balanced(10_000, 10)
    deal = dealt("fedclup_classes", strata, 10, test=test, classes=6)
    assert supports(strata, deal.train) == supports(test, deal.test)
    assert {len(positions) for positions in deal.test} == {6 * (1000 * 33 // 6000)}


def test_a_used_up_class_drops_clients_of_fedclup_only() -> None:
    """Class 1 has room for two of ten virtual clients of all classes, so exactly two survive."""
    strata = np.repeat([0, 1], [380, 20])
    deal = dealt("fedclup_classes", strata, 2, classes=2, virtual=20)
    assert table_of(strata, deal.train).tolist() == [[10, 10]] * 2
    with pytest.raises(DataError, match="only 2 of 20"):
        dealt("fedclup_classes", strata, 3, classes=2, virtual=20)


@pytest.mark.parametrize("cut", ["drawn", "sorted"])
def test_the_cut_of_fedclups_release_takes_a_tenth_off_the_end_of_each_client(cut: str) -> None:
    strata = np.repeat(np.arange(10), 600)
    whole, less = (dealt("fedclup_classes", strata, 10, 3, classes=6, **more) for more in ({}, {"cut": cut}))
    last = []
    for before, after in zip(whole.train, less.train, strict=True):
        lost = np.setdiff1d(before, after)
        assert set(after) < set(before)
        assert len(lost) == round(0.1 * len(before))
        (from_class,) = set(strata[lost])  # a class is 1/6 of a client, so one class loses all that is lost
        last.append(from_class == strata[before].max())
    assert all(last) == (cut == "sorted")
    for wrong in ({"cut": "sortd"}, {"cut": cut, "cut_share": 1.5}, {"cut": cut, "cut_share": "a tenth"}):
        with pytest.raises(ConfigError, match=list(wrong)[-1]):
            dealt("fedclup_classes", strata, 10, **wrong)
