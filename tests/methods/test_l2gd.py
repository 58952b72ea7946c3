"""L2GD: its coins, and rounds that last until the next exchange."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from methods.quadratics import (
    CLIENTS,
    LR,
    Reference,
    global_weight,
    personal_weights,
    quadratic_simulation,
    states,
)
from methods.reductions import Same, in_run
from methods.settings import LAM, Card, Row
from methods.small import NEWCOMER, SIZES, after, assert_same, everything, shared, simulation
from tailorfl.core.method import make_method
from tailorfl.methods.l2gd import L2GD
from tailorfl.testing.contract import whole

CONTRACTS = {
    # The coins of this seed are 0, 0, 0, 1, 1, 1, 0, 1: models go up at the end of round 2 and down in round 3.
    "l2gd": Row(
        Card(whole, whole, whole, True, True),
        {"coin_seed": 48, "per_round": "coin", "p": 0.5, "lam": 1.0},
        by_round=lambda r, s: (s.d * (r == 3), s.d * (r == 2)),
        same=(
            # The coins of this seed are 0, 0, 0, 1.
            in_run(
                Same(
                    "T05",
                    {"coin_seed": 48},
                    "local",
                    {"participation": "all"},
                    "personal",
                    "personal",
                    other_train={"steps": 1, "epochs": None},
                ),
                rounds=3,
            ),
        ),
        proved="p to 0, time average: test_l2gd.py (T05)",
    ),
}


P = 0.4


def l2gd(**options: Any) -> L2GD:
    """With the paper's equal weights."""
    method = make_method("l2gd", {"lam": LAM, "p": P, "weights": "uniform", "per_round": "coin", **options})
    assert isinstance(method, L2GD)
    return method


def with_coins(*coins: int, p: float = P, **options: Any) -> L2GD:
    """The method with the first coin seed whose coins begin like this."""
    for seed in range(10_000):
        method = l2gd(coin_seed=seed, p=p, **options)
        if tuple(map(int, map(method.averages, range(len(coins))))) == coins:
            return method
    raise AssertionError(f"no seed gives {coins}")


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_the_expected_number_of_exchanges(p: float) -> None:
    """p(1 − p) a round, within 5 standard errors (neighbouring rounds exclude each other, so these are generous)."""
    method, rounds = l2gd(p=p, lam=1e-3), 5_000
    count = sum(map(method.exchanges, range(1, rounds + 1)))
    assert abs(count - p * (1 - p) * rounds) < 5 * np.sqrt(rounds * p * (1 - p))
    ones = sum(map(method.averages, range(rounds)))
    assert abs(ones - p * rounds) < 5 * np.sqrt(rounds * p * (1 - p))


def test_ones_before_the_first_local_step_change_and_send_nothing() -> None:
    sim = simulation(with_coins(1, 1, 0, 0, lam=0.5), "batch_norm")
    start = {p: t.clone() for p, t in everything(sim).items() if p.startswith("client/")}
    after(sim, 2)
    assert_same(start, {p: t for p, t in everything(sim).items() if p.startswith("client/")})
    assert not any(sim.step().traffic.as_dict().values())


def test_running_statistics_go_the_same_way_as_parameters() -> None:
    sim = simulation(with_coins(0, 0, 1, lam=0.5), "batch_norm", rounds=2)
    before = sim.states.get(range(len(SIZES)))["x"]
    share = sim.method.pull(sim.train.lr)
    moved = after(sim, 1).states.get(range(len(SIZES)))["x"]
    for n, t in before.items():
        if t.is_floating_point():
            torch.testing.assert_close(moved[n], t + share * (t.mean(0) - t))
        else:
            assert torch.equal(moved[n], t)


def test_newcomers_get_the_mean_in_every_round() -> None:
    """Not only in rounds in which it travels."""
    sim = simulation(with_coins(0, 0, 1, 1, 0, 0, 0, lam=0.5), "batch_norm")
    for rounds in range(1, 7):
        w = shared(after(sim, 1))
        for steps in (0, 3):
            ((_, models),) = sim.newcomer_models((NEWCOMER,), steps)
            moved = any(not torch.equal(t[0], w[n]) for n, t in models.items())
            # Three steps of a newcomer are one round of it: a gradient step, or a step from the mean to the mean.
            assert moved == (steps > 0 and rounds not in {2, 3})


def by_exchange(**options: Any) -> L2GD:
    """A round of which lasts until the next exchange."""
    return l2gd(per_round="exchange", p=0.3, lam=1.0, **options)


def test_a_round_until_the_next_exchange_is_a_run_of_ones_and_one_of_zeros() -> None:
    """Lengths are those of runs of coins: geometric, 1/(1 − p) and 1/p on average; the first round has no ones."""
    method = by_exchange()
    lengths = np.array([method.coins(r) for r in range(1, 3001)])
    assert method.coins(0)[0] == 0
    assert lengths.min() == 1
    np.testing.assert_allclose(lengths.mean(0), [1 / 0.7, 1 / 0.3], rtol=0.06)
    # P(k) = (1 − q) q^(k − 1): the share of runs of one.
    np.testing.assert_allclose((lengths == 1).mean(0), [0.7, 0.3], atol=0.03)


def test_rounds_until_the_next_exchange_are_the_papers_iterations() -> None:
    """Against the two equations in float64: the mean is that of the models that were exchanged before the ones."""
    method, reference = by_exchange(), Reference()
    sim = quadratic_simulation(method)
    share = method.pull(LR)
    x = states(sim, "x")
    for r in range(8):
        ones, zeros = method.coins(r)
        mean = x.mean(0)
        for _ in range(ones):
            x = (1 - share) * x + share * mean
        x = np.array([reference.descend(i, x[i], zeros) for i in range(CLIENTS)])
        sim.step()
        np.testing.assert_allclose(personal_weights(sim), x, atol=1e-5)
        np.testing.assert_allclose(global_weight(sim), x.mean(0), atol=1e-5)


def test_every_round_until_the_next_exchange_sends_one_model_each_way() -> None:
    """But for the first, which nobody has to tell the initial model."""
    sim = simulation(by_exchange(), rounds=3)
    size = sum(t.numel() for n, t in sim.init.items() if n in sim.model.parameters)
    assert (sim.traffic.up, sim.traffic.down_unicast) == (3 * len(SIZES) * size, 2 * len(SIZES) * size)
