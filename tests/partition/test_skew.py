"""Dirichlet, PerAda's balanced Dirichlet, quantity skew and iid."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.typing import NDArray

from tailorfl.partition import Deal, partition
from tailorfl.partition.rows import Rows
from tailorfl.partition.skew import _balanced_counts

Ints = NDArray[np.int64]


def balanced(samples: int, classes: int) -> Ints:
    return np.arange(samples, dtype=np.int64) % classes


def dealt(
    name: str, strata: Ints, clients: int, seed: int = 0, test: Ints | None = None, **options: float
) -> Deal:
    return partition(name, strata, clients, np.random.default_rng(seed), test=test, options=options)


def sizes_of(rows: Rows | None) -> list[int]:
    assert rows is not None
    return [len(positions) for positions in rows]


def tables(deal: Deal, strata: Ints, test: Ints) -> tuple[Ints, Ints]:
    """Class counts `[clients, classes]` of both parts."""
    assert deal.test is not None
    width = int(strata.max()) + 1
    return (
        np.stack([np.bincount(strata[positions], minlength=width) for positions in deal.train]),
        np.stack([np.bincount(test[positions], minlength=width) for positions in deal.test]),
    )


class TestDirichlet:
    @pytest.mark.parametrize("min_size", [1, 10, 100])
    def test_the_hopeless_case_ends(self, min_size: int) -> None:
        """500 clients, 100 classes, alpha 0.01: re-drawing alone would go on for ever."""
        started = time.process_time()
        deal = dealt("dirichlet", balanced(50_000, 100), 500, alpha=0.01, min_size=min_size)
        assert time.process_time() - started < 5.0
        assert min(sizes_of(deal.train)) >= min_size
        assert sum(sizes_of(deal.train)) == 50_000

    def test_min_size_uses_the_last_sample_if_need_be(self) -> None:
        assert set(sizes_of(dealt("dirichlet", balanced(200, 10), 20, alpha=0.01).train)) == {10}

    def test_small_alpha_is_more_skewed(self) -> None:
        strata = balanced(5000, 10)
        deals = [dealt("dirichlet", strata, 20, alpha=alpha, min_size=1) for alpha in (0.01, 0.1, 1.0, 100.0)]
        classes = [np.mean([len(np.unique(strata[positions])) for positions in deal.train]) for deal in deals]
        assert classes == sorted(classes)
        assert classes[0] < 2.5
        assert classes[-1] == 10

    def test_test_part_has_the_class_proportions_of_the_training_part(self) -> None:
        strata, test = balanced(10_000, 10), balanced(5000, 10)
        deal = dealt("dirichlet", strata, 10, test=test, alpha=0.3)
        train_table, test_table = tables(deal, strata, test)
        assert np.abs(train_table / 2 - test_table).max() <= 1.0
        assert (train_table[test_table > 0] > 0).all()

    def test_no_redraw_without_min_size_is_the_plain_recipe(self) -> None:
        """Shares of the classes average to 1/clients, and their variance is the Dirichlet's."""
        alpha, clients, strata = 1.0, 5, balanced(2000, 2)
        shares = []
        for seed in range(300):
            deal = dealt("dirichlet", strata, clients, seed, alpha=alpha, min_size=0)
            shares.append(
                [np.mean(strata[positions] == 0) * len(positions) / 1000 for positions in deal.train]
            )
        np.testing.assert_allclose(np.mean(shares, axis=0), 1 / clients, atol=0.03)
        variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
        np.testing.assert_allclose(np.var(shares), variance, rtol=0.15)

    def test_test_classes_without_training_samples_are_left_out(self) -> None:
        deal = dealt("dirichlet", balanced(100, 2), 2, test=balanced(30, 3))
        assert sum(sizes_of(deal.test)) == 20


class TestPerAda:
    strata, test = balanced(5000, 10), balanced(1000, 10)

    def dealt(self, seed: int = 0, **options: float) -> Deal:
        return dealt("dirichlet_perada", self.strata, 10, seed, self.test, **options)

    def test_server_keeps_a_tenth_of_all_samples(self) -> None:
        deal = self.dealt()
        assert len(deal.server) == 500
        assert sum(map(len, deal.train)) == 4500
        assert not set(deal.server) & set(np.concatenate(deal.train))

    def test_every_client_holds_the_reserve_of_every_class(self) -> None:
        for alpha in (0.01, 0.1, 1.0):
            train, _ = tables(self.dealt(alpha=alpha, reserve=3), self.strata, self.test)
            assert train.min() >= 3

    def test_a_client_that_is_full_gets_no_later_class(self) -> None:
        """Class after class in order: beyond the reserve, whoever holds n/N already gets nothing more."""
        train, test = tables(self.dealt(alpha=0.1), self.strata, self.test)
        for table, reserve, limit in ((train, 2, 500), (test, 0, 100)):
            held = np.cumsum(table - reserve, axis=1)
            full = held[:, :-1] >= limit
            assert full.any()
            assert ((table - reserve)[:, 1:][full] == 0).all()

    def test_sizes_are_more_even_than_without_balancing(self) -> None:
        plain, even = (
            np.mean(
                [np.std(sizes_of(dealt(name, self.strata, 10, seed, **more).train)) for seed in range(10)]
            )
            for name, more in (
                ("dirichlet", {"alpha": 0.1, "min_size": 0}),
                ("dirichlet_perada", {"alpha": 0.1}),
            )
        )
        assert even < 0.75 * plain

    def test_train_and_test_use_the_same_proportions(self) -> None:
        """The first class is dealt before anybody is full, so both parts show its proportions unmasked."""
        train, test = tables(self.dealt(alpha=0.5, reserve=0, server=0.0), self.strata, self.test)
        np.testing.assert_allclose(train[:, 0] / 500, test[:, 0] / 100, atol=0.011)

    def test_all_clients_closed_but_the_last_gets_everything(self) -> None:
        """A class of six samples fills client 0 to the limit of 3, so the next goes to client 1 alone."""
        ids = np.repeat([0, 1], 6)
        logs = np.array([[0.0, -50.0], [0.0, -50.0]])
        assert _balanced_counts(ids, logs, limit=3).tolist() == [[6, 0], [0, 6]]

    def test_a_client_with_exactly_its_share_is_full(self) -> None:
        """Client 0 gets three of class 0, just what the limit is, so of class 1 it gets none."""
        logs = np.array([[0.0, -50.0], [0.0, -50.0]])
        assert _balanced_counts(np.repeat([0, 1], 3), logs, limit=3).tolist() == [[3, 0], [0, 3]]
        assert _balanced_counts(np.repeat([0, 1], 3), logs, limit=3.5).tolist() == [[3, 0], [3, 0]]

    def test_classes_missing_from_the_test_part_are_no_trouble(self) -> None:
        deal = dealt("dirichlet_perada", self.strata, 10, test=np.zeros(20, dtype=np.int64))
        assert sum(sizes_of(deal.test)) == 20


class TestQuantity:
    def test_sizes_are_skewed_and_labels_are_not(self) -> None:
        strata = balanced(20_000, 2)
        deal = dealt("quantity", strata, 10, sigma=1.5)
        sizes = np.array(sizes_of(deal.train))
        assert sizes.max() > 5 * sizes.min()
        large = [strata[positions].mean() for positions in deal.train if len(positions) > 500]
        np.testing.assert_allclose(large, 0.5, atol=0.1)

    def test_log_normal_sizes_have_the_given_deviation(self) -> None:
        sizes = sizes_of(dealt("quantity", balanced(1_000_000, 2), 400, sigma=0.7).train)
        assert np.std(np.log(sizes)) == pytest.approx(0.7, rel=0.1)

    def test_test_sizes_follow_training_sizes(self) -> None:
        deal = dealt("quantity", balanced(10_000, 2), 5, test=balanced(1000, 2), alpha=0.5)
        for train, test in zip(sizes_of(deal.train), sizes_of(deal.test), strict=True):
            assert abs(train / 10 - test) <= 1


@pytest.mark.parametrize(("name", "options"), [("quantity", {"sigma": 0.0}), ("iid", {})])
def test_even_sizes_differ_by_at_most_one(name: str, options: dict[str, float]) -> None:
    deal = dealt(name, balanced(103, 3), 10, test=balanced(17, 3), **options)
    assert set(sizes_of(deal.train)) == {10, 11}
    assert set(sizes_of(deal.test)) == {1, 2}
