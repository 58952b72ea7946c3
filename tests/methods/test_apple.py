"""APPLE: a step of cores and shares in closed form, what is pulled and how long; numbers that train beside a model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import cross_entropy

from methods.settings import make
from methods.small import NEWCOMER, SIZES, TRAIN, assert_close, assert_same, federation, personal, simulation
from tailorfl.core.client import Client
from tailorfl.errors import TailorflError
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.gradients import Gradient
from tailorfl.training.update import Optimizer

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
