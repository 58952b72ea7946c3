"""APPLE: a step of cores and shares in closed form, what is pulled and how long; numbers that train beside a model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import cross_entropy

from methods.reductions import local
from methods.settings import Card, Row, make
from methods.small import (
    NEWCOMER,
    SIZES,
    TRAIN,
    assert_close,
    assert_same,
    everything,
    federation,
    personal,
    simulation,
)
from tailorfl.core.client import Client
from tailorfl.errors import ConfigError, TailorflError
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree
from tailorfl.training.gradients import Gradient
from tailorfl.training.update import Optimizer

CONTRACTS = {
    # All cores but the own one go down, each beside its share; running statistics stay.
    "apple": Row(
        Card(lambda s: 4 * (s.d + 1), whole, whole, True, False),
        {"rate": 0.3, "mu": 0.5, "horizon": 3.0},
        indexed=True,
        unweighted=True,
        same=(local(rate=0.0, prior="own"),),
    ),
}


ENGINES = ["sequential", "vectorized"]
IDS = tuple(range(len(SIZES)))
FULL = replace(TRAIN, batch_size=0, epochs=None, steps=1, momentum=0.0, weight_decay=0.0, lr=0.1)
PRIOR = torch.tensor([float(n) for n in SIZES]) / sum(SIZES)


def gradient(sim: Simulation, client: int, at: dict[str, Tensor]) -> dict[str, Tensor]:
    """∇F of a client on all its samples."""
    values = {n: t.clone().requires_grad_() for n, t in at.items()}
    rows = sim.federation.train[client]
    loss = cross_entropy(sim.model(values, sim.federation.source.x[rows]), sim.federation.source.y[rows])
    return dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))


def cores(sim: Simulation) -> dict[str, Tensor]:
    return dict(sim.server["core"].items())


@pytest.mark.parametrize("engine", ENGINES)
def test_with_alike_shares_the_mean_core_takes_a_step_of_all(engine: str) -> None:
    """p = 1/N that does not learn, one full batch: Σ c_j/N moves by −(η/N²) Σ ∇F_j."""
    sim = simulation(make("apple", rate=0.0, prior="uniform"), engine=engine, train=FULL)
    for _ in range(2):
        before = {n: t.mean(0) for n, t in cores(sim).items()}
        slopes = [gradient(sim, i, before) for i in IDS]
        sim.step()
        count = len(IDS)
        wanted = {n: t - 0.1 / count**2 * sum(g[n] for g in slopes) for n, t in before.items()}
        assert_close({n: t.mean(0) for n, t in cores(sim).items()}, wanted, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_shares_descend_as_autograd_says(engine: str) -> None:
    """∂/∂p_ij of F(Σ_j p_ij c_j) + κ ‖p_i − p⁰‖², in the second round, where cores differ and a pull is there."""
    sim = simulation(make("apple", rate=0.5, mu=0.7, horizon=4.0), engine=engine, train=FULL, rounds=1)
    states, old = sim.states.get(IDS), cores(sim)
    gaps = states["others"].clone()
    gaps[IDS, IDS] = states["own"]
    sim.step()
    after = sim.states.get(IDS)
    for i in IDS:
        p = (PRIOR + gaps[i]).requires_grad_()
        theta = {n: torch.tensordot(p, t, dims=1) for n, t in old.items()}
        rows = sim.federation.train[i]
        loss = cross_entropy(sim.model(theta, sim.federation.source.x[rows]), sim.federation.source.y[rows])
        loss = loss + 0.7 * 10 ** (-3 / 4) * (p - PRIOR).square().sum()
        (slope,) = torch.autograd.grad(loss, p)
        found = after["others"][i].clone()
        found[i] = after["own"][i]
        torch.testing.assert_close(found, gaps[i] - 0.05 * slope, atol=1e-6, rtol=1e-4)
        assert after["others"][i][i] == 0


def test_one_client_alone_descends_plainly() -> None:
    sim = simulation(make("apple", rate=0.0), rounds=3, data=federation((11,)))
    plain = simulation("local", rounds=3, data=federation((11,)))
    assert_same(personal(sim), personal(plain))
    assert sim.traffic.down_unicast == 0


def test_a_strong_pull_keeps_the_shares() -> None:
    """η κ below a half, so that steps of p do not overshoot."""
    moved = []
    for mu in (0.0, 0.1, 4.0):
        train = replace(FULL, steps=40)
        sim = simulation(make("apple", rate=1.0, mu=mu, horizon=1e9), train=train, rounds=2)
        moved.append(float(sim.states.get(IDS)["others"].norm()))
    assert moved[0] > moved[1] > moved[2]
    assert moved[2] < 0.2 * moved[0]


def test_the_pull_falls_and_ends() -> None:
    falling, cosine = make("apple", mu=2.0, horizon=10.0), make("apple", mu=2.0, horizon=10.0, decay="cosine")
    assert [falling.pull(t) for t in (0, 5, 10, 11)] == pytest.approx([2.0, 2.0 * 10**-1.5, 0.0, 0.0])  # type: ignore[attr-defined]
    assert [cosine.pull(t) for t in (0, 5, 9)] == pytest.approx([2.0, 1.0, 1 + math.cos(0.9 * math.pi)])  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_gets_all_cores_but_its_own_and_sends_that(engine: str) -> None:
    sim = simulation("apple", engine=engine, rounds=1, fraction=0.6)
    d, ids = sim.model.scalars, sim.sample(1)
    traffic = sim.step().traffic
    assert (traffic.up, traffic.down_unicast) == (3 * d, 3 * 4 * (d + 1))
    message = sim.method.broadcast(sim.server, ids)
    for i, rows in zip(ids, message.rows.tolist(), strict=True):  # type: ignore[union-attr]
        assert rows == [j for j in IDS if j != i]
    for i in IDS:
        own = sim.states.get((i,))["core"]
        assert_same({n: own[n][0] for n in cores(sim)}, {n: t[i] for n, t in cores(sim).items()})


def test_a_newcomer_deploys_the_mean_core_and_can_train_on() -> None:
    sim = simulation("apple", rounds=2)
    ((_, models),) = sim.newcomer_models((NEWCOMER,), 0)
    wanted = {n: torch.tensordot(PRIOR, t, dims=1) for n, t in cores(sim).items()}
    assert_close({n: t[0] for n, t in models.items()}, wanted, atol=1e-6)
    ((_, adapted),) = sim.newcomer_models((NEWCOMER,), 3)
    assert not torch.equal(models["fc1.weight"], adapted["fc1.weight"])


@pytest.mark.parametrize("engine", ENGINES)
def test_numbers_beside_a_model_train_at_a_rate_and_with_a_clip_of_their_own(engine: str) -> None:
    """Directions (1, 2) on numbers, of norm √5: clipped at 1 apart from the model's, at a third of the rate."""
    sim = simulation("local", engine=engine, train=replace(FULL, clip=1.0))

    def along(state: TensorDict, grad: Gradient, slope: Tensor) -> TensorDict:
        return TensorDict({"w": grad(state["w"], of="w") * 0.0, "a": {"x": slope[0], "y": slope[1:]}})

    def beside(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict]:
        start = {"w": received, "a": TensorDict({"x": torch.zeros(()), "y": torch.zeros(1)})}
        slope = torch.tensor([1.0, 2.0])
        trained = client.fit(start, direction=along, given=(slope,), optimizer=Optimizer(own=1 / 3))
        return (TensorDict({"w": trained["w"], "a": trained["a"]}),)

    (found,) = sim.run((0, 3), sim.states.get((0, 3)), sim.init, beside)
    wanted = -0.1 / 3 * torch.tensor([1.0, 2.0]) / math.sqrt(5)
    for k in range(2):
        got = torch.stack([found["a"]["x"][k], found["a"]["y"][k, 0]])
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)
        assert_same({n: t[k] for n, t in found["w"].items()}, dict(sim.init.items()))


def test_numbers_without_a_model_or_a_direction_are_refused() -> None:
    sim = simulation("local")
    numbers = TensorDict({"x": torch.zeros(())})

    def asks(start: dict[str, TensorDict], of: str = "") -> None:
        def along(state: TensorDict, grad: Gradient) -> TensorDict:
            return TensorDict({name: grad(state[name], of=name) for name in ([of] if of else start)})

        def run(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict]:
            client.fit(start, direction=along if of else None)
            return (received,)

        sim.run((0,), sim.states.get((0,)), sim.init, run)

    with pytest.raises(
        TailorflError, match=r"'a', which has no tensor of the model; such numbers train beside"
    ):
        asks({"a": numbers}, of="a")
    with pytest.raises(TailorflError, match="'a', which has no tensor of the model"):
        asks({"w": sim.init, "a": numbers})
    with pytest.raises(TailorflError, match="gradient of 'a', of which nothing of a model trains"):
        asks({"w": sim.init, "a": numbers}, of="a")


# -- limited downloads -----------------------------------------------------------------------------------------


def limited(downloads: int, rounds: int = 0, engine: str = "vectorized", **settings: Any) -> Simulation:
    options = {"rate": 0.3, "mu": 0.5, "horizon": 3.0, "downloads": downloads}
    return simulation(make("apple", **options), engine=engine, rounds=rounds, **settings)


@pytest.mark.parametrize("downloads", [4, 9])
def test_a_limit_of_all_others_limits_nothing(downloads: int) -> None:
    sim, plain = (
        limited(downloads, 3),
        simulation(make("apple", rate=0.3, mu=0.5, horizon=3.0), engine="vectorized"),
    )
    for _ in range(3):
        plain.step()
    assert_same(everything(sim), everything(plain))
    assert sim.traffic == plain.traffic


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_gets_what_it_asked_for_and_never_seen_cores_first(engine: str) -> None:
    """Two a round of four others: all of them are seen after two rounds, each once, and never its own."""
    sim, d = limited(2, engine=engine), 0
    got: dict[int, list[int]] = {i: [] for i in IDS}
    held = {n: t.expand(len(IDS), *t.shape).clone() for n, t in cores(sim).items()}
    for t in range(4):
        asked, present = sim.server["asked"].tolist(), {n: v.clone() for n, v in cores(sim).items()}
        for i in IDS:
            assert len(set(asked[i])) == 2
            assert i not in asked[i]
            got[i] += asked[i]
            for n in held:
                held[n][i, asked[i]] = present[n][asked[i]]
        d = sim.model.scalars
        traffic = sim.step().traffic
        assert (traffic.up, traffic.down_unicast) == (5 * d, 5 * 2 * (d + 1))
        if t == 1:
            assert all(sorted(got[i]) == [j for j in IDS if j != i] for i in IDS)
    assert_same(dict(sim.states.get(IDS)["held"].items()), held)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_limited_client_deploys_what_it_holds(engine: str) -> None:
    sim = limited(1, 3, engine, fraction=0.6)
    states, asked = sim.states.get(IDS), sim.server["asked"]
    models = personal(sim)
    for i in IDS:
        p = PRIOR + states["others"][i]
        p[i] = PRIOR[i] + states["own"][i]
        for n, t in cores(sim).items():
            every = states["held"][n][i].clone()
            every[asked[i]] = t[asked[i]]
            every[i] = states["core"][n][i]
            torch.testing.assert_close(models[n][i], torch.tensordot(p, every, dims=1), atol=1e-6, rtol=1e-4)
    assert float(states["others"].diagonal().abs().max()) == 0


def test_seen_cores_are_asked_for_by_how_much_a_client_listens_to_them() -> None:
    """The chance of j is max(1.5, λ t M/N)^|p_ij| over the sum of the others'."""
    sim = simulation("apple")
    weights, rounds = torch.tensor([0.9, -0.5, 0.3, 0.0, 0.1]), 600
    seen = []
    for t in range(rounds):
        sim.round = t
        state = TensorDict({"prior": torch.zeros(1, 5), "seen": torch.ones(1, 5)}, batch_size=[1])

        def ask(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict]:
            found = make("apple", downloads=1, greed=1e-9, prior="own").asked(client, 8 * weights, state)  # type: ignore[attr-defined]
            return (TensorDict({"j": found}),)

        (found,) = sim.run((2,), state, tree.empty(), ask)
        seen.append(int(found["j"]))
    chance = 1.5 ** (8 * weights.abs())
    chance[2] = 0
    counts = torch.bincount(torch.tensor(seen), minlength=5) / rounds
    torch.testing.assert_close(counts, chance / chance.sum(), atol=0.06, rtol=0)
    assert counts[2] == 0


def test_limited_downloads_resume_work_in_every_engine_and_for_newcomers() -> None:
    whole, first, second = (limited(2, r, fraction=0.6) for r in (4, 2, 0))
    second.load(*first.dump())
    for _ in range(2):
        second.step()
    assert_same(everything(whole), everything(second))
    assert_close(everything(whole), everything(limited(2, 4, "sequential", fraction=0.6)), atol=1e-5)
    ((_, models),) = whole.newcomer_models((NEWCOMER,), 0)
    wanted = {n: torch.tensordot(PRIOR, t, dims=1) for n, t in cores(whole).items()}
    assert_close({n: t[0] for n, t in models.items()}, wanted, atol=1e-6)
    with pytest.raises(ConfigError, match="which cores a client asks for"):
        limited(2, client_dp=ClientDP(clip=1.0, noise=1.0), weights="uniform")
