"""FedFomo: who gets which models, and what a client makes of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
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
from methods.small import (
    NEWCOMER,
    SIZES,
    assert_close,
    assert_same,
    everything,
    personal,
    simulation,
)
from tailorfl.core.messages import PerClient
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.make import make_engine
from tailorfl.methods.fedfomo import FedFomo, mixing
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree
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
            replace(local(line="no validation", exact=False), data={"validation": False}),
        ),
    ),
}


CLIENTS, DIM, TRAINED, HELD = 6, 3, 12, 8
ENGINES = ["sequential", "vectorized"]
TRUTH = torch.tensor([2.0, -1.0, 0.5])


def fedfomo(**options: Any) -> FedFomo:
    method = make_method("fedfomo", options)
    assert isinstance(method, FedFomo)
    return method


@cache
def lines(noise: float = 0.1) -> Federation:
    """Even clients hold y = TRUTH·x + noise, odd ones −TRUTH·x + noise; validation samples of their own."""
    rng = np.random.default_rng(0)
    each = TRAINED + HELD
    x = torch.from_numpy(rng.normal(size=(CLIENTS * each, DIM)).astype(np.float32))
    sign = torch.tensor([1.0, -1.0] * (CLIENTS // 2)).repeat_interleave(each)
    y = (x @ TRUTH) * sign + noise * torch.from_numpy(rng.normal(size=len(x)).astype(np.float32))
    rows = [np.arange(each * i, each * (i + 1)) for i in range(CLIENTS)]
    return Federation(
        Source("lines", x, y[:, None], "regression", 1),
        tuple(r[:TRAINED] for r in rows),
        tuple(r[TRAINED:] for r in rows),
        tuple(r[:0] for r in rows),
        tuple("abcdef"),
        CLIENTS,
    )


def linear(method: FedFomo | str, engine: str = "sequential", rounds: int = 0, **settings: Any) -> Simulation:
    sim = Simulation(
        make_method(method) if isinstance(method, str) else method,
        settings.pop("data", lines()),
        Model(lambda: build("linear", (DIM,), 1)),
        TrainConfig(epochs=1, batch_size=4, lr=0.05),
        engine=make_engine(engine),
        **settings,
    )
    return run(sim, rounds)


def run(sim: Simulation, rounds: int) -> Simulation:
    for _ in range(rounds):
        sim.step()
    return sim


def weights(sim: Simulation) -> Tensor:
    """The deployed linear models, [clients, dim]."""
    return personal(sim)[WEIGHT][:, 0]


def mixed(
    sim: Simulation, client: int, own: Tensor, previous: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor]:
    """(Σ r_n θ_n, Δ of the others) of the method's client half, models as vectors [dim]."""
    method, stack = sim.method, torch.stack(others)[:, None]
    assert isinstance(method, FedFomo)
    state = TensorDict(
        {"theta": {WEIGHT: own[None, None]}, "previous": {WEIGHT: previous[None, None]}}, batch_size=[1]
    )
    rows = len(others)
    table = TensorDict({"model": {WEIGHT: stack}, "owner": torch.arange(rows)}, batch_size=[rows])
    message = PerClient(table, torch.arange(rows)[None])

    def mix(client: Any, state: TensorDict, received: TensorDict) -> tuple[TensorDict, ...]:
        theta, delta = method.mixed(client, state, received)
        return theta, TensorDict({"delta": delta}, batch_size=[])

    theta, delta = sim.run((client,), state, message, mix)
    return theta[WEIGHT][0, 0], delta["delta"][0]


def validation_loss(client: int, w: Tensor) -> float:
    data = lines()
    rows = torch.from_numpy(data.val[client])
    error = data.source.x[rows] @ w - data.source.y[rows, 0]
    return float(0.5 * error.double().square().mean())


# -- the mixture ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_exactly_one_better_candidate_is_taken_over(engine: str) -> None:
    sim = linear(fedfomo(), engine)
    better = TRUTH * 0.9
    for others in ([better, -TRUTH], [-TRUTH, better], [-2 * TRUTH, -TRUTH, better, -3 * TRUTH]):
        found, _ = mixed(sim, 0, TRUTH * -0.5, TRUTH * 0.1, *others)
        assert torch.equal(found, better)
    found, _ = mixed(sim, 0, better, TRUTH * 0.1, -TRUTH, -2 * TRUTH)
    assert torch.equal(found, better)


@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_mixture_is_the_papers(engine: str, norm: str) -> None:
    """θ^prev + Σ r_n (θ_n − θ^prev) in float64, inside the box of the candidates and with every Δ as written."""
    rng = np.random.default_rng(1)
    sim, several = linear(fedfomo(norm=norm), engine), 0
    for client in range(CLIENTS):
        near = TRUTH * (-1.0) ** client
        own, previous, *others = (
            near * float(scale) + torch.from_numpy(rng.normal(size=DIM).astype(np.float32)) * 0.5
            for scale in (0.5, 0.0, 0.9, 0.7, -0.5, 0.2)
        )
        found, delta = mixed(sim, client, own, previous, *others)
        candidates, prev = torch.stack([own, *others]).double().numpy(), previous.double().numpy()
        gains = np.array(
            [
                (validation_loss(client, previous) - validation_loss(client, n))
                / (float((n - previous).norm(p=int(norm[1]))) + 1e-5)
                for n in (own, *others)
            ]
        )
        np.testing.assert_allclose(delta.numpy(), gains[1:], rtol=1e-4, atol=1e-5)
        r = np.maximum(gains, 0) / np.maximum(gains, 0).sum()
        several += int((r > 0).sum() > 2)
        np.testing.assert_allclose(found.numpy(), prev + r @ (candidates - prev), atol=1e-5)
        assert (found.numpy() >= candidates.min(0) - 1e-6).all()
        assert (found.numpy() <= candidates.max(0) + 1e-6).all()
    assert several > 2


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


def test_gains_that_overflow_together_still_sum_to_one() -> None:
    assert mixing(torch.full((4,), 3e38)).tolist() == [0.25] * 4


@pytest.mark.parametrize("engine", ENGINES)
def test_where_nothing_improves_the_own_model_stays_or_the_baseline_returns(engine: str) -> None:
    own, previous, worse = TRUTH * 0.1, TRUTH * 0.9, -TRUTH
    assert torch.equal(mixed(linear(fedfomo(), engine), 0, own, previous, worse)[0], own)
    sim = linear(fedfomo(fallback="baseline"), engine)
    assert torch.equal(mixed(sim, 0, own, previous, worse)[0], previous)
    assert torch.equal(mixed(sim, 0, TRUTH, previous, worse)[0], TRUTH)


@pytest.mark.parametrize("fallback", ["own", "baseline"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_candidate_that_overflows_is_neither_used_nor_reported(engine: str, fallback: str) -> None:
    sim = linear(fedfomo(fallback=fallback), engine)
    found, delta = mixed(sim, 0, TRUTH * 0.5, TRUTH * 0.1, torch.full((DIM,), 1e30), TRUTH)
    assert delta[0] == 0
    assert torch.isfinite(found).all()
    assert float(delta[1]) > 0


def test_running_statistics_are_mixed_with_the_same_weights_and_counters_are_the_own() -> None:
    sim = simulation(fedfomo(explore=0.0), "batch_norm", rounds=2)
    ids = tuple(range(len(SIZES)))
    message = sim.method.broadcast(sim.server, ids)
    assert isinstance(message, PerClient)
    states = sim.states.get(ids)

    def look(client: Any, state: TensorDict, received: TensorDict) -> tuple[TensorDict, ...]:
        theta, _ = sim.method.mixed(client, state, received)
        others = received["model"]
        models = [state["theta"], *(others[k] for k in range(len(received["owner"])))]
        base = client.loss(state["previous"], "val")
        gains = [
            (base - client.loss(m, "val"))
            / (tree.norm(client.parameters(m) - client.parameters(state["previous"])) + 1e-5)
            for m in models
        ]
        return theta, TensorDict({"r": mixing(torch.stack(gains))}, batch_size=[])

    theta, seen = sim.run(ids, states, message, look)
    assert len(torch.unique(seen["r"])) > 4
    for n, t in theta.items():
        own, others = states["theta"][n], message.payloads["model"][n][message.rows]
        if t.is_floating_point():
            every = torch.cat([own[:, None], others], 1)
            torch.testing.assert_close(t, torch.einsum("cm,cm...->c...", seen["r"], every))
        else:
            assert torch.equal(t, own)


# -- reductions to local training -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model_name", ["batch_norm", "dropout"])
def test_no_downloads_is_local_training(engine: str, model_name: str) -> None:
    sim = simulation(fedfomo(downloads=0), model_name, engine, rounds=4, fraction=0.6)
    alone = simulation("local", model_name, engine, rounds=4, fraction=0.6)
    assert_same(personal(sim), personal(alone))
    assert sim.traffic.down_unicast == sim.traffic.bytes_down == 0


def test_the_first_round_is_local_training_and_so_are_those_with_a_single_upload() -> None:
    for rounds, fraction in ((1, 1.0), (4, 0.2)):
        sim, alone = (
            simulation(m, "batch_norm", rounds=rounds, fraction=fraction) for m in (fedfomo(), "local")
        )
        assert_same(personal(sim), personal(alone))
        assert sim.traffic.down_unicast == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_if_only_the_own_model_improves_it_is_local_training(engine: str) -> None:
    """Downloads are made far worse than anything; own models improve, or nothing does."""
    sim, alone, own_better = linear(fedfomo(), engine), linear("local", engine), 0
    for _ in range(5):
        alone.step()
        sim.step()
        assert torch.equal(weights(sim), weights(alone))
        state = sim.states.get(range(CLIENTS))
        own_better += sum(
            validation_loss(i, state["theta"][WEIGHT][i, 0])
            < validation_loss(i, state["previous"][WEIGHT][i, 0])
            for i in range(CLIENTS)
        )
        sim.server["pool"][WEIGHT] = sim.server["pool"][WEIGHT] * 0 + 1e3
    assert own_better > 4 * CLIENTS
    assert sim.traffic.down_unicast > 0
    assert not torch.equal(weights(linear(fedfomo(), engine, 5)), weights(alone)), "otherwise it says nothing"


@pytest.mark.parametrize("fallback", ["own", "baseline"])
@pytest.mark.parametrize("engine", ENGINES)
def test_clients_without_validation_samples_train_alone(engine: str, fallback: str) -> None:
    data = lines()
    val = tuple(r[:0] if i % 2 else r for i, r in enumerate(data.val))
    sim = linear(fedfomo(fallback=fallback), engine, 4, data=replace(data, val=val))
    alone = linear("local", engine, 4, data=data)
    assert torch.equal(weights(sim)[1::2], weights(alone)[1::2])
    assert not torch.equal(weights(sim)[::2], weights(alone)[::2])
    assert not sim.server["affinity"][1::2].any()


# -- who gets what ----------------------------------------------------------------------------------------------


def server(method: FedFomo, owners: int = 8, seed: int = 0) -> TensorDict:
    """A server with one upload of everyone; client i likes those just after it best."""
    model = Model(lambda: build("linear", (DIM,), 1))
    sim = Simulation(method, lines(), model, TrainConfig(), seed=seed)
    state = sim.server
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
    for seed in (0, 1):
        state = server(method, seed=seed)
        for client in range(8):
            best = [(client + k) % 8 for k in (1, 2, 3)]
            assert all(chosen(method, state, client, r) == best for r in range(10))


def test_equal_affinities_are_broken_at_random_and_evenly() -> None:
    method = fedfomo(explore=0.0, downloads=3)
    state, rounds = server(method), 3000
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
    method = fedfomo(explore=0.3, explore_decay=0.0, downloads=3)
    state, rounds = server(method), 3000
    other = sum(set(chosen(method, state, 0, r)) != {1, 2, 3} for r in range(rounds))
    share = 0.3 * (1 - 1 / 35)  # one of the 35 random triples is the best one
    assert abs(other - share * rounds) < 5 * np.sqrt(rounds * share * (1 - share))
    fading = fedfomo(explore=0.3, downloads=3)
    states = [server(fading, seed=s) for s in range(150)]
    found = np.array(
        [[set(chosen(fading, state, 0, r)) != {1, 2, 3} for r in (0, 3, 6, 7, 20)] for state in states]
    )
    assert not found[:, 2:].any()
    assert abs(found[:, 0].mean() - share) < 5 * np.sqrt(share * (1 - share) / 150)
    share = 0.15 * (1 - 1 / 35)
    assert abs(found[:, 1].mean() - share) < 5 * np.sqrt(share * (1 - share) / 150)


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


def test_asking_changes_nothing_and_does_not_depend_on_the_company() -> None:
    sim = linear(fedfomo(downloads=2), rounds=2)
    before = {p: t.clone() for p, t in tree.leaves(sim.server)}
    together, again = (sim.method.broadcast(sim.server, (3, 0, 5)) for _ in range(2))
    alone = sim.method.broadcast(sim.server, (0,))
    assert isinstance(together, PerClient)
    assert isinstance(again, PerClient)
    assert isinstance(alone, PerClient)
    assert torch.equal(together.rows, again.rows)
    assert torch.equal(together.rows[1], alone.rows[0])
    assert_same(before, dict(tree.leaves(sim.server)))
    pool, sent = sim.server["pool"][WEIGHT], together.payloads["model", WEIGHT]
    assert pool.data_ptr() == sent.data_ptr(), "the pool is not copied"


@pytest.mark.parametrize("engine", ENGINES)
def test_affinities_add_up_the_reported_gains(engine: str) -> None:
    sim = linear(fedfomo(downloads=3), engine, 2, fraction=0.7)
    ids = sim.sample(sim.round)
    before = sim.server["affinity"].clone()
    message = sim.method.broadcast(sim.server, ids)
    _, replies = sim.run(ids, sim.states.get(ids), message, lambda c, s, r: sim.method.local(c, s, r))
    sim.step()
    (learned,) = (replies[name] for name in replies.keys() if name != "theta")  # noqa: SIM118
    for k, i in enumerate(ids):
        for owner, delta in zip(learned["owner"][k].tolist(), learned["delta"][k], strict=True):
            before[i, owner] += delta
    torch.testing.assert_close(sim.server["affinity"], before)
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


# -- cost -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_unicast_counts_every_receipt_and_multicast_every_distinct_model(engine: str) -> None:
    sim = simulation(fedfomo(downloads=2), "batch_norm", engine, fraction=0.6)
    d, m = sim.model.scalars, 3
    for r in range(5):
        ids = sim.sample(r)
        message = sim.method.broadcast(sim.server, ids)
        traffic = sim.step().traffic
        if r == 0:
            assert (traffic.up, traffic.down_unicast, traffic.down_multicast) == (m * d, 0, 0)
            continue
        assert isinstance(message, PerClient)
        distinct = set(message.payloads["owner"][message.rows].flatten().tolist())
        assert traffic.down_unicast == m * 2 * d
        assert traffic.down_multicast == len(distinct) * d
        assert traffic.up == m * d + m * 2  # the models, and two Δ each


def test_where_everything_is_asked_for_multicast_is_one_download_per_upload() -> None:
    """2m models a round, as PerFed-CKT counts FedFomo; the Δ beside them are not models."""
    sim = linear(fedfomo(downloads=20), rounds=1)
    before = sim.traffic.as_dict()
    sim.step()
    after = sim.traffic.as_dict()
    cost = {k: after[k] - before[k] for k in after}
    assert cost["down_multicast"] == CLIENTS * DIM
    assert cost["down_unicast"] == CLIENTS * (CLIENTS - 1) * DIM
    assert cost["up"] - CLIENTS * (CLIENTS - 1) == CLIENTS * DIM


# -- the whole --------------------------------------------------------------------------------------------------


def test_clients_learn_whom_to_ask() -> None:
    """Two populations of opposite signs: affinities tell them apart, and kin helps more than training alone."""
    sim, alone = linear(fedfomo(downloads=3), rounds=8), linear("local", rounds=8)
    kin = (torch.arange(CLIENTS)[:, None] - torch.arange(CLIENTS)[None]) % 2 == 0
    kin &= ~torch.eye(CLIENTS, dtype=torch.bool)
    strangers = (torch.arange(CLIENTS)[:, None] - torch.arange(CLIENTS)[None]) % 2 == 1
    assert sim.server["affinity"][kin].mean() > sim.server["affinity"][strangers].mean() + 0.5
    sign = torch.tensor([(-1.0) ** i for i in range(CLIENTS)])[:, None]
    error = [float((weights(s) - TRUTH * sign).square().mean()) for s in (sim, alone)]
    assert error[0] < error[1]


@pytest.mark.parametrize("options", [{"downloads": 2}, {"fallback": "baseline"}], ids=str)
@pytest.mark.parametrize("model_name", ["mlp", "batch_norm", "dropout"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_engines_agree_over_rounds(options: dict[str, Any], model_name: str, chunk: int | None) -> None:
    method = fedfomo(**options)
    a = simulation(method, model_name, rounds=4, fraction=0.8)
    b = simulation(method, model_name, "vectorized", chunk=chunk, rounds=4, fraction=0.8)
    assert_close(everything(a), everything(b), atol=1e-4, rtol=1e-3)
    assert a.traffic == b.traffic
    assert a.server["affinity"].count_nonzero() > 5


@pytest.mark.parametrize("engine", ENGINES)
def test_resumes_exactly_whatever_was_uploaded(engine: str) -> None:
    whole = simulation(fedfomo(downloads=2), "batch_norm", engine, rounds=5, fraction=0.6)
    for done in range(1, 5):
        first = simulation(fedfomo(downloads=2), "batch_norm", engine, rounds=done, fraction=0.6)
        second = simulation(fedfomo(downloads=2), "batch_norm", engine, fraction=0.6)
        second.load(*first.dump())
        assert_same(everything(whole), everything(run(second, 5 - done)))
        assert second.traffic == whole.traffic


def test_newcomers_start_from_the_mean_of_what_they_receive() -> None:
    sim = simulation(fedfomo(downloads=2), "batch_norm")
    ((_, start),) = sim.newcomer_models((NEWCOMER,), 0)
    assert_same({n: t[0] for n, t in start.items()}, dict(sim.init.items()))
    run(sim, 2)
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
    picks = [chosen(method, state, 8, r) for r in range(20)]
    assert any(a != b for a, b in pairwise(picks))


def test_the_client_that_rejoins_brings_its_last_model() -> None:
    """θ_i and θ_i^prev are as it left them, however many rounds ago."""
    sim = simulation(fedfomo(), "mlp", fraction=0.4, seed=3)
    trained: dict[int, dict[str, Tensor]] = {}
    for _ in range(6):
        ids = sim.step().clients
        for i, was in trained.items():
            if i not in ids:
                assert_same(was, dict(tree.leaves(sim.states.get((i,)))))
        trained |= {i: dict(tree.leaves(sim.states.get((i,)))) for i in ids}
    assert len(trained) > 3
