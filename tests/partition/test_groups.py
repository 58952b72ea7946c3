"""Natural clients and domains."""

from __future__ import annotations

import numpy as np
import pytest

from partition.dealing import dealt, sizes_of, supports
from tailorfl.errors import DataError

GROUPS = np.repeat(np.array([7, 2, 9, 4]), [10, 20, 30, 40])


def test_natural_clients_are_the_groups_in_order_of_ids() -> None:
    deal = dealt("natural", GROUPS, None, test=np.array([4, 4, 9, 1]))
    assert supports(GROUPS, deal.train) == [{2}, {4}, {7}, {9}]
    assert [positions.tolist() for positions in deal.test] == [[], [0, 1], [], [2]]
    assert supports(GROUPS, dealt("natural", GROUPS, None, min_size=25).train) == [{4}, {9}]


def test_a_number_of_natural_clients_is_drawn_whole() -> None:
    seen = set()
    for seed in range(40):
        deal = dealt("natural", GROUPS, 2, seed)
        (one,), (two,) = supports(GROUPS, deal.train)
        assert sizes_of(deal.train) == [int((one == GROUPS).sum()), int((two == GROUPS).sum())]
        seen.add((one, two))
    assert len(seen) == 6


def test_domains_are_shared_evenly() -> None:
    assert supports(GROUPS, dealt("domain", GROUPS, 4).train) == [{2}, {4}, {7}, {9}]
    deal = dealt("domain", GROUPS, 12, test=GROUPS)
    for part in (deal.train, deal.test):
        assert supports(GROUPS, part) == [{i} for i in (2, 4, 7, 9) for _ in range(3)]
        sizes = sizes_of(part)
        assert (sorted(sizes[:3]), sum(sizes)) == ([6, 7, 7], 100)
    assert sizes_of(dealt("domain", GROUPS, 40).train)[20:30] == [1] * 10  # a domain of ten samples
    with pytest.raises(DataError, match=r"10 samples.* 11 clients"):
        dealt("domain", GROUPS, 44)
    unknown = dealt("domain", GROUPS, 4, test=np.array([1, 2, 11]))  # unknown ones are left out
    assert [positions.tolist() for positions in unknown.test] == [[1], [], [], []]


def test_natural_groups_without_training_samples_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A hospital that has test rows only cannot be a client, and must not vanish without a word."""
    deal = dealt("natural", np.array([0, 0, 1]), None, test=np.array([0, 1, 2]))
    assert len(deal.train) == 2
    assert "1 of 3 groups have fewer than 1 training samples and are left out" in caplog.text
