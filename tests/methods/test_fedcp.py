"""FedCP: a gate between two heads, the noise that it draws, and tensors that clients hold without training them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from methods.settings import CLASSES, Card, Row, make, with_gate
from methods.small import NEWCOMER, SIZES, TRAIN, assert_close, assert_same, federation, personal, simulation
from tailorfl.core.method import Method
from tailorfl.engines.make import make_engine
from tailorfl.errors import ConfigError, ModelError
from tailorfl.hashing import uniform
from tailorfl.methods.fedcp import FedCP
from tailorfl.methods.gated_head import GatedHead, add_gate
from tailorfl.models.dropout import Gumbel, PlainGumbel, dropout_key, plain_dropout
from tailorfl.models.functional import Model
from tailorfl.models.split import Split
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.sample_privacy import SampleDP

CONTRACTS = {
    # h is sent and not trained; of the model with its gate 4 · 9 scalars. ½ (h_i + h) goes up.
    "fedcp": Row(
        Card(with_gate, with_gate, lambda s: s.d - 36, True, False, lambda s: 36),
        {"lam": 0.5},
        draws=True,
        proved="FedPer where the gate gives the personal head all: test_fedcp.py",
        never="the gate cannot be told to give all to one head",
    ),
}


FAR = 1e4
"""A logit beside which noise is nothing: the gate then gives exactly 1 or 0, and its gradient is 0."""


def opened(layer: GatedHead, first: bool) -> None:
    """r = 1 for `first`, else r = 0."""
    norm = layer.gate.inner[1]
    nn.init.zeros_(norm.weight)
    half = len(norm.bias) // 2
    with torch.no_grad():
        norm.bias[:half], norm.bias[half:] = (FAR, 0.0) if first else (0.0, FAR)


class Open(FedCP):
    """r = 1 always."""

    def wrap(self, model: Model) -> Model:
        return super().wrap(model).changed(lambda module: opened(module[-1], True))  # type: ignore[index]


def unbiased() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, CLASSES, bias=False))


def on_unbiased(method: Method, engine: str) -> Simulation:
    sim = Simulation(
        method, federation(), Model(unbiased), replace(TRAIN, weight_decay=0.0), engine=make_engine(engine)
    )
    for _ in range(3):
        sim.step()
    return sim


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_gate_that_gives_the_personal_head_all_is_fedper(engine: str) -> None:
    ours, theirs = (personal(on_unbiased(m, engine)) for m in (Open(lam=0.0), make("fedper")))
    assert_close({n: ours[n] for n in theirs}, theirs)


def head(seed: int = 0) -> GatedHead:
    torch.manual_seed(seed)
    return GatedHead(nn.Linear(3, 4))


def test_a_gate_that_gives_it_nothing_leaves_its_weight_without_a_gradient() -> None:
    z, y = torch.randn(5, 3), torch.tensor([0, 1, 2, 3, 0])
    for first in (False, True):
        layer = head().eval()
        opened(layer, first)
        own, other = torch.autograd.grad(cross_entropy(layer(z), y), [layer.weight, layer.common.weight])
        assert (float(own.abs().max()) == 0) == (not first)
        assert (float(other.abs().max()) == 0) == first


def test_shares_sum_to_1_and_are_a_softmax_over_pairs() -> None:
    layer = head().eval()
    z = torch.randn(5, 3)
    pair = layer.gate.inner(z * normalize(layer.context, dim=0)).reshape(5, 2, 3).softmax(1)
    r = layer.gate(z * normalize(layer.context, dim=0))
    torch.testing.assert_close(r, pair[:, 0])
    torch.testing.assert_close(1 - r, pair[:, 1])
    wanted = (pair[:, 0] * z) @ layer.weight.T + layer.bias
    wanted = wanted + (pair[:, 1] * z) @ layer.common.weight.T + layer.common.bias
    torch.testing.assert_close(layer(z), wanted)
    torch.testing.assert_close(layer.context, layer.weight.sum(0))


def test_the_discrepancy_is_flat_where_the_body_is_the_received_one() -> None:
    z = torch.randn(6, 3, requires_grad=True)
    for other, flat in ((z.detach(), True), (z.detach() + 1, False)):
        seen = SimpleNamespace(features=z, of=lambda _, other=other: (None, other), weight=None)
        (slope,) = torch.autograd.grad(make("fedcp", lam=2.0).apart(seen, None), z)  # type: ignore[attr-defined]
        assert (float(slope.abs().max()) < 1e-6) == flat


def test_evaluation_draws_nothing_and_training_by_its_key() -> None:
    sim = simulation("fedcp", rounds=2)
    assert_same(personal(sim), personal(sim))
    x, state = sim.federation.source.x[:4], {n: t[0] for n, t in personal(sim).items()}
    assert torch.equal(sim.model(state, x), sim.model(state, x))
    trained = frozenset(sim.split.trainable)
    found = []
    for key in (1, 1, 2):
        with dropout_key(torch.tensor(key)):
            found.append(sim.model.forward_train(dict(state), x, trained))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    with pytest.raises(ModelError, match="a Gumbel layer in training mode has no key"):
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


def test_the_common_head_is_sent_not_trained_and_becomes_the_mean_of_half_sums() -> None:
    sim = simulation(make("fedcp", weights="uniform"))
    assert sim.split.held == ("head.common.weight", "head.common.bias")
    assert not set(sim.split.held) & set(sim.split.trainable)
    assert set(sim.split.held) <= set(sim.split.shared)
    before = sim.server["head.common.weight"].clone()
    sim.step()
    own = sim.states.get(range(len(SIZES)))
    torch.testing.assert_close(
        sim.server["head.common.weight"], (own["head.weight"] + before).mean(0) / 2, atol=1e-6, rtol=1e-5
    )
    torch.testing.assert_close(own["head.context"], own["head.weight"].sum(1))
    ((_, late),) = sim.newcomer_models((NEWCOMER,), 0)
    assert torch.equal(late["head.weight"][0], sim.server["head.common.weight"])
    assert torch.equal(late["head.context"][0], sim.server["head.common.weight"].sum(0))
    assert not {"head.weight", "head.bias", "head.context"} & {n for n, _ in tree.leaves(sim.server)}


def test_held_tensors_are_a_part_of_what_is_shared() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    split = Split.of(net, "head", ["0.bias"], held=["0.*", "2.bias"])
    assert (split.shared, split.held, split.frozen) == (("0.weight",), ("0.weight",), ("0.bias",))
    assert split.trainable == ("2.weight", "2.bias")
    assert Split.of(net, "head").held == ()


def test_what_it_cannot_do_is_said() -> None:
    private = replace(TRAIN, dp=SampleDP(1.0, 1.0, "shuffle"))
    with pytest.raises(ConfigError, match="the discrepancy of the features"):
        simulation("fedcp", train=private)
    assert simulation(make("fedcp", lam=0.0), train=private, rounds=1).round == 1
    with pytest.raises(ModelError, match="inside a network"):
        add_gate(nn.Linear(2, 2))
