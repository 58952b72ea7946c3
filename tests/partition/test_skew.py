"""Dirichlet, PerAda's balanced Dirichlet, quantity skew and iid."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from partition.dealing import Ints, balanced, dealt, sizes_of, supports, table_of
from tailorfl.partition.deal import cut, log_dirichlet, proportions
from tailorfl.partition.skew import _balanced_counts, _best_draw

STRATA, TEST = balanced(5000, 10), balanced(1000, 10)


@pytest.mark.parametrize("min_size", [1, 100])
def test_the_hopeless_case_ends(min_size: int) -> None:
    """500 clients, 100 classes, alpha 0.01: re-drawing alone would go on for ever."""
    started = time.process_time()
    sizes = sizes_of(dealt("dirichlet", balanced(50_000, 100), 500, alpha=0.01, min_size=min_size).train)
    assert time.process_time() - started < 5.0
    assert (min(sizes) >= min_size, sum(sizes)) == (True, 50_000)


def test_min_size_uses_the_last_sample_if_need_be() -> None:
    assert set(sizes_of(dealt("dirichlet", balanced(200, 10), 20, alpha=0.01).train)) == {10}


def test_the_first_draw_that_gives_every_client_enough_is_taken() -> None:
    """As the published recipe: draw all classes anew until the smallest client has enough."""
    sizes, rng, plain = np.array([12, 12]), np.random.default_rng(0), np.random.default_rng(0)
    for _ in range(30):
        counts = np.zeros((2, 3))
        while counts.sum(axis=0).min() < 4:
            counts = cut(sizes, proportions(log_dirichlet(1.0, (2, 3), plain)))
        assert _best_draw(sizes, 3, 1.0, 4, rng).tolist() == counts.tolist()


def test_small_alpha_is_more_skewed() -> None:
    deals = [dealt("dirichlet", STRATA, 20, alpha=alpha, min_size=1) for alpha in (0.01, 0.1, 1.0, 100.0)]
    classes = [np.mean(list(map(len, supports(STRATA, deal.train)))) for deal in deals]
    assert classes == sorted(classes)
    assert classes[0] < 2.5
    assert classes[-1] == 10


def test_test_part_has_the_class_proportions_of_the_training_part() -> None:
    strata, test = balanced(10_000, 10), balanced(5000, 10)
    deal = dealt("dirichlet", strata, 10, test=test, alpha=0.3)
    train_table, test_table = table_of(strata, deal.train), table_of(test, deal.test)
    assert np.abs(train_table / 2 - test_table).max() <= 1.0
    assert (train_table[test_table > 0] > 0).all()
    # classes of the test part without training samples are left out
    assert sum(sizes_of(dealt("dirichlet", balanced(100, 2), 2, test=balanced(30, 3)).test)) == 20


def test_no_redraw_without_min_size_is_the_plain_recipe() -> None:
    """Shares of the classes average to 1/clients, and their variance is the Dirichlet's."""
    clients, strata = 5, balanced(2000, 2)
    shares = np.stack(
        [
            table_of(strata, dealt("dirichlet", strata, clients, seed, alpha=1.0, min_size=0).train)[:, 0]
            / 1000
            for seed in range(300)
        ]
    )
    np.testing.assert_allclose(shares.mean(axis=0), 1 / clients, atol=0.03)
    np.testing.assert_allclose(np.var(shares), (1 / clients) * (1 - 1 / clients) / (clients + 1), rtol=0.15)


# PerAda's balanced Dirichlet


def perada(**options: Any) -> tuple[Ints, Ints]:
    """Tables of both parts."""
    deal = dealt("dirichlet_perada", STRATA, 10, test=TEST, **options)
    return table_of(STRATA, deal.train), table_of(TEST, deal.test)


def test_server_keeps_a_tenth_of_all_samples() -> None:
    deal = dealt("dirichlet_perada", STRATA, 10)
    assert (len(deal.server), sum(sizes_of(deal.train))) == (500, 4500)
    assert not set(deal.server) & set(np.concatenate(deal.train))
    last = dealt("dirichlet_perada", STRATA, 240, server=0.04)  # all that the reserve leaves
    assert (len(last.server), set(sizes_of(last.train))) == (200, {20})


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0])
def test_every_client_holds_the_reserve_of_every_class(alpha: float) -> None:
    assert perada(alpha=alpha, reserve=3)[0].min() >= 3


def test_a_client_that_is_full_gets_no_later_class() -> None:
    """Class after class in order: beyond the reserve, whoever holds n/N already gets nothing more."""
    for table, reserve, limit in zip(perada(alpha=0.1), (2, 0), (500, 100), strict=True):
        full = np.cumsum(table - reserve, axis=1)[:, :-1] >= limit
        assert full.any()
        assert ((table - reserve)[:, 1:][full] == 0).all()


def test_sizes_are_more_even_than_without_balancing() -> None:
    def deviation(name: str, **more: Any) -> Any:
        deals = [dealt(name, STRATA, 10, seed, alpha=0.1, **more) for seed in range(10)]
        return np.mean([np.std(sizes_of(deal.train)) for deal in deals])

    assert deviation("dirichlet_perada", test=TEST) < 0.75 * deviation("dirichlet", min_size=0)


def test_train_and_test_use_the_same_proportions() -> None:
    """The first class is dealt before anybody is full, so both parts show its proportions unmasked."""
    train, test = perada(alpha=0.5, reserve=0, server=0.0)
    np.testing.assert_allclose(train[:, 0] / 500, test[:, 0] / 100, atol=0.011)


@pytest.mark.parametrize(
    ("samples", "limit", "counts"),
    [
        (6, 3, [[6, 0], [0, 6]]),  # class 0 fills client 0, so the next goes to client 1 alone
        (3, 3, [[3, 0], [0, 3]]),  # who has exactly the limit is full
        (3, 3.5, [[3, 0], [3, 0]]),
    ],
)
def test_all_clients_closed_but_the_last_gets_everything(samples: int, limit: float, counts: Any) -> None:
    logs = np.array([[0.0, -50.0], [0.0, -50.0]])
    assert _balanced_counts(np.repeat([0, 1], samples), logs, limit=limit).tolist() == counts


def test_classes_missing_from_the_test_part_are_no_trouble() -> None:
    deal = dealt("dirichlet_perada", STRATA, 10, test=np.zeros(20, dtype=np.int64))
    assert sum(sizes_of(deal.test)) == 20


# quantity


def test_sizes_are_skewed_and_labels_are_not() -> None:
    strata = balanced(20_000, 2)
    deal = dealt("quantity", strata, 10, sigma=1.5)
    sizes = sizes_of(deal.train)
    assert max(sizes) > 5 * min(sizes)
    large = [strata[positions].mean() for positions in deal.train if len(positions) > 500]
    np.testing.assert_allclose(large, 0.5, atol=0.1)


def test_clients_have_three_samples_at_least() -> None:
    assert min(sizes_of(dealt("quantity", balanced(160, 2), 40, sigma=3.0).train)) == 3


def test_sizes_have_the_given_deviation() -> None:
    """Log-normal ones in their logarithms; shares of Dirichlet(a) deviate by their mean / √a, of many clients."""
    strata = balanced(200_000, 2)
    sizes = sizes_of(dealt("quantity", strata, 400, sigma=0.7).train)
    assert np.std(np.log(sizes)) == pytest.approx(0.7, rel=0.1)
    sizes = sizes_of(dealt("quantity", strata, 400, alpha=4.0).train)
    assert np.std(sizes) / np.mean(sizes) == pytest.approx(0.5, rel=0.1)


def test_test_sizes_follow_training_sizes() -> None:
    deal = dealt("quantity", balanced(10_000, 2), 5, test=balanced(1000, 2), alpha=0.5)
    assert np.abs(np.array(sizes_of(deal.train)) / 10 - sizes_of(deal.test)).max() <= 1


@pytest.mark.parametrize(("name", "options"), [("quantity", {"sigma": 0.0}), ("iid", {})])
def test_even_sizes_differ_by_at_most_one(name: str, options: dict[str, float]) -> None:
    deal = dealt(name, balanced(103, 3), 10, test=balanced(17, 3), **options)
    assert (set(sizes_of(deal.train)), set(sizes_of(deal.test))) == ({10, 11}, {1, 2})
