"""FedEM: expectations of samples, what moves and what stays, FedAvg with one network, an objective that falls."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from methods.settings import CLASSES, Card, Row, make
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
from tailorfl.errors import ConfigError
from tailorfl.methods.fedem import responsibilities
from tailorfl.models.functional import Model
from tailorfl.models.mixture import SHARES, Mixing, Mixture
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import twice, whole
from tailorfl.training import tree
from tailorfl.training.objective import LOSSES
from tailorfl.training.sample_privacy import SampleDP
from tailorfl.training.terms import Seen

CONTRACTS = {
    # Two networks travel, and are one model that trains; π is no parameter.
    "fedem": Row(
        Card(twice, twice, whole, True, False),
        {"components": 2},
        chooses=True,
        over_all=True,
        remarks=(({"components": 1, "normalise": "cohort"}, "logarithms of probabilities", "test_fedem.py"),),
        proved="one network is FedAvg: test_fedem.py",
    ),
}


ENGINES = ["sequential", "vectorized"]
IDS = range(len(SIZES))


def networks(state: dict[str, Tensor], m: int) -> dict[str, Tensor]:
    """The m-th network of a mixture, by its own names."""
    start = f"networks.{m}."
    return {n.removeprefix(start): t for n, t in state.items() if n.startswith(start)}


def test_responsibilities_of_a_sample() -> None:
    """π = (.5, .5) and losses 1 and 2; three networks with equal losses leave π."""

    def q(likely: list[float], shares: list[float]) -> Tensor:
        """Of a sample of class 0 that each network gives such a probability."""
        p = torch.tensor(likely)
        logits = torch.stack([p, (1 - p)], 1).log().flatten()[None]
        seen = Seen(
            model("mlp"),
            LOSSES["classification"],
            (logits, torch.tensor([0]), None),
            logits,
            lambda: logits,
            {},
        )
        return responsibilities(seen, torch.tensor(shares), len(likely))[0]

    e = torch.e
    torch.testing.assert_close(q([1 / e, 1 / e**2], [0.5, 0.5]), torch.tensor([0.7310586, 0.2689414]))
    torch.testing.assert_close(q([0.3, 0.3, 0.3], [0.2, 0.7, 0.1]), torch.tensor([0.2, 0.7, 0.1]))
    torch.testing.assert_close(q([0.1, 0.9], [1.0, 0.0]), torch.tensor([1.0, 0.0]))


def test_the_answer_is_the_mean_of_probabilities() -> None:
    mixing = Mixing(2)
    mixing.shares = torch.tensor([0.3, 0.7])
    logits = torch.randn(5, 2 * CLASSES, generator=torch.Generator().manual_seed(0))
    wanted = 0.3 * logits[:, :CLASSES].softmax(1) + 0.7 * logits[:, CLASSES:].softmax(1)
    torch.testing.assert_close(mixing(logits).exp(), wanted)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["mlp", "batch_norm", "dropout"])
def test_one_network_is_fedavg(kind: str, engine: str) -> None:
    """Also where few take part, if the cohort's weights sum to 1."""
    ours = simulation(
        make("fedem", components=1, normalise="cohort"), kind, engine=engine, fraction=0.6, rounds=3
    )
    theirs = simulation("fedavg", kind, engine=engine, fraction=0.6, rounds=3)
    assert_close(networks(dict(ours.server.items()), 0), dict(theirs.server["w"].items()))
    whole = simulation(make("fedem", components=1), kind, engine=engine, fraction=1.0, rounds=2)
    assert_close(
        networks(dict(whole.server.items()), 0),
        dict(simulation("fedavg", kind, engine=engine, fraction=1.0, rounds=2).server["w"].items()),
    )
    x = federation().source.x[:6]
    out = ours.model({n: t[0] for n, t in personal(ours).items()}, x)
    logits = theirs.model(dict(theirs.server["w"].items()), x)
    torch.testing.assert_close(out, logits.log_softmax(1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_networks_that_start_alike_stay_alike(engine: str) -> None:
    sim = simulation(make("fedem", components=3), engine=engine)
    first = networks(dict(sim.server.items()), 0)
    same = {f"networks.{m}.{n}": t for m in range(3) for n, t in first.items()}
    ids = tuple(IDS)
    new, reply = sim.run(ids, sim.states.get(ids), TensorDict(same), sim.method.local)
    assert_close({SHARES: new[SHARES]}, {SHARES: torch.full((5, 3), 1 / 3)}, atol=1e-6)
    for m in (1, 2):
        assert_close(networks(dict(reply.items()), m), networks(dict(reply.items()), 0), atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_of_one_component_moves_that_one_alone(engine: str) -> None:
    sim = simulation(make("fedem", components=2), engine=engine, train=replace(TRAIN, weight_decay=0.0))
    ids = (0, 3)
    state = sim.states.get(ids)
    state = TensorDict(
        {**dict(state.items()), SHARES: torch.tensor([[1.0, 0.0], [0.5, 0.5]])}, batch_size=[2]
    )
    new, reply = sim.run(ids, state, sim.method.broadcast(sim.server, ids), sim.method.local)
    assert_close({"π": new[SHARES][0]}, {"π": torch.tensor([1.0, 0.0])}, atol=1e-6)
    still = {n: t[0] for n, t in networks(dict(reply.items()), 1).items()}
    assert_close(still, networks(dict(sim.server.items()), 1), atol=1e-7)
    for m, client in ((0, 0), (0, 1), (1, 1)):
        moved = networks(dict(reply.items()), m)["fc1.weight"][client]
        assert not torch.allclose(moved, networks(dict(sim.server.items()), m)["fc1.weight"], atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_shares_of_a_client_sum_to_one_and_idle_ones_stay(engine: str) -> None:
    sim = simulation(make("fedem", components=3), engine=engine, fraction=0.4)
    for _ in range(3):
        before, ids = sim.states.get(IDS)[SHARES].clone(), sim.sample(sim.round)
        sim.step()
        after = sim.states.get(IDS)[SHARES]
        torch.testing.assert_close(after.sum(1), torch.ones(5))
        for i in IDS:
            assert torch.equal(before[i], after[i]) == (i not in ids)


def test_the_objective_never_rises_with_small_full_steps() -> None:
    """−Σ_i Σ_s log Σ_m π_im σ_m(y_s) of linear networks: a gradient step on its bound in place of the minimum."""
    train = replace(TRAIN, batch_size=0, momentum=0.0, weight_decay=0.0, lr=0.02)
    sim = simulation(make("fedem", components=3, weights="samples"), "logistic", train=train, fraction=1.0)
    data, values = sim.federation, []
    for _ in range(25):
        total = 0.0
        shares = sim.states.get(IDS)[SHARES]
        for i in IDS:
            state = tree.merge(sim.server, TensorDict({SHARES: shares[i]}))
            rows = data.train[i]
            out = sim.model(tree.tensors(state), data.source.x[rows])
            total -= float(out[range(len(rows)), data.source.y[rows]].sum())
        values.append(total)
        sim.step()
    assert all(b <= a + 1e-4 for a, b in pairwise(values))
    assert values[-1] < 0.5 * values[0]


def test_a_client_that_never_took_part_fits_its_shares_when_it_is_asked() -> None:
    sim = simulation(make("fedem", components=2), rounds=3)
    ((_, models),) = sim.newcomer_models((NEWCOMER,), 0)
    data = sim.federation
    x, y = data.source.x[data.train[NEWCOMER]], data.source.y[data.train[NEWCOMER]]
    each = torch.stack(
        [
            Model.of(model("mlp").module)(networks(dict(sim.server.items()), m), x).softmax(1)[
                range(len(y)), y
            ]
            for m in range(2)
        ],
        1,
    )
    wanted = (each / each.sum(1, keepdim=True)).mean(0)
    torch.testing.assert_close(models[SHARES][0], wanted, atol=1e-5, rtol=1e-4)
    untouched = simulation(make("fedem", components=2, newcomer_passes=0), rounds=3)
    ((_, models),) = untouched.newcomer_models((NEWCOMER,), 0)
    assert models[SHARES][0].tolist() == [0.5, 0.5]


def test_networks_are_drawn_one_after_another_and_frozen_ones_stay_frozen() -> None:
    base = Model(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), trainable=["1.*"])
    joined = base.several(3, Mixture)
    state = joined.init(7)
    assert set(state.keys()) == {
        SHARES,
        *(f"networks.{m}.1.{n}" for m in range(3) for n in ("weight", "bias")),
    }
    assert_same(networks(dict(state.items()), 0), dict(base.init(7).items()))
    assert not torch.equal(state["networks.0.1.weight"], state["networks.1.1.weight"])
    assert joined.parameters == tuple(f"networks.{m}.1.{n}" for m in range(3) for n in ("weight", "bias"))
    assert joined.buffers == (SHARES,)


def test_what_it_cannot_do_is_said() -> None:
    private = replace(TRAIN, momentum=0.0, weight_decay=0.0, dp=SampleDP(1.0, 1.0, "shuffle"))
    with pytest.raises(ConfigError, match="FedEM uses how a client mixes the networks"):
        simulation("fedem", train=private)
    with pytest.raises(ConfigError, match="weighs the losses of samples itself"):
        simulation("fedem", train=replace(TRAIN, objective="balanced_softmax"))

    def loaded(module: nn.Module) -> None:
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(0.1)

    alike = Model(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES)), prepare=loaded)
    with pytest.raises(ConfigError, match="needs networks that start differently"):
        Simulation(make("fedem"), federation(), alike, TRAIN)
    base = federation()
    source = replace(base.source, y=base.source.y[:, None].float(), task="regression", outputs=1)
    with pytest.raises(ConfigError, match="FedEM tells classes apart"):
        Simulation(make("fedem"), replace(base, source=source), model("logistic"), TRAIN)
