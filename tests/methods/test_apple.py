"""APPLE: numbers that train beside a model, and downloads that are limited."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from methods.reductions import local
from methods.settings import Card, Row, make
from methods.small import (
    NEWCOMER,
    SIZES,
    TRAIN,
    assert_close,
    assert_same,
    everything,
    personal,
    simulation,
)
from tailorfl.core.client import Client
from tailorfl.errors import TailorflError
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
        by_id=True,
        unweighted=True,
        same=(local(rate=0.0, prior="own"),),
    ),
}


IDS = tuple(range(len(SIZES)))
FULL = replace(TRAIN, batch_size=0, epochs=None, steps=1, momentum=0.0, weight_decay=0.0, lr=0.1)
PRIOR = torch.tensor([float(n) for n in SIZES]) / sum(SIZES)


def cores(sim: Simulation) -> dict[str, Tensor]:
    return dict(sim.server["core"].items())


@pytest.mark.parametrize("options", [{}, {"downloads": 2}, {"prior": "own"}], ids=str)
def test_a_newcomer_deploys_the_mean_core(options: dict[str, Any]) -> None:
    sim = simulation(make("apple", **options), rounds=2)
    ((_, models),) = sim.newcomer_models((NEWCOMER,), 0)
    shares = torch.full((5,), 0.2) if "prior" in options else PRIOR
    mean = {n: torch.tensordot(shares, t, dims=1) for n, t in cores(sim).items()}
    assert_close({n: t[0] for n, t in models.items()}, mean, atol=1e-6)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
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

    (trained,) = sim.run((0, 3), sim.states.get((0, 3)), sim.init, beside)
    expected = -0.1 / 3 * torch.tensor([1.0, 2.0]) / math.sqrt(5)
    for k in range(2):
        numbers = torch.stack([trained["a"]["x"][k], trained["a"]["y"][k, 0]])
        torch.testing.assert_close(numbers, expected, atol=1e-6, rtol=1e-4)
        assert_same({n: t[k] for n, t in trained["w"].items()}, dict(sim.init.items()))


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

    both = {"w": sim.init, "a": numbers}
    for start, of in (({"a": numbers}, "a"), (both, ""), (both, "a")):
        with pytest.raises(TailorflError, match="'a'"):
            asks(start, of)


def limited(downloads: int, rounds: int = 0, engine: str = "vectorized", **settings: Any) -> Simulation:
    return simulation(make("apple", downloads=downloads), engine=engine, rounds=rounds, **settings)


@pytest.mark.parametrize("downloads", [4, 9])
def test_a_limit_of_all_others_limits_nothing(downloads: int) -> None:
    sim, plain = limited(downloads, 3), simulation("apple", engine="vectorized", rounds=3)
    assert_same(everything(sim), everything(plain))
    assert sim.traffic == plain.traffic


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_client_gets_what_it_asked_for_and_never_seen_cores_first(engine: str) -> None:
    """Two a round of four others: all of them are seen after two rounds, each once, and never its own."""
    sim = limited(2, engine=engine)
    received: dict[int, list[int]] = {i: [] for i in IDS}
    expected = {n: t.expand(len(IDS), *t.shape).clone() for n, t in cores(sim).items()}
    for t in range(4):
        requested, present = sim.server["asked"].tolist(), {n: v.clone() for n, v in cores(sim).items()}
        for i in IDS:
            assert len(set(requested[i])) == 2
            assert i not in requested[i]
            received[i] += requested[i]
            for n in expected:
                expected[n][i, requested[i]] = present[n][requested[i]]
        d = sim.model.scalars
        traffic = sim.step().traffic
        assert (traffic.up, traffic.down_unicast) == (5 * d, 5 * 2 * (d + 1))
        if t == 1:
            assert all(sorted(received[i]) == [j for j in IDS if j != i] for i in IDS)
    assert_same(dict(sim.states.get(IDS)["held"].items()), expected)


def test_a_limited_client_deploys_what_it_holds() -> None:
    sim = limited(1, 3, fraction=0.6)
    states, requested = sim.states.get(IDS), sim.server["asked"]
    models = personal(sim)
    for i in IDS:
        p = PRIOR + states["others"][i]
        p[i] = PRIOR[i] + states["own"][i]
        for n, t in cores(sim).items():
            all_cores = states["held"][n][i].clone()
            all_cores[requested[i]] = t[requested[i]]
            all_cores[i] = states["core"][n][i]
            mixture = torch.tensordot(p, all_cores, dims=1)
            torch.testing.assert_close(models[n][i], mixture, atol=1e-6, rtol=1e-4)
    assert float(states["others"].diagonal().abs().max()) == 0


def test_seen_cores_are_asked_for_by_how_much_a_client_listens_to_them() -> None:
    """The chance of j is max(1.5, λ t M/N)^|p_ij| over the sum of the others'."""
    sim = simulation("apple")
    method = make("apple", downloads=1, greed=1e-9, prior="own")
    weights = torch.tensor([0.9, -0.5, 0.3, 0.0, 0.1])
    state = TensorDict({"prior": torch.zeros(1, 5), "seen": torch.ones(1, 5)}, batch_size=[1])

    def ask(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict]:
        return (TensorDict({"j": method.asked(client, 8 * weights, state)}),)  # type: ignore[attr-defined]

    requested = []
    for t in range(600):
        sim.round = t
        requested.append(int(sim.run((2,), state, tree.empty(), ask)[0]["j"]))
    chance = 1.5 ** (8 * weights.abs())
    chance[2] = 0
    counts = torch.bincount(torch.tensor(requested), minlength=5) / 600
    torch.testing.assert_close(counts, chance / chance.sum(), atol=0.06, rtol=0)
    assert counts[2] == 0
