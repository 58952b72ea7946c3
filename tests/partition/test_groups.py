"""Natural clients and domains."""

from __future__ import annotations

import numpy as np
import pytest

from tailorfl.partition import partition
from tailorfl.partition.groups import natural

GROUPS = np.repeat(np.array([7, 2, 9, 4]), [10, 20, 30, 40])


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


class TestNatural:
    def test_one_client_per_group_in_order_of_ids(self) -> None:
        deal = partition("natural", GROUPS, None, rng(), test=np.array([4, 4, 9, 1]))
        assert [set(GROUPS[positions]) for positions in deal.train] == [{2}, {4}, {7}, {9}]
        assert deal.test is not None
        assert [positions.tolist() for positions in deal.test] == [[], [0, 1], [], [2]]

    def test_small_groups_are_left_out(self) -> None:
        deal = partition("natural", GROUPS, None, rng(), options={"min_size": 25})
        assert [set(GROUPS[positions]) for positions in deal.train] == [{4}, {9}]

    def test_a_number_of_clients_is_drawn_whole(self) -> None:
        seen = set()
        for seed in range(40):
            deal = partition("natural", GROUPS, 2, np.random.default_rng(seed))
            held = [set(GROUPS[positions]) for positions in deal.train]
            assert all(len(ids) == 1 for ids in held)
            assert [len(positions) for positions in deal.train] == [
                int((min(ids) == GROUPS).sum()) for ids in held
            ]
            seen.add(tuple(min(ids) for ids in held))
        assert len(seen) == 6


class TestDomain:
    def test_one_client_per_domain(self) -> None:
        deal = partition("domain", GROUPS, 4, rng())
        assert [set(GROUPS[positions]) for positions in deal.train] == [{2}, {4}, {7}, {9}]

    def test_several_clients_share_a_domain_evenly(self) -> None:
        deal = partition("domain", GROUPS, 12, rng(), test=GROUPS)
        assert deal.test is not None
        for part in (deal.train, deal.test):
            assert [set(GROUPS[positions]) for positions in part] == [
                {i} for i in (2, 4, 7, 9) for _ in range(3)
            ]
            sizes = [len(positions) for positions in part]
            assert sizes[0:3] in ([7, 7, 6], [7, 6, 7], [6, 7, 7])
            assert sum(sizes) == 100

    def test_test_samples_of_unknown_domains_are_left_out(self) -> None:
        deal = partition("domain", GROUPS, 4, rng(), test=np.array([1, 2, 11]))
        assert deal.test is not None
        assert [positions.tolist() for positions in deal.test] == [[1], [], [], []]


def test_natural_groups_without_training_samples_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A hospital that has test rows only cannot be a client, and must not vanish without a word."""
    train, test = np.array([0, 0, 1]), np.array([0, 1, 2])
    deal = natural(train, None, np.random.default_rng(0), test=test)
    assert len(deal.train) == 2
    assert "1 of 3 groups have fewer than 1 training samples and are left out" in caplog.text
