"""FedCP: a gate between two heads, the noise that it draws, and tensors that clients hold without training them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from methods.settings import CLASSES, Card, Row, make, with_gate
from methods.small import TRAIN, after, assert_close, assert_same, federation, personal, simulation
from tailorfl.engines.make import make_engine
from tailorfl.errors import ModelError
from tailorfl.hashing import uniform
from tailorfl.methods.fedcp import FedCP
from tailorfl.models.dropout import Gumbel, PlainGumbel, dropout_key, plain_dropout
from tailorfl.models.functional import Model
from tailorfl.models.gated_head import add_gate
from tailorfl.models.split import Split
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.sample_privacy import SampleDP

CONTRACTS = {
    # h is sent and not trained; of the model with its gate 4 · 9 scalars. ½ (h_i + h) goes up.
    "fedcp": Row(
        Card(with_gate, with_gate, lambda s: s.d - 36, True, False, lambda s: 36),
        {"lam": 0.5},
        by_id=True,
        proved="FedPer where the gate gives the personal head all: test_fedcp.py",
        never="the gate cannot be told to give all to one head",
    ),
}


FAR = 1e4
"""A logit beside which noise is nothing: the gate then gives exactly 1 or 0, and its gradient is 0."""


def opened(network: nn.Module) -> None:
    """r = 1."""
    norm = network[-1].gate.inner[1]  # type: ignore[index]
    nn.init.zeros_(norm.weight)
    half = len(norm.bias) // 2
    with torch.no_grad():
        norm.bias[:half], norm.bias[half:] = FAR, 0.0


class Open(FedCP):
    """r = 1 always."""

    def wrap(self, model: Model) -> Model:
        return super().wrap(model).changed(opened)


def unbiased() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, CLASSES, bias=False))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_gate_that_gives_the_personal_head_all_is_fedper(engine: str) -> None:
    train, engine_of = replace(TRAIN, weight_decay=0.0), make_engine(engine)
    ours, theirs = (
        personal(after(Simulation(method, federation(), Model(unbiased), train, engine=engine_of), 3))
        for method in (Open(lam=0.0), make("fedper"))
    )
    assert_close({n: ours[n] for n in theirs}, theirs)


def test_evaluation_draws_nothing_and_training_by_its_key() -> None:
    sim = simulation("fedcp", rounds=2)
    assert_same(personal(sim), personal(sim))
    x, state = sim.federation.source.x[:4], {n: t[0] for n, t in personal(sim).items()}
    assert torch.equal(sim.model(state, x), sim.model(state, x))
    trained = frozenset(sim.split.trainable)
    outputs = []
    for key in (1, 1, 2):
        with dropout_key(torch.tensor(key)):
            outputs.append(sim.model.forward_train(dict(state), x, trained))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    with pytest.raises(ModelError, match="Gumbel"):
        Gumbel()(torch.zeros(2))


def test_the_noise_is_gumbels_also_without_keys() -> None:
    """Mean γ = 0.5772, variance π²/6 = 1.645; a pair differs by a logistic number, so its sign is a fair coin."""
    layer, zeros = Gumbel(), torch.zeros(100_000)
    with dropout_key(torch.tensor(7)):
        keyed = layer(zeros)
    torch.manual_seed(0)
    for noise in (keyed, PlainGumbel()(zeros)):
        assert abs(float(noise.mean()) - 0.5772) < 0.02
        assert abs(float(noise.var()) - 1.645) < 0.05
    assert float(((keyed[::2] - keyed[1::2]) > 0).float().mean()) == pytest.approx(0.5, abs=0.01)
    assert torch.equal(layer.eval()(zeros), zeros)
    assert type(plain_dropout(nn.Sequential(Gumbel()))[0]) is PlainGumbel  # type: ignore[index]
    u = uniform(torch.tensor(3), 0, torch.Size([1 << 16]), torch.device("cpu"), torch.float32)
    assert float(u.min()) > 0
    assert float(u.max()) < 1


def test_held_tensors_are_a_part_of_what_is_shared() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    split = Split.of(net, "head", ["0.bias"], held=["0.*", "2.bias"])
    assert (split.shared, split.held, split.frozen) == (("0.weight",), ("0.weight",), ("0.bias",))
    assert split.trainable == ("2.weight", "2.bias")
    assert Split.of(net, "head").held == ()


def test_without_its_discrepancy_it_trains_privately_and_a_gate_stands_inside_a_network() -> None:
    private = replace(TRAIN, dp=SampleDP(1.0, 1.0, "shuffle"))
    assert simulation(make("fedcp", lam=0.0), train=private, rounds=1).round == 1
    with pytest.raises(ModelError, match="inside a network"):
        add_gate(nn.Linear(2, 2))
