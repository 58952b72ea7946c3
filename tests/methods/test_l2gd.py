"""L2GD: the expected step, what a further 1 does, when models travel, and where the iterates average to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from methods.quadratics import (
    CLIENTS,
    LR,
    Floats,
    L,
    Reference,
    global_weight,
    optimum,
    personal_weights,
    quadratic_simulation,
    shares,
    states,
)
from methods.reductions import Same, in_run
from methods.settings import LAM, Card, Row
from methods.small import NEWCOMER, SIZES, TRAIN, assert_close, assert_same, everything, personal, simulation
from tailorfl.core.method import make_method
from tailorfl.errors import ConfigError
from tailorfl.methods.l2gd import L2GD
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.theory.l2gd import best_probability, plan

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


def run(sim: Simulation, rounds: int) -> Simulation:
    for _ in range(rounds):
        sim.step()
    return sim


def pull(p: float = P) -> float:
    """αλ/(Np) where η = α/(N(1 − p))."""
    alpha = LR * CLIENTS * (1 - p)
    return alpha * LAM / (CLIENTS * p)


@pytest.mark.parametrize("p", [0.4, 0.5, 0.9])
def test_the_expected_step_is_the_gradient_of_the_objective(p: float) -> None:
    """(1 − p) G_0 + p G_1 = (1/N) ∇F_i(x_i) + (λ/N) (x_i − x̄), with G = (x − x⁺)/α of the two branches."""
    alpha, reference = LR * CLIENTS * (1 - p), Reference()
    # Local steps that tell the clients apart, an exchange, a step to the mean, and then either branch.
    ends = []
    for last in (0, 1):
        sim = run(quadratic_simulation(with_coins(0, 0, 1, last, p=p)), 3)
        x, mean = states(sim, "x"), states(sim, "mean")
        np.testing.assert_allclose(mean, np.tile(x.mean(0), (CLIENTS, 1)), atol=1e-6)
        ends.append((x, states(run(sim, 1), "x")))
    (before, local), (same, towards) = ends
    np.testing.assert_array_equal(before, same)
    expected = (1 - p) * (before - local) / alpha + p * (before - towards) / alpha
    gradient = np.array([reference.grad(i, before[i]) for i in range(CLIENTS)])
    np.testing.assert_allclose(
        expected, gradient / CLIENTS + LAM / CLIENTS * (before - before.mean(0)), atol=2e-6
    )
    assert np.abs(gradient).max() > 0.1
    assert np.abs(before - before.mean(0)).max() > 0.1


def test_the_iterates_are_the_papers() -> None:
    """Against the two equations in float64, the mean being that of the present models."""
    method, reference = with_coins(0, 1, 1, 0, 0, 1, 0), Reference()
    sim = quadratic_simulation(method)
    x = states(sim, "x")
    for r in range(30):
        if method.averages(r):
            x = (1 - pull()) * x + pull() * x.mean(0)
        else:
            x = np.array([reference.descend(i, x[i], 1) for i in range(CLIENTS)])
        sim.step()
        np.testing.assert_allclose(personal_weights(sim), x, atol=1e-5)


def test_further_ones_leave_the_mean_and_shrink_the_deviations() -> None:
    sim = run(quadratic_simulation(with_coins(0, 0, 1, 1, 1, 1)), 2)
    x = states(sim, "x")
    mean, off = x.mean(0), x - x.mean(0)
    for k in range(1, 5):
        sim.step()
        x = states(sim, "x")
        np.testing.assert_allclose(x.mean(0), mean, atol=1e-6)
        np.testing.assert_allclose(global_weight(sim), mean, atol=1e-6)
        np.testing.assert_allclose(x - x.mean(0), (1 - pull()) ** k * off, atol=2e-6)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("model_name", ["batch_norm", "dropout"])
def test_without_ones_it_is_local_training(engine: str, model_name: str) -> None:
    one = replace(TRAIN, steps=1)
    sim = run(simulation(l2gd(p=1e-9, lam=1e-9), model_name, engine), 4)
    alone = run(simulation("local", model_name, engine, train=one), 4)
    assert_same(personal(sim), personal(alone))
    assert sim.traffic == alone.traffic


def averaged(method: L2GD, rounds: int, **settings: Any) -> tuple[Floats, Floats]:
    """Mean of (x̄, x_1, ..., x_N) over rounds, and its standard error by 20 batch means."""
    sim, seen = run(quadratic_simulation(method, **settings), 60), []
    for _ in range(rounds):
        sim.step()
        x = states(sim, "x")
        seen.append(np.concatenate([x.mean(0)[None], x]))
    means = np.array(seen).reshape(20, -1, *seen[0].shape).mean(1)
    return means.mean(0), means.std(0, ddof=1) / np.sqrt(20)


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_the_time_average_is_the_closed_form(fraction: float) -> None:
    """The step is affine and its coin independent of the iterate, so the mean is the fixed point of the expected step.

    With a sampled mean, too, since it is right on average.
    """
    found, error = averaged(l2gd(), 1000, fraction=fraction)

    def distance(lam: float) -> float:
        w, v = optimum("coupled", shares("uniform"), lam)
        assert w is not None
        assert v is not None
        return float((np.abs(found - np.concatenate([w[None], v])) / error).max())

    assert distance(LAM) < 5
    assert min(distance(2 * LAM), distance(LAM / 2)) > 10


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_the_expected_number_of_exchanges(p: float) -> None:
    """p(1 − p) a round, within 5 standard errors (neighbouring rounds exclude each other, so these are generous)."""
    method, rounds = l2gd(p=p, lam=1e-3), 5_000
    count = sum(map(method.exchanges, range(1, rounds + 1)))
    assert abs(count - p * (1 - p) * rounds) < 5 * np.sqrt(rounds * p * (1 - p))
    ones = sum(map(method.averages, range(rounds)))
    assert abs(ones - p * rounds) < 5 * np.sqrt(rounds * p * (1 - p))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_models_travel_only_where_the_coin_turns_to_one(engine: str, fraction: float) -> None:
    coins = (0, 1, 1, 0, 0, 1, 0, 1)
    sim = simulation(with_coins(*coins, lam=0.5), "batch_norm", engine, fraction=fraction)
    d, sampled = sim.model.scalars, len(sim.sample(0))
    before = (1, *coins)
    for r in range(len(coins) - 1):
        traffic = sim.step().traffic
        down = coins[r] > before[r]
        up = coins[r + 1] > coins[r]
        assert (traffic.up, traffic.down_unicast) == (up * sampled * d, down * len(SIZES) * d)
        assert traffic.down_multicast == down * d
        assert (traffic.bytes_up > 0, traffic.bytes_down > 0) == (up, down)


def test_ones_before_the_first_local_step_change_and_send_nothing() -> None:
    sim = simulation(with_coins(1, 1, 0, 0, lam=0.5), "batch_norm")
    start = {p: t.clone() for p, t in everything(sim).items() if p.startswith("client/")}
    run(sim, 2)
    assert_same(start, {p: t for p, t in everything(sim).items() if p.startswith("client/")})
    assert not any(run(sim, 1).traffic.as_dict().values())


def test_with_a_sampled_fraction_the_mean_is_that_of_the_sampled() -> None:
    sim = quadratic_simulation(with_coins(0, 0, 1), fraction=0.5)
    run(sim, 2)
    ids, x = list(sim.sample(1)), states(sim, "x")
    assert len(ids) == CLIENTS // 2
    np.testing.assert_allclose(global_weight(sim), x[ids].mean(0), atol=1e-6)
    sim.step()
    np.testing.assert_allclose(
        states(sim, "x"), (1 - pull()) * x + pull() * x[ids].mean(0), atol=2e-6
    )  # sampled or not


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("model_name", ["mlp", "batch_norm", "dropout"])
def test_engines_agree_across_exchanges(model_name: str, chunk: int | None) -> None:
    method = with_coins(0, 0, 1, 1, 0, 1, lam=0.5)
    a = simulation(method, model_name, rounds=6, fraction=0.6)
    b = simulation(method, model_name, "vectorized", chunk=chunk, rounds=6, fraction=0.6)
    assert_close(everything(a), everything(b), atol=1e-4, rtol=1e-3)
    assert a.traffic == b.traffic
    assert a.traffic.up > 0


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_resumes_between_sending_and_averaging(engine: str) -> None:
    method = with_coins(0, 0, 1, 1, 0, 1, lam=0.5)
    whole = simulation(method, "batch_norm", engine, rounds=7, fraction=0.6)
    for done in range(1, 7):
        first = simulation(method, "batch_norm", engine, rounds=done, fraction=0.6)
        second = simulation(method, "batch_norm", engine, fraction=0.6)
        second.load(*first.dump())
        assert_same(everything(whole), everything(run(second, 7 - done)))
        assert second.traffic == whole.traffic


def test_running_statistics_go_the_same_way_as_parameters() -> None:
    sim = simulation(with_coins(0, 0, 1, lam=0.5), "batch_norm", rounds=2)
    before = sim.states.get(range(len(SIZES)))["x"]
    share = sim.method.pull(sim.train.lr)
    after = run(sim, 1).states.get(range(len(SIZES)))["x"]
    for n, t in before.items():
        if t.is_floating_point():
            torch.testing.assert_close(after[n], t + share * (t.mean(0) - t))
        else:
            assert torch.equal(after[n], t)


@pytest.mark.parametrize("rounds", range(1, 7))
def test_newcomers_get_the_mean_in_every_round(rounds: int) -> None:
    """Not only in rounds in which it travels."""
    sim = simulation(with_coins(0, 0, 1, 1, 0, 0, 0, lam=0.5), "batch_norm", rounds=rounds)
    for steps in (0, 3):
        ((_, models),) = sim.newcomer_models((NEWCOMER,), steps)
        w = sim.global_model()
        assert w is not None
        moved = any(not torch.equal(t[0], w[n]) for n, t in models.items())
        # Three steps of a newcomer are one round of it: a gradient step, or a step from the mean to the mean.
        assert moved == (steps > 0 and rounds not in {2, 3})


def test_p_from_the_smoothness_is_the_optimum() -> None:
    method = l2gd(smoothness=L)
    assert method.probability == best_probability(L, LAM)
    theory = plan(1, L, LAM, CLIENTS, 0.1)
    lr = theory.step / (CLIENTS * (1 - theory.p))
    assert method.pull(lr) == pytest.approx(theory.step * LAM / (CLIENTS * theory.p)) == pytest.approx(0.5)


def test_a_step_beyond_the_mean_is_refused() -> None:
    quadratic_simulation(l2gd(lam=4.0, p=0.5), lr=0.25)
    with pytest.raises(ConfigError, match=r"lr·lam·\(1 − p\)/p = 1\.1.*lr ≤ 0\.25"):
        quadratic_simulation(l2gd(lam=4.0, p=0.5), lr=0.275)


def test_clients_cannot_idle() -> None:
    with pytest.raises(ConfigError, match="participation = 'sampled'"):
        l2gd(participation="sampled")


def by_exchange(**options: Any) -> L2GD:
    """A round of which lasts until the next exchange."""
    return l2gd(per_round="exchange", p=0.3, lam=1.0, **options)


def test_a_round_until_the_next_exchange_is_a_run_of_ones_and_one_of_zeros() -> None:
    """Lengths are those of runs of coins: geometric, 1/(1 − p) and 1/p on average; the first round has no ones."""
    method = by_exchange()
    found = np.array([method.coins(r) for r in range(1, 3001)])
    assert method.coins(0)[0] == 0
    assert found.min() == 1
    np.testing.assert_allclose(found.mean(0), [1 / 0.7, 1 / 0.3], rtol=0.06)
    # P(k) = (1 − q) q^(k − 1): the share of runs of one.
    np.testing.assert_allclose((found == 1).mean(0), [0.7, 0.3], atol=0.03)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_rounds_until_the_next_exchange_are_the_papers_iterations(engine: str) -> None:
    """Against the two equations in float64: the mean is that of the models that were exchanged before the ones."""
    method, reference = by_exchange(), Reference()
    sim = quadratic_simulation(method, engine=engine)
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
