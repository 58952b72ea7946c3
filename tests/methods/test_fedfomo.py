"""FedFomo: who gets which models, and what a client makes of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from methods.quadratics import WEIGHT
from methods.reductions import in_run, local
from methods.settings import Card, Row
from methods.small import NEWCOMER, after, assert_same, replies_of, simulation
from tailorfl.core.client import Client
from tailorfl.core.messages import PerClient
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.choice import make_engine
from tailorfl.methods.fedfomo import FedFomo, mixing
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training.cohort import TrainConfig

CONTRACTS = {
    # From the second round on: of 2 uploads the one that is not a client's own, and its Δ beside θ_i.
    "fedfomo": Row(
        Card(whole, whole, whole, True, False),
        chooses=True,
        by_round=lambda r, s: (s.d if r else 0, s.d + 1 if r else s.d),
        unweighted=True,
        same=(
            local(downloads=0),
            in_run(local(line="one client a round"), fraction=0.2),
            in_run(local(line="one round"), rounds=1),
            replace(local(exact=False, line="no validation"), data={"validation": False}),
        ),
    ),
}


CLIENTS, DIM, TRAINED, HELD = 6, 3, 12, 8
TRUTH = torch.tensor([2.0, -1.0, 0.5])


def fedfomo(**options: Any) -> FedFomo:
    method = make_method("fedfomo", options)
    assert isinstance(method, FedFomo)
    return method


@cache
def lines() -> Federation:
    """Even clients hold y = TRUTH·x + noise, odd ones −TRUTH·x + noise; validation samples of their own."""
    rng = np.random.default_rng(0)
    size = TRAINED + HELD
    x = torch.from_numpy(rng.normal(size=(CLIENTS * size, DIM)).astype(np.float32))
    sign = torch.tensor([1.0, -1.0] * (CLIENTS // 2)).repeat_interleave(size)
    y = (x @ TRUTH) * sign + 0.1 * torch.from_numpy(rng.normal(size=len(x)).astype(np.float32))
    rows = [np.arange(size * i, size * (i + 1)) for i in range(CLIENTS)]
    train, val, test = zip(*((r[:TRAINED], r[TRAINED:], r[:0]) for r in rows), strict=True)
    return Federation(
        Source("lines", x, y[:, None], "regression", 1), train, val, test, tuple("abcdef"), CLIENTS
    )


def linear(method: FedFomo, engine: str = "sequential", rounds: int = 0, **settings: Any) -> Simulation:
    model, train = Model(lambda: build("linear", (DIM,), 1)), TrainConfig(epochs=1, batch_size=4, lr=0.05)
    return after(Simulation(method, lines(), model, train, engine=make_engine(engine), **settings), rounds)


def mixed(
    sim: Simulation, client: int, own: Tensor, previous: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor]:
    """(Σ r_n θ_n, Δ of the others) of the method's client half, models as vectors [dim]."""
    method, stack = sim.method, torch.stack(others)[:, None]
    assert isinstance(method, FedFomo)
    models = {"theta": {WEIGHT: own[None, None]}, "previous": {WEIGHT: previous[None, None]}}
    state = TensorDict(models, batch_size=[1])
    rows = len(others)
    table = TensorDict({"model": {WEIGHT: stack}, "owner": torch.arange(rows)}, batch_size=[rows])
    message = PerClient(table, torch.arange(rows)[None])

    def mix(client: Any, state: TensorDict, received: TensorDict) -> tuple[TensorDict, ...]:
        theta, delta = method.mixed(client, state, received)
        return theta, TensorDict({"delta": delta}, batch_size=[])

    theta, delta = sim.run((client,), state, message, mix)
    return theta[WEIGHT][0, 0], delta["delta"][0]


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=12))
def test_weights_are_shares_of_the_positive_gains(values: list[float]) -> None:
    delta = torch.tensor(values)
    r = mixing(delta)
    assert (r >= 0).all()
    assert float(r.sum()) == pytest.approx(1, abs=1e-6)
    if (delta > 0).any():
        positive = delta.double().clamp(min=0)
        torch.testing.assert_close(r.double(), positive / positive.sum(), atol=1e-6, rtol=1e-5)
        assert (r[delta <= 0] == 0).all()
    else:
        assert r.tolist() == [1.0, *[0.0] * (len(values) - 1)]
    assert mixing(torch.full((4,), 3e38)).tolist() == [0.25] * 4  # gains that overflow together


@pytest.mark.parametrize("fallback", ["own", "baseline"])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_candidate_that_overflows_is_neither_used_nor_reported(engine: str, fallback: str) -> None:
    sim = linear(fedfomo(fallback=fallback), engine)
    theta, delta = mixed(sim, 0, TRUTH * 0.5, TRUTH * 0.1, torch.full((DIM,), 1e30), TRUTH)
    assert delta[0] == 0
    assert torch.isfinite(theta).all()
    assert float(delta[1]) > 0


def server(method: FedFomo, owners: int = 8, seed: int = 0) -> TensorDict:
    """A server with one upload of everyone; client i likes those just after it best."""
    state = linear(method, seed=seed).server
    state["pool"] = TensorDict({WEIGHT: torch.randn(owners, 1, DIM)}, batch_size=[])
    state["owner"] = torch.arange(owners)
    distance = (torch.arange(owners)[None] - torch.arange(owners)[:, None]) % owners
    state["affinity"] = -distance.float()
    return state


def chosen(method: FedFomo, state: TensorDict, client: int, round: int = 0) -> list[int]:
    state["round"] = torch.tensor(round)
    message = method.broadcast(state, (client,))
    assert isinstance(message, PerClient)
    return message.rows[0].tolist()


def test_without_exploration_the_best_are_chosen_whatever_the_seed_and_round() -> None:
    method = fedfomo(explore=0.0, downloads=3)
    states = [server(method, seed=seed) for seed in (0, 1)]
    for state, client, r in product(states, range(8), range(10)):
        assert chosen(method, state, client, r) == [(client + k) % 8 for k in (1, 2, 3)]


def test_equal_affinities_are_broken_at_random_and_evenly() -> None:
    method = fedfomo(explore=0.0, downloads=3)
    state, rounds = server(method), 1500
    state["affinity"] = torch.zeros(8, 8)
    state["affinity"][2, 5] = 1.0
    counts = np.zeros(8)
    for r in range(rounds):
        rows = chosen(method, state, 2, r)
        assert len(set(rows)) == 3
        counts[rows] += 1
    assert counts[5] == rounds
    assert counts[2] == 0
    expected = rounds * 2 / 6
    assert np.abs(counts[[0, 1, 3, 4, 6, 7]] - expected).max() < 5 * np.sqrt(expected * (1 - 2 / 6))


def test_exploration_has_the_stated_probability_and_fades() -> None:
    method = fedfomo(explore=0.3, downloads=3)
    states = [server(method, seed=s) for s in range(150)]
    explored = np.array(
        [[set(chosen(method, state, 0, r)) != {1, 2, 3} for r in (0, 3, 6, 7, 20)] for state in states]
    )
    assert not explored[:, 2:].any()
    for column, explore in ((0, 0.3), (1, 0.15)):
        share = explore * (1 - 1 / 35)  # one of the 35 random triples is the best one
        assert abs(explored[:, column].mean() - share) < 5 * np.sqrt(share * (1 - share) / 150)


def test_nobody_gets_its_own_upload_and_everyone_equally_many() -> None:
    for downloads, fraction in ((2, 1.0), (2, 0.6), (10, 0.6)):
        sim = linear(fedfomo(downloads=downloads), rounds=1, fraction=fraction)
        for _ in range(4):
            uploads = len(sim.server["owner"])
            assert sim.server["owner"].tolist() == list(sim.sample(sim.round - 1))
            message = sim.method.broadcast(sim.server, tuple(range(CLIENTS)))
            assert isinstance(message, PerClient)
            assert message.rows.shape == (CLIENTS, min(downloads, uploads - 1))
            for i in range(CLIENTS):
                assert i not in sim.server["owner"][message.rows[i]]
            sim.step()


def test_affinities_add_up_the_reported_gains() -> None:
    sim = linear(fedfomo(downloads=3), rounds=2, fraction=0.7)
    ids, expected = sim.sample(sim.round), sim.server["affinity"].clone()
    replies = replies_of(sim, ids)
    sim.step()
    (learned,) = (replies[name] for name in replies.keys() if name != "theta")  # noqa: SIM118
    for k, i in enumerate(ids):
        for owner, delta in zip(learned["owner"][k].tolist(), learned["delta"][k], strict=True):
            expected[i, owner] += delta
    torch.testing.assert_close(sim.server["affinity"], expected)
    assert not sim.server["affinity"].diagonal().any()


def test_a_client_without_an_update_leaves_fewer_models_to_the_others() -> None:
    """In the round after one of them was rejected, and again as many in the round after that."""
    sim = linear(fedfomo(downloads=9), "vectorized", 1, fraction=0.7)
    ids = sim.sample(0)
    for cohort, models in ((ids[1:], len(ids) - 1), (ids, len(ids) - 2), (ids, len(ids) - 1)):
        message = sim.method.broadcast(sim.server, cohort)
        assert isinstance(message, PerClient)
        assert message.rows.shape == (len(cohort), models)
        sim.step(cohort, cohort)


@pytest.mark.parametrize("downloads", [0, 2])
def test_client_level_privacy_clips_updates_instead_of_models(downloads: int) -> None:
    """Models of norm 173 that move by less than 10, which a bound of 40 does not touch."""
    data, far = lines(), 100.0
    source = replace(data.source, y=data.source.y + far * data.source.x.sum(1, keepdim=True))

    def network() -> torch.nn.Module:
        module = build("linear", (DIM,), 1)
        for parameter in module.parameters():
            torch.nn.init.constant_(parameter, far if parameter.ndim == 2 else 0.0)
        return module

    train = TrainConfig(epochs=1, batch_size=4, lr=0.05)
    pools = []
    for dp in (None, ClientDP(40.0, 0.0)):
        method = fedfomo(downloads=downloads)
        sim = after(
            Simulation(
                method, replace(data, source=source), Model(network), train,
                engine=make_engine("sequential"), client_dp=dp,
            ), 3,
        )  # fmt: skip
        pools.append(sim.server["pool"][WEIGHT])
    assert float(pools[0].flatten(1).norm(dim=1).min()) > 150
    torch.testing.assert_close(pools[1], pools[0])


def test_newcomers_start_from_the_mean_of_what_they_receive() -> None:
    sim = simulation(fedfomo(downloads=2), "batch_norm")
    ((_, start),) = sim.newcomer_models((NEWCOMER,), 0)
    assert_same({n: t[0] for n, t in start.items()}, dict(sim.init.items()))
    after(sim, 2)
    ((_, models),) = sim.newcomer_models((NEWCOMER,), 0)
    message = sim.method.broadcast(sim.server, (NEWCOMER,))
    assert isinstance(message, PerClient)
    for n, t in message.payloads["model"].items():
        received = t[message.rows[0]]
        torch.testing.assert_close(models[n][0], received.mean(0) if t.is_floating_point() else received[0])
    ((_, adapted),) = sim.newcomer_models((NEWCOMER,), 2)
    assert any(not torch.equal(t, models[n]) for n, t in adapted.items())


def test_newcomers_explore_since_nothing_is_known_of_them() -> None:
    method = fedfomo(explore=0.0, downloads=3)
    state = server(method)
    assert len({tuple(chosen(method, state, 8, r)) for r in range(20)}) > 1


def test_where_nothing_improves_the_own_model_stays_or_the_baseline_returns() -> None:
    own, previous, worse = TRUTH * 0.1, TRUTH * 0.9, -TRUTH
    assert torch.equal(mixed(linear(fedfomo()), 0, own, previous, worse)[0], own)
    sim = linear(fedfomo(fallback="baseline"))
    assert torch.equal(mixed(sim, 0, own, previous, worse)[0], previous)
    assert torch.equal(mixed(sim, 0, TRUTH, previous, worse)[0], TRUTH)


def test_the_baseline_returns_where_losses_are_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of counts may be."""
    loss = Client.loss
    monkeypatch.setattr(Client, "loss", lambda client, state, part: loss(client, state, part) - 1e3)
    sim = linear(fedfomo(fallback="baseline"))
    own, previous = TRUTH * 0.1, TRUTH * 0.9
    assert torch.equal(mixed(sim, 0, own, previous, -TRUTH)[0], previous)
