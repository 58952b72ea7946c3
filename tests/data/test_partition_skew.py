"""Dirichlet, PerAda's balanced Dirichlet, quantity skew and iid."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.typing import NDArray

from tailorfl.data.partition import Deal, partition
from tailorfl.data.partition.deal import count_table
from tailorfl.data.partition.skew import _balanced_counts

Ints = NDArray[np.int64]


def balanced(samples: int, classes: int) -> Ints:
    return np.arange(samples, dtype=np.int64) % classes


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
        deal = partition(
            "dirichlet",
            balanced(50_000, 100),
            500,
            np.random.default_rng(0),
            options={"alpha": 0.01, "min_size": min_size},
        )
        assert time.process_time() - started < 5.0
        assert min(map(len, deal.train)) >= min_size
        assert sum(map(len, deal.train)) == 50_000

    def test_min_size_uses_the_last_sample_if_need_be(self) -> None:
        deal = partition(
            "dirichlet", balanced(200, 10), 20, np.random.default_rng(0), options={"alpha": 0.01}
        )
        assert {len(positions) for positions in deal.train} == {10}

    def test_small_alpha_is_more_skewed(self) -> None:
        strata = balanced(5000, 10)
        classes = []
        for alpha in (0.01, 0.1, 1.0, 100.0):
            deal = partition(
                "dirichlet", strata, 20, np.random.default_rng(0), options={"alpha": alpha, "min_size": 1}
            )
            classes.append(np.mean([len(np.unique(strata[positions])) for positions in deal.train]))
        assert classes == sorted(classes)
        assert classes[0] < 2.5
        assert classes[-1] == 10

    def test_test_part_has_the_class_proportions_of_the_training_part(self) -> None:
        strata, test = balanced(10_000, 10), balanced(5000, 10)
        deal = partition("dirichlet", strata, 10, np.random.default_rng(0), test=test, options={"alpha": 0.3})
        train_table, test_table = tables(deal, strata, test)
        assert np.abs(train_table / 2 - test_table).max() <= 1.0
        assert (train_table[test_table > 0] > 0).all()

    def test_no_redraw_without_min_size_is_the_plain_recipe(self) -> None:
        """Shares of the classes average to 1/clients, and their variance is the Dirichlet's."""
        alpha, clients, strata = 1.0, 5, balanced(2000, 2)
        shares = []
        for seed in range(300):
            deal = partition(
                "dirichlet",
                strata,
                clients,
                np.random.default_rng(seed),
                options={"alpha": alpha, "min_size": 0},
            )
            shares.append(
                [np.mean(strata[positions] == 0) * len(positions) / 1000 for positions in deal.train]
            )
        np.testing.assert_allclose(np.mean(shares, axis=0), 1 / clients, atol=0.03)
        variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
        np.testing.assert_allclose(np.var(shares), variance, rtol=0.15)

    def test_test_classes_without_training_samples_are_left_out(self) -> None:
        deal = partition("dirichlet", balanced(100, 2), 2, np.random.default_rng(0), test=balanced(30, 3))
        assert deal.test is not None
        assert sum(map(len, deal.test)) == 20


class TestPerAda:
    strata, test = balanced(5000, 10), balanced(1000, 10)

    def dealt(self, seed: int = 0, **options: float) -> Deal:
        return partition(
            "dirichlet_perada", self.strata, 10, np.random.default_rng(seed), test=self.test, options=options
        )

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
        even = [np.std([len(p) for p in self.dealt(seed, alpha=0.1).train]) for seed in range(10)]
        plain = [
            np.std(
                [
                    len(p)
                    for p in partition(
                        "dirichlet",
                        self.strata,
                        10,
                        np.random.default_rng(seed),
                        options={"alpha": 0.1, "min_size": 0},
                    ).train
                ]
            )
            for seed in range(10)
        ]
        assert np.mean(even) < 0.75 * np.mean(plain)

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
        deal = partition(
            "dirichlet_perada", self.strata, 10, np.random.default_rng(0), test=np.zeros(20, dtype=np.int64)
        )
        assert deal.test is not None
        assert sum(map(len, deal.test)) == 20


class TestQuantity:
    def test_sizes_are_skewed_and_labels_are_not(self) -> None:
        strata = balanced(20_000, 2)
        deal = partition("quantity", strata, 10, np.random.default_rng(0), options={"sigma": 1.5})
        sizes = np.array([len(positions) for positions in deal.train])
        assert sizes.max() > 5 * sizes.min()
        large = [strata[positions].mean() for positions in deal.train if len(positions) > 500]
        np.testing.assert_allclose(large, 0.5, atol=0.1)

    def test_log_normal_sizes_have_the_given_deviation(self) -> None:
        deal = partition(
            "quantity", balanced(1_000_000, 2), 400, np.random.default_rng(0), options={"sigma": 0.7}
        )
        assert np.std(np.log([len(positions) for positions in deal.train])) == pytest.approx(0.7, rel=0.1)

    def test_test_sizes_follow_training_sizes(self) -> None:
        deal = partition(
            "quantity",
            balanced(10_000, 2),
            5,
            np.random.default_rng(0),
            test=balanced(1000, 2),
            options={"alpha": 0.5},
        )
        assert deal.test is not None
        for train, test in zip(deal.train, deal.test, strict=True):
            assert abs(len(train) / 10 - len(test)) <= 1

    def test_zero_sigma_is_even(self) -> None:
        deal = partition("quantity", balanced(103, 2), 10, np.random.default_rng(0), options={"sigma": 0.0})
        assert {len(positions) for positions in deal.train} == {10, 11}


def test_iid_sizes_differ_by_at_most_one() -> None:
    deal = partition("iid", balanced(103, 3), 10, np.random.default_rng(0), test=balanced(17, 3))
    assert {len(positions) for positions in deal.train} == {10, 11}
    assert deal.test is not None
    assert {len(positions) for positions in deal.test} == {1, 2}


def test_count_table_counts() -> None:
    owner, strata = np.array([0, 1, 1, -1]), np.array([2, 0, 0, 1])
    assert count_table(owner, strata, 3, 2).tolist() == [[0, 2], [0, 0], [1, 0]]
