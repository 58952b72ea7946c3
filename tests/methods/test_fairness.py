"""q-FedAvg and AFL: their steps in numbers, and where they go at the ends."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from methods.reductions import PLAIN, fedavg
from methods.settings import Card, Limit, Row, and_one
from methods.small import SIZES, TRAIN, assert_close, federation, shared, simulation
from tailorfl.core.messages import Replies
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.make import make_engine
from tailorfl.methods.mixtures import on_simplex
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training.cohort import TrainConfig

CONTRACTS = {
    # Beside a change of the model a number: its curvature, a loss, the steps taken.
    "qfedavg": Row(
        Card(whole, and_one, whole, False, True),
        {"q": 0.5},
        Limit("pooled", 1, {"q": 0.0}),
        same=(replace(fedavg("q = 0", exact=False, q=0.0, said=True), other_train=PLAIN),),
    ),
    "afl": Row(
        Card(whole, and_one, whole, False, True),
        unweighted=True,
        proved="its mixture does not move, or to the worst client; a saddle: test_fairness.py",
        never="one plain step a round, and the model that is used is the mean over rounds",
    ),
}


ENGINES = ["sequential", "vectorized"]
FULL = replace(TRAIN, batch_size=0, momentum=0.0, weight_decay=0.0)


def of_replies(sim: Simulation, stack: TensorDict) -> Replies:
    clients = tuple(range(stack.batch_size[0]))
    return Replies(stack, clients, np.ones(len(clients), dtype=np.int64), "uniform", sim.context)


def one_weight(targets: list[float], method: str, lr: float = 0.1, **options: Any) -> Simulation:
    """Clients of one sample each: F_i(w) = ½ (w − target_i)²."""
    x = torch.ones(len(targets), 1)
    rows = tuple(np.array([k]) for k in range(len(targets)))
    source = Source("targets", x, torch.tensor(targets)[:, None], "regression", 1)
    names = tuple(map(str, range(len(targets))))
    data = Federation(source, rows, rows, rows, names, len(targets))
    train = TrainConfig(batch_size=0, epochs=1, lr=lr)
    return Simulation(
        make_method(method, options),
        data,
        Model(lambda: build("linear", (1,), 1)),
        train,
        engine=make_engine("vectorized", None),
    )


def angled(method: str, angles: list[float], rounds: int, **options: Any) -> list[float]:
    """Accuracy of every client with the one model: 120 points of the circle each, class 1 on one side of its own line.
    Of a line at φ a client at θ has |φ − θ| / 180° wrong.
    """
    around = 2 * torch.pi * (torch.arange(120) + 0.5) / 120
    x = torch.stack([around.cos(), around.sin()], 1).repeat(len(angles), 1)
    turned = torch.cat([(around - np.deg2rad(angle)).cos() > 0 for angle in angles])
    source = Source("angles", x, turned.long(), "classification", 2)
    rows = tuple(np.arange(120 * k, 120 * (k + 1)) for k in range(len(angles)))
    data = Federation(source, rows, rows, rows, tuple(map(str, range(len(angles)))), len(angles))
    train = TrainConfig(batch_size=0, epochs=1, lr=1.0)
    model = Model(lambda: build("logistic", (2,), 2))
    sim = Simulation(make_method(method, options), data, model, train, engine=make_engine("vectorized", None))
    for _ in range(rounds):
        sim.step()
    right = model(shared(sim), x).argmax(1) == turned
    return [float(part) for part in right.float().view(len(angles), -1).mean(1)]


def weight(sim: Simulation) -> float:
    (value,) = shared(sim).values()
    return float(value)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_clients_message_and_the_servers_step_in_numbers(engine: str) -> None:
    """F = (1, 4), w − θ = (1, 2), η = ½, q = 1: Δ = (2, 16), h = (6, 24), so w falls by 18/30."""
    # ½(w − t)² of one step of ½: w − θ = ½ (w − t); scaled so that losses are 1 and 4 by w − t = √2, √8.
    sim = one_weight([0.0, -(2**0.5)], "qfedavg", lr=0.5, q=1.0)
    (name,) = sim.server.keys()
    sim.server = TensorDict({name: torch.full((1, 1), 2**0.5)})
    received = sim.server
    _, reply = sim.run((0, 1), sim.states.get((0, 1)), received, sim.method.local)
    found = reply["change"][name].flatten(), reply["h"]
    g = torch.tensor([2**0.5, 8**0.5])
    loss = torch.tensor([1.0, 4.0])
    torch.testing.assert_close(found[0], loss * g)
    torch.testing.assert_close(found[1], g.square() + loss / 0.5)
    stack = TensorDict(
        {
            "change": TensorDict({name: torch.tensor([[[2.0]], [[16.0]]])}, batch_size=[2]),
            "h": torch.tensor([6.0, 24.0]),
        },
        batch_size=[2],
    )
    new = sim.method.aggregate(sim.server, of_replies(sim, stack))
    assert float(sim.server[name] - new[name]) == pytest.approx(0.6)


@pytest.mark.parametrize("q", [0.5, 2.0, 20.0])
def test_of_equal_clients_the_step_is_along_theirs_and_never_longer(q: float) -> None:
    sim, plain = (one_weight([3.0, 3.0, 3.0], m, **o) for m, o in (("qfedavg", {"q": q}), ("fedavg", {})))
    start = weight(sim)
    sim.step()
    plain.step()
    own, whole = weight(sim) - start, weight(plain) - start
    assert 0 < own / whole < 1


def test_of_a_large_q_only_the_largest_loss_matters() -> None:
    """Losses of ½·4 and ½·16 weigh 1 to 4⁴⁰: the step goes to the second client alone."""
    both, alone = one_weight([2.0, -4.0], "qfedavg", q=40.0), one_weight([-4.0], "qfedavg", q=40.0)
    for sim in (both, alone):
        (name,) = sim.server.keys()
        sim.server = TensorDict({name: torch.zeros(1, 1)})
        sim.step()
    assert weight(both) == pytest.approx(weight(alone), rel=1e-5)
    assert weight(alone) < 0


@pytest.mark.slow
def test_a_larger_q_makes_the_largest_loss_smaller() -> None:
    """Optima at 0, 0 and 3: their mean is 1, and q moves the solution towards the middle of the ends."""
    ends = []
    for q in (0.0, 1.0, 5.0):
        sim = one_weight([0.0, 0.0, 3.0], "qfedavg", q=q)
        for _ in range(400):
            sim.step()
        ends.append(weight(sim))
    assert ends[0] == pytest.approx(1.0, abs=1e-4)
    assert ends[0] < ends[1] < ends[2] < 1.5


@pytest.mark.slow
def test_both_lift_the_worst_tenth_where_one_model_can_serve_all_but_the_mean_does_not() -> None:
    """Nine clients agree and one is turned by 120°: the best line for the worst has 60° / 180° of each wrong."""
    angles = [0.0] * 9 + [120.0]
    mean = angled("fedavg", angles, 60, weights="uniform")
    lifted = [angled("qfedavg", angles, 150, q=q) for q in (1.0, 5.0)]
    fair = angled("afl", angles, 300, gamma=0.1)
    worst = [min(found) for found in (mean, *lifted, fair)]
    assert worst[0] < 0.4
    assert all(after - before > 0.05 for before, after in itertools.pairwise(worst))
    assert worst[-1] == pytest.approx(2 / 3, abs=0.02)
    assert max(fair) == pytest.approx(2 / 3, abs=0.02)
    assert max(mean) > 0.95  # what it costs the others


@pytest.mark.parametrize("name", ["qfedavg", "afl"])
def test_the_order_of_clients_says_nothing(name: str) -> None:
    ahead, back = (one_weight(t, name) for t in ([1.0, -2.0, 4.0], [4.0, -2.0, 1.0]))
    for _ in range(5):
        ahead.step()
        back.step()
    assert weight(ahead) == pytest.approx(weight(back), abs=1e-6)


def test_without_a_step_of_the_mixture_the_iterates_are_fedsgds_and_w_is_their_mean() -> None:
    sim = simulation(make_method("afl", {"gamma": 0.0}), train=FULL)
    plain = simulation(make_method("fedavg", {"weights": "uniform"}), train=FULL)
    iterates = []
    for _ in range(4):
        sim.step()
        plain.step()
        iterates.append({n: t.clone() for n, t in sim.server["w"].items()})
        assert_close(iterates[-1], shared(plain), atol=1e-6)
        mean = {n: torch.stack([w[n] for w in iterates]).mean(0) for n in iterates[0]}
        assert_close(shared(sim), mean, atol=1e-6)


def test_after_a_large_step_the_mixture_is_the_worst_client() -> None:
    sim = simulation(make_method("afl", {"gamma": 1e6}), rounds=1, train=FULL)
    before = simulation("local", train=FULL)
    (losses,) = before.run(
        range(5), before.states.get(range(5)), before.init, lambda c, s, r: (TensorDict({"l": c.loss(r)}),)
    )
    assert int(sim.server["mixture"].argmax()) == int(losses["l"].argmax())
    assert float(sim.server["mixture"].max()) == 1.0


@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_the_mixture_stays_in_the_simplex_and_moves(fraction: float) -> None:
    sim = simulation(make_method("afl", {"gamma": 0.2}), data=federation(), fraction=fraction, rounds=4)
    mixture = sim.server["mixture"]
    assert float(mixture.sum()) == pytest.approx(1.0, abs=1e-12)
    assert bool((mixture >= 0).all())
    assert float((mixture - 1 / len(SIZES)).abs().max()) > 0.01


def test_two_clients_with_opposite_optima_are_met_in_the_middle() -> None:
    """A saddle: λ → (½, ½) and w̄ → 0, from a start that is near the first client's optimum."""
    sim = one_weight([1.0, -1.0], "afl", gamma=0.1)
    sim.server["w"] = TensorDict({n: torch.full_like(t, 0.8) for n, t in sim.server["w"].items()})
    for _ in range(600):
        sim.step()
    assert weight(sim) == pytest.approx(0.0, abs=0.02)
    np.testing.assert_allclose(sim.server["mixture"], [0.5, 0.5], atol=0.05)


def test_the_projection_is_the_nearest_point_of_the_simplex() -> None:
    rng = torch.Generator().manual_seed(1)
    for _ in range(20):
        point = torch.randn(5, generator=rng, dtype=torch.float64)
        found = on_simplex(point)
        assert float(found.sum()) == pytest.approx(1.0)
        assert bool((found >= 0).all())
        # Nearest: no way from it to a corner comes nearer to the point.
        for corner in torch.eye(5, dtype=torch.float64):
            assert float((point - found) @ (corner - found)) <= 1e-12
