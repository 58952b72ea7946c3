"""FedGH and FedTGP: what the server learns from class means, step by step, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from methods.reductions import in_run, local
from methods.settings import Card, Row, make, prototypes
from methods.small import (
    CLASSES,
    NEWCOMER,
    SIZES,
    TRAIN,
    assert_close,
    assert_same,
    federation,
    model,
    personal,
    simulation,
)
from tailorfl.core.messages import Replies
from tailorfl.engines.make import make_engine
from tailorfl.errors import ConfigError
from tailorfl.methods.fedgh import stepped
from tailorfl.methods.fedtgp import FedTGP, apart
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole

CONTRACTS = {
    # Its head has names that networks of all kinds have in common.
    "fedgh": Row(
        Card(lambda s: s.head, prototypes, whole, True, False, lambda s: -s.head),
        {"server_lr": 0.1},
        still={"server_lr": 0.0},
        alike={"server_lr": 0.0},
        sparse=True,
        unweighted=True,
        same=(in_run(local(line="one round"), rounds=1),),
    ),
    "fedtgp": Row(
        Card(prototypes, prototypes, whole, True, False),
        {"lam": 0.5, "server_passes": 2, "server_batch": 3},
        still={"predict": "head"},
        alike={"server_passes": 0},
        sparse=True,
        same=(
            local(lam=0.0, predict="head"),
            in_run(local(line="one round", lam=5.0, predict="head"), rounds=1),
        ),
    ),
}


ENGINES = ["sequential", "vectorized"]
KINDS = ("normed", "plain", "plain", "normed", "plain", "normed")
WIDE = {"plain": model("mlp"), "normed": model("batch_norm")}
"""Of 8 features each."""
WIDTH = 8


def classes_of(sim: Simulation, client: int) -> set[int]:
    return set(sim.federation.source.y[sim.federation.train[client]].tolist())


def of_two_kinds(method: str, engine: str, models: dict[str, Model] = WIDE, **options: object) -> Simulation:
    sim = Simulation(
        make(method, **options), federation(), models, TRAIN, assignment=KINDS, engine=make_engine(engine)
    )
    for _ in range(2):
        sim.step()
    return sim


def test_a_step_of_the_head_is_that_of_torch() -> None:
    """Also where the gradient is clipped; without a bias as well."""
    rng = torch.Generator().manual_seed(1)
    for bias in (True, False):
        for size in (1.0, 90.0):
            z = size * torch.randn(5, generator=rng)
            layer = nn.Linear(5, 3, bias=bias)
            start = {n: t.detach().clone() for n, t in layer.named_parameters()}
            y = int(
                layer(z).argmin()
            )  # the least likely: a sample that is learned already has no gradient to clip
            cross_entropy(layer(z)[None], torch.tensor([y])).backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(layer.parameters(), 50.0)
            assert (float(norm) > 50) == (size > 1)
            torch.optim.SGD(layer.parameters(), lr=0.3).step()
            found = stepped(start, z, y, 0.3)
            assert_close(found, {n: t.detach() for n, t in layer.named_parameters()}, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_rate_the_head_stays_as_drawn(engine: str) -> None:
    """The released behaviour: every round starts from the body of before under the initial head."""
    sim = simulation(make("fedgh", server_lr=0.0), engine=engine, rounds=3)
    start = simulation("fedgh").server
    assert_same(dict(sim.server.items()), dict(start.items()))
    moving = simulation(make("fedgh", server_lr=0.5), engine=engine, rounds=3)
    assert not torch.equal(moving.server["weight"], start["weight"])


def test_no_class_means_leave_the_head_alone() -> None:
    sim = simulation("fedgh", rounds=1)
    ids = (0, 3)
    received = sim.method.broadcast(sim.server, ids)
    _, reply = sim.run(ids, sim.states.get(ids), received, sim.method.local)
    reply["present"] = torch.zeros_like(reply["present"])
    after = sim.method.aggregate(sim.server, Replies(reply, ids, np.array([15, 9]), "uniform", sim.context))
    assert_same(dict(after.items()), dict(sim.server.items()))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_head_goes_down_and_the_means_of_own_classes_up(engine: str) -> None:
    sim = simulation("fedgh", engine=engine, fraction=0.6)
    for _ in range(3):
        ids = sim.sample(sim.round)
        traffic = sim.step().traffic
        assert traffic.down_unicast == len(ids) * CLASSES * (WIDTH + 1)
        assert traffic.up == WIDTH * sum(len(classes_of(sim, i)) for i in ids)


@pytest.mark.parametrize("engine", ENGINES)
def test_networks_of_several_kinds_have_one_head(engine: str) -> None:
    """Two rounds, and each kind deploys the server's head on a body of its own."""
    sim = of_two_kinds("fedgh", engine, deploy="received")
    for ids, models in sim.personal_models(range(len(SIZES))):
        weights = [t for n, t in models.items() if t.shape[1:] == (CLASSES, WIDTH)]
        assert len(weights) == 1
        assert torch.equal(weights[0], sim.server["weight"].expand(len(ids), CLASSES, WIDTH))
    trained = of_two_kinds("fedgh", engine)
    assert_same(dict(trained.server.items()), dict(sim.server.items()))


def test_a_newcomer_deploys_the_head_on_its_own_body() -> None:
    sim = simulation("fedgh", rounds=2)
    ((_, models),) = sim.newcomer_models((NEWCOMER,), 0)
    found = {n: t[0] for n, t in models.items()}
    head = {n: t for n, t in found.items() if t.shape in {(CLASSES, WIDTH), (CLASSES,)}}
    assert_same(dict(zip(("weight", "bias"), head.values(), strict=True)), dict(sim.server.items()))
    assert_same(
        {n: t for n, t in found.items() if n not in head},
        {n: t for n, t in sim.init.items() if n not in head},
    )


def test_heads_with_and_without_a_bias_are_refused() -> None:
    bare = Model(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, CLASSES, bias=False)))
    with pytest.raises(ConfigError, match="plain has one, normed has none"):
        of_two_kinds("fedgh", "sequential", {"plain": model("mlp"), "normed": bare})


def test_the_margin_is_the_largest_gap_to_the_nearest() -> None:
    """Q = (0, 3, 4) on a line: gaps (3, 1, 1)."""
    line = torch.tensor([[0.0], [3.0], [4.0]])
    assert make("fedtgp").margin(line) == pytest.approx(3.0)  # type: ignore[attr-defined]
    assert make("fedtgp", tau=2.0).margin(line) == 2.0  # type: ignore[attr-defined]
    assert FedTGP().margin(line[:1]) == 100.0


def test_a_margin_raises_the_loss_and_without_one_it_is_a_softmax_of_distances() -> None:
    rng = torch.Generator().manual_seed(2)
    means, prototypes = torch.randn(6, 4, generator=rng), torch.randn(3, 4, generator=rng)
    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    distances = torch.stack([(means - p).norm(dim=1) for p in prototypes], 1)
    plain = -(-distances).softmax(1)[range(6), labels].log().mean()
    losses = [float(apart(means, labels, prototypes, delta)) for delta in (0.0, 0.5, 3.0)]
    assert losses[0] == pytest.approx(float(plain), abs=1e-6)
    assert losses == sorted(losses)
    at = prototypes.clone().requires_grad_()
    (slope,) = torch.autograd.grad(apart(prototypes, torch.arange(3), at, 0.0), at)
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_without_pull_the_weights_are_those_of_training_alone(engine: str) -> None:
    """Whatever answers: the states are LocalTrain's."""
    ours, alone = (
        simulation(make("fedtgp", lam=0.0), engine=engine, rounds=2),
        simulation("local", engine=engine, rounds=2),
    )
    ids = range(len(SIZES))
    assert_same(dict(ours.states.get(ids).items()), dict(alone.states.get(ids).items()))
    assert not torch.equal(
        *(next(t for t in personal(s).values() if t.shape[1:] == (CLASSES, WIDTH)) for s in (ours, alone))
    )


def test_without_passes_the_prototypes_stay_as_drawn_and_with_them_they_move_apart() -> None:
    def after(rounds: int, **options: object) -> torch.Tensor:
        found: torch.Tensor = simulation(make("fedtgp", **options), rounds=rounds).server["prototypes"]
        return found

    still = after(1, server_passes=0)
    assert torch.equal(still, after(3, server_passes=0))
    moved = after(3, server_passes=100, server_lr=0.1)
    gap = [float(torch.cdist(p, p).fill_diagonal_(torch.inf).min()) for p in (still, moved)]
    assert gap[1] > gap[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_all_prototypes_go_down_and_those_of_own_classes_up(engine: str) -> None:
    sim = simulation("fedtgp", engine=engine, fraction=0.6)
    for t in range(3):
        ids = sim.sample(sim.round)
        traffic = sim.step().traffic
        assert traffic.down_unicast == (len(ids) * CLASSES * WIDTH if t else 0)
        assert traffic.up == WIDTH * sum(len(classes_of(sim, i)) for i in ids)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_nearest_prototype_of_any_class_answers(engine: str) -> None:
    """Also one of a class that the client has no sample of."""
    sim = simulation("fedtgp", engine=engine, rounds=2)
    models, states = personal(sim), sim.states.get(range(len(SIZES)))
    x = sim.federation.source.x[sim.federation.train[0]]
    for i in range(len(SIZES)):
        z = torch.tanh(x.flatten(1) @ states["fc1.weight"][i].T + states["fc1.bias"][i])
        wanted = torch.cdist(z, sim.server["prototypes"]).argmin(1)
        out = sim.model({n: t[i] for n, t in models.items()}, x)
        assert torch.equal(out.argmax(1), wanted)
    first = simulation("fedtgp")
    assert_same(personal(first), {n: t.expand(5, *t.shape) for n, t in first.init.items()})


def test_tasks_without_classes_are_refused() -> None:
    base = federation()
    source = replace(base.source, y=base.source.y[:, None].float(), task="regression", outputs=1)
    for name, title in (("fedgh", "FedGH"), ("fedtgp", "FedTGP")):
        with pytest.raises(ConfigError, match=f"{title} tells classes apart"):
            Simulation(make(name), replace(base, source=source), model("logistic"), TRAIN)
