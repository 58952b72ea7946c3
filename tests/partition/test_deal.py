"""Cutting, log-space Dirichlet draws and the repair of small clients."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.partition.deal import (
    NOBODY,
    assign,
    count_table,
    cut,
    log_dirichlet,
    positions_of,
    proportions,
    raise_to_minimum,
    share_out,
)


def test_cut_is_the_cumulative_floor_and_exact_by_whole_weights() -> None:
    """10 samples in proportions 0.25, 0.35, 0.4: edges floor(2.5), floor(6.0), 10."""
    assert cut(np.array([10]), np.array([[0.25, 0.35, 0.4]])).tolist() == [[2, 4, 4]]
    weights = np.array([[1.0, 1.0, 1.0], [0.0, 7.0, 0.0], [0.0, 0.0, 0.0]])
    assert cut(np.array([3, 5, 9]), weights).tolist() == [[1, 1, 1], [0, 5, 0], [0, 0, 0]]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(0, 10_000), st.sampled_from([1e-9, 1.0, 1e9]))
def test_cut_deals_all_and_nothing_to_weight_zero(seed: int, clients: int, size: int, alpha: float) -> None:
    rng = np.random.default_rng(seed)
    weights = proportions(log_dirichlet(alpha, (2, clients), rng))
    weights[:, rng.integers(clients)] = 0.0
    for counts in (cut(np.array([size, 1]), weights), share_out(np.array([size, 1]), weights, rng)):
        dealable = weights.sum(axis=1) > 0
        assert counts.sum(axis=1).tolist() == [size * dealable[0], 1 * dealable[1]]
        assert (counts >= 0).all()
        assert (counts[weights == 0] == 0).all()


def test_share_out_differs_from_exact_shares_by_less_than_one() -> None:
    counts = share_out(np.array([100]), np.ones((1, 7)), np.random.default_rng(0))
    assert set(counts.ravel()) == {14, 15}


def test_share_out_rounds_everybody_up_equally_often() -> None:
    rng = np.random.default_rng(0)
    total = sum(share_out(np.array([1]), np.ones((1, 4)), rng) for _ in range(2000))
    assert np.abs(np.asarray(total) / 2000 - 0.25).max() < 0.05


def test_assign_gives_the_counts_and_leaves_the_rest_to_nobody() -> None:
    strata = np.array([0, 1, 0, 1, 0, 1, 1])
    counts = np.array([[1, 1], [0, 3]])
    owner = assign(strata, counts, np.random.default_rng(0))
    assert count_table(owner, strata, 2, 2).tolist() == counts.tolist()
    assert (owner == NOBODY).sum() == 2
    assert [len(positions) for positions in positions_of(owner, 2)] == [1, 4]


def test_dirichlet_draws_have_the_known_mean_and_variance() -> None:
    """Dirichlet(a,...,a) over n has mean 1/n and variance (1/n)(1 - 1/n)/(n a + 1)."""
    alpha, n = 0.5, 4
    draws = proportions(log_dirichlet(alpha, (20_000, n), np.random.default_rng(0)))
    np.testing.assert_allclose(draws.sum(axis=1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(draws.mean(axis=0), 1 / n, atol=0.01)
    np.testing.assert_allclose(draws.var(axis=0), (1 / n) * (1 - 1 / n) / (n * alpha + 1), rtol=0.05)


def test_dirichlet_draws_of_a_tiny_alpha_pick_one_client_and_of_a_huge_one_are_even() -> None:
    draws = proportions(log_dirichlet(1e-9, (4000, 5), np.random.default_rng(0)))
    assert np.isfinite(draws).all()
    assert (draws.max(axis=1) > 1 - 1e-6).all()
    assert np.abs(np.bincount(draws.argmax(axis=1), minlength=5) / 4000 - 0.2).max() < 0.03
    np.testing.assert_allclose(
        proportions(log_dirichlet(1e9, (10, 5), np.random.default_rng(0))), 0.2, atol=1e-3
    )


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 12), st.integers(0, 300))
def test_repair_moves_as_few_samples_as_possible(seed: int, clients: int, min_size: int, extra: int) -> None:
    rng = np.random.default_rng(seed)
    samples = clients * min_size + extra
    strata = rng.integers(0, 5, samples)
    owner = np.minimum(rng.geometric(0.3, samples) - 1, clients - 1)
    repaired = raise_to_minimum(owner, strata, clients, min_size, rng)
    before, after = np.bincount(owner, minlength=clients), np.bincount(repaired, minlength=clients)
    assert after.min() >= min_size
    assert (owner != repaired).sum() == np.maximum(min_size - before, 0).sum()
    # Only the largest give: givers end level, within one sample, and nobody keeps more.
    gave = after < before
    if gave.any():
        assert after[gave].max() - after[gave].min() <= 1
        assert after.max() <= after[gave].min() + 1


def test_repair_leaves_a_valid_deal_alone() -> None:
    owner = np.array([0, 1, 1, 0])
    assert raise_to_minimum(owner, owner, 2, 2, np.random.default_rng(0)) is owner


def test_repaired_clients_receive_runs_of_one_class() -> None:
    """Four empty clients, one donor of two classes: only one client can get the run across both classes."""
    strata = np.repeat([0, 1], 50)
    owner = np.zeros(100, dtype=np.int64)
    repaired = raise_to_minimum(owner, strata, 5, 10, np.random.default_rng(0))
    held = [len(np.unique(strata[repaired == client])) for client in range(1, 5)]
    assert sum(held) <= 5
