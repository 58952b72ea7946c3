"""FedAS: what aligns, what weighs, and FedPer where neither does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch.nn.functional import cross_entropy

from methods.reductions import in_run, local
from methods.settings import Card, Row, make
from methods.small import (
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
from tailorfl.core.client import Client
from tailorfl.core.messages import Replies
from tailorfl.errors import ConfigError, TailorflError
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training.sample_privacy import SampleDP

CONTRACTS = {
    # F_i goes up beside the body.
    "fedas": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head + 1, whole, True, False),
        {"align_lr": 0.05},
        still={"align_epochs": 0},
        unweighted=True,
        same=(in_run(local(line="one round", align_epochs=0), rounds=1),),
    ),
}


PLAIN = replace(TRAIN, momentum=0.0, weight_decay=0.0)
ENGINES = ["sequential", "vectorized"]
HEAD = ("head.weight", "head.bias")


def information(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict]:
    return (TensorDict({"F": client.fisher(received)}),)


def replies(sim: Simulation, ids: tuple[int, ...], order: tuple[int, ...] | None = None) -> Replies:
    """What the clients send now, as they stand in `order`."""
    received = sim.method.broadcast(sim.server, ids)
    _, reply = sim.run(ids, sim.states.get(ids), received, sim.method.local)
    rows = list(range(len(ids)) if order is None else order)
    sizes = sim.federation.sizes()[[ids[k] for k in rows]]
    return Replies(reply[rows], tuple(ids[k] for k in rows), sizes, "samples", sim.context)


@pytest.mark.parametrize("engine", ENGINES)
def test_without_alignment_and_information_bodies_are_fedpers(engine: str) -> None:
    ours = simulation(make("fedas", align_epochs=0, fisher=False), engine=engine, fraction=0.6, rounds=3)
    theirs = simulation("fedper", engine=engine, fraction=0.6, rounds=3)
    assert_same(dict(ours.server.items()), dict(theirs.server.items()))


def test_the_model_of_the_last_training_is_deployed() -> None:
    """It is not the body of the server, also on a client that took no part in the last round."""
    sim = simulation(make("fedas"), fraction=0.6, rounds=3)
    ids = range(len(SIZES))
    assert_same(personal(sim), dict(sim.states.get(ids).items()))
    assert not torch.equal(sim.server["fc1.weight"], personal(sim)["fc1.weight"][0])


def test_equal_information_makes_equal_weights_and_none_as_well() -> None:
    sim = simulation("fedas", rounds=1)
    sent = replies(sim, (0, 2, 3))
    for amount in (7.0, 0.0):
        sent.stack["fisher"] = torch.full((3,), amount)
        found = sim.method.aggregate(sim.server, sent)
        assert_close(
            dict(found.items()), {n: t.mean(0) for n, t in sent.stack.exclude("fisher").items()}, atol=1e-6
        )
    sent.stack["fisher"] = torch.tensor([0.0, 3.0, 1.0])
    found = sim.method.aggregate(sim.server, sent)
    assert_close(
        dict(found.items()),
        {n: 0.75 * t[1] + 0.25 * t[2] for n, t in sent.stack.exclude("fisher").items()},
        atol=1e-6,
    )


def test_the_order_of_clients_says_nothing() -> None:
    sim = simulation("fedas", rounds=1)
    one, other = (
        sim.method.aggregate(sim.server, replies(sim, (0, 2, 3), o)) for o in ((0, 1, 2), (2, 0, 1))
    )
    assert_close(dict(one.items()), dict(other.items()), atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_at_the_old_body_the_targets_are_the_own_means(engine: str) -> None:
    """A client of one sample stands on its target when the received body is its old one; others are pulled together."""
    sim = simulation(make("fedas", align_lr=0.5), engine=engine, train=PLAIN)
    ids = (0, 1)

    def aligned(client, state, received):  # type: ignore[no-untyped-def]
        return (sim.method.aligned(client, state, state),)  # type: ignore[attr-defined]

    (found,) = sim.run(ids, sim.states.get(ids), sim.method.broadcast(sim.server, ids), aligned)
    assert_close({n: t[1] for n, t in found.items()}, dict(sim.init.items()), atol=1e-6)
    assert not torch.allclose(found["fc1.weight"][0], sim.init["fc1.weight"], atol=1e-4)
    assert_same({n: found[n][0] for n in HEAD}, {n: sim.init[n] for n in HEAD})


def test_alignment_brings_features_near_the_old_class_means() -> None:
    """Of one large class by class distance, from another body."""
    sim = simulation(make("fedas", align_lr=0.02, align_epochs=60), train=PLAIN)
    other = sim.model.init(5)
    old = sim.states.get((0,))

    def aligned(client, state, received):  # type: ignore[no-untyped-def]
        return (sim.method.aligned(client, state, received),)  # type: ignore[attr-defined]

    (found,) = sim.run((0,), old, other, aligned)
    data = sim.federation
    x, y = data.source.x[data.train[0]].flatten(1), data.source.y[data.train[0]]

    def features(m: TensorDict, k: int | None = None) -> torch.Tensor:
        w, b = (m[n] if k is None else m[n][k] for n in ("fc1.weight", "fc1.bias"))
        return torch.tanh(x @ w.T + b)

    means = {int(c): features(old, 0)[y == c].mean(0) for c in y.unique()}
    gap = [
        sum(float((z[y == c].mean(0) - m).square().mean()) for c, m in means.items())
        for z in (features(other), features(found, 0))
    ]
    assert gap[1] < 0.5 * gap[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_information_of_a_linear_softmax_in_closed_form(engine: str) -> None:
    """‖Σ (p − e_y) ⊗ (x, 1)‖² / n² on all samples at once, and the sum of it over single samples."""
    for size in (0, 1):
        sim = simulation("local", "logistic", engine=engine, train=replace(TRAIN, batch_size=size))
        ids = tuple(range(len(SIZES)))
        (told,) = sim.run(ids, sim.states.get(ids), sim.init, information)
        data, (weight, bias) = sim.federation, [sim.init[n] for n in sim.model.parameters]
        for i in ids:
            x, y = data.source.x[data.train[i]].flatten(1), data.source.y[data.train[i]]
            slope = (x @ weight.T + bias).softmax(1)
            slope[range(len(y)), y] -= 1
            seen = torch.cat([x, torch.ones(len(x), 1)], 1)
            each = slope[:, :, None] * seen[:, None, :]
            wanted = each.mean(0).square().sum() if size == 0 else each.square().sum()
            torch.testing.assert_close(told["F"][i], wanted, rtol=1e-4, atol=1e-6)


def test_information_is_of_a_model_that_is_evaluated() -> None:
    """Without dropout; what is frozen has no share."""
    sim = simulation("local", "dropout", train=replace(TRAIN, batch_size=0))
    (told,) = sim.run((0,), sim.states.get((0,)), sim.init, information)
    values = {n: t.clone().requires_grad_() for n, t in sim.init.items()}
    rows = sim.federation.train[0]
    loss = cross_entropy(sim.model(values, sim.federation.source.x[rows]), sim.federation.source.y[rows])
    gradients = torch.autograd.grad(loss, list(values.values()))
    assert float(told["F"][0]) == pytest.approx(sum(float(g.square().sum()) for g in gradients), rel=1e-4)


def test_a_newcomer_has_the_servers_body_and_the_initial_head() -> None:
    sim = simulation("fedas", rounds=2)
    ((_, models),) = sim.newcomer_models((NEWCOMER,), 0)
    found = {n: t[0] for n, t in models.items()}
    assert_same({n: t for n, t in found.items() if n not in HEAD}, dict(sim.server.items()))
    assert_same({n: found[n] for n in HEAD}, {n: sim.init[n] for n in HEAD})


def test_what_it_cannot_do_is_said() -> None:
    private = replace(PLAIN, dp=SampleDP(1.0, 1.0, "shuffle"))
    with pytest.raises(TailorflError, match="FedAS uses the class means and the Fisher information"):
        simulation("fedas", train=private)
    sim = simulation("local", train=private)
    with pytest.raises(TailorflError, match=r"client\.fisher\(\.\.\.\) looks at"):
        sim.run((0,), sim.states.get((0,)), sim.init, information)
    base = federation()
    source = replace(base.source, y=base.source.y[:, None].float(), task="regression", outputs=1)
    with pytest.raises(ConfigError, match="FedAS tells classes apart"):
        Simulation(make("fedas"), replace(base, source=source), model("logistic"), TRAIN)
