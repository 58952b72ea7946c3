"""FedEM: expectations of samples, what moves and what stays, FedAvg with one network, an objective that falls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from methods.settings import CLASSES, Card, Row, make
from methods.small import (
    NEWCOMER,
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
from tailorfl.models.mixture import SHARES, Mixture
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import twice, whole
from tailorfl.training.objective import LOSSES
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
        batch = (logits, torch.tensor([0]), None)
        seen = Seen(model("mlp"), LOSSES["classification"], batch, logits, lambda: logits, {})
        return responsibilities(seen, torch.tensor(shares), len(likely))[0]

    e = torch.e
    torch.testing.assert_close(q([1 / e, 1 / e**2], [0.5, 0.5]), torch.tensor([0.7310586, 0.2689414]))
    torch.testing.assert_close(q([0.3, 0.3, 0.3], [0.2, 0.7, 0.1]), torch.tensor([0.2, 0.7, 0.1]))
    torch.testing.assert_close(q([0.1, 0.9], [1.0, 0.0]), torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize(
    ("kind", "engine"), [("mlp", "sequential"), ("batch_norm", "vectorized"), ("dropout", "vectorized")]
)
@pytest.mark.parametrize(("fraction", "normalise"), [(0.6, "cohort"), (1.0, "all")])
def test_one_network_is_fedavg(kind: str, engine: str, fraction: float, normalise: str) -> None:
    """Also where few take part, if the cohort's weights sum to 1; its answers are logarithms of probabilities."""
    ours, theirs = (
        simulation(method, kind, engine=engine, fraction=fraction, rounds=3)
        for method in (make("fedem", components=1, normalise=normalise), "fedavg")
    )
    assert_close(networks(dict(ours.server.items()), 0), dict(theirs.server["w"].items()))
    x = federation().source.x[:6]
    outputs = ours.model({n: t[0] for n, t in personal(ours).items()}, x)
    logits = theirs.model(dict(theirs.server["w"].items()), x)
    torch.testing.assert_close(outputs, logits.log_softmax(1), atol=1e-5, rtol=1e-4)


def test_a_client_that_never_took_part_fits_its_shares_when_it_is_asked() -> None:
    sim = simulation(make("fedem", components=2), rounds=3)
    ((_, models),) = sim.newcomer_models((NEWCOMER,), 0)
    data = sim.federation
    x, y = data.source.x[data.train[NEWCOMER]], data.source.y[data.train[NEWCOMER]]
    outputs = [Model.of(model("mlp").module)(networks(dict(sim.server.items()), m), x) for m in range(2)]
    likely = torch.stack([out.softmax(1)[range(len(y)), y] for out in outputs], 1)
    expected = (likely / likely.sum(1, keepdim=True)).mean(0)
    torch.testing.assert_close(models[SHARES][0], expected, atol=1e-5, rtol=1e-4)
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
    with pytest.raises(ConfigError, match=r"train\.objective"):
        simulation("fedem", train=replace(TRAIN, objective="balanced_softmax"))

    def loaded(module: nn.Module) -> None:
        for p in module.parameters():
            nn.init.constant_(p, 0.1)

    alike = Model(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES)), prepare=loaded)
    with pytest.raises(ConfigError, match="start differently"):
        Simulation(make("fedem"), federation(), alike, TRAIN)
