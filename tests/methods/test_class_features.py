"""Features by class and heads beside them: FedRoD, GPFL, FedCP, FedDBE and FedPHP."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from methods.reductions import REFERENCE, Same, fedavg, itself
from methods.settings import CLASSES, Card, Row, make, width, with_gate, with_guide
from methods.small import (
    NEWCOMER,
    SIZES,
    TRAIN,
    assert_same,
    personal,
    shared,
    simulation,
)
from tailorfl.core.client import Client
from tailorfl.errors import ModelError, TailorflError
from tailorfl.hashing import uniform
from tailorfl.methods.feature_distances import mmd, mmd_by_mean_distance, squared_distances
from tailorfl.methods.gpfl import ConditionalHead, guided
from tailorfl.models.dropout import Gumbel, PlainGumbel, dropout_key, plain_dropout
from tailorfl.models.split import Split
from tailorfl.testing.contract import whole
from tailorfl.training import tree
from tailorfl.training.objective import Seen, Term
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP

CONTRACTS = {
    "gpfl": Row(
        Card(with_guide, with_guide, whole, True, False),
        {"lam": 0.1},
        chooses=True,
        proved=REFERENCE,
        never="the loss of its embeddings cannot be turned off",
    ),
    # h is sent and not trained; of the model with its gate 4 · 9 scalars. ½ (h_i + h) goes up.
    "fedcp": Row(
        Card(with_gate, with_gate, lambda s: s.d - 36, True, False, lambda s: 36),
        {"lam": 0.5},
        by_id=True,
        proved=REFERENCE,
        never="the gate cannot be told to give all to one head",
    ),
    # The first round keeps no model and sends the mean features up; those of all go down beside every model.
    "feddbe": Row(
        Card(lambda s: s.d + width(s), whole, whole, True, False, lambda s: -s.d),
        {"kappa": 2.0, "mu": 0.5},
        by_round=lambda r, s: (s.d + width(s), s.d if r else width(s)),
        proved=REFERENCE,
        never="its first round keeps nothing, so it is FedAvg of a round less at most",
    ),
    "fedphp": Row(
        Card(whole, whole, whole, True, True),
        {"lam": 0.3, "horizon": 2.0},
        same=(fedavg("λ = 0", lam=0.0, said=True), fedavg("λ = 0", lam=0.0, teach="mmd", said=True)),
    ),
    # A second head trains beside the model.
    "fedrod": Row(
        Card(whole, whole, lambda s: s.d + s.head, True, True),
        same=(
            fedavg("γ = 0", exact=False, gamma=0.0, said=True),
            itself("κ = 0", "fedrod", personal_rate=0.0),
            Same("global path", {"personal_rate": 3.0}, "fedrod", {"personal_rate": 0.5}),
        ),
    ),
}


WIDE = 8
"""d_z."""
STILL = replace(TRAIN, lr=1e-30, momentum=0.0, weight_decay=0.0)


def test_at_its_embeddings_a_batch_has_no_pull() -> None:
    """The slope of a norm at 0 is 0."""
    layer = ConditionalHead(nn.Linear(3, 4))
    z, g = torch.rand(3, 3), torch.zeros(3)
    embeddings = torch.zeros(4, 3)
    embeddings[:3] = layer.conditioning(z, g).detach()
    seen = SimpleNamespace(
        state={f"head.{n}": t for n, t in (*layer.named_parameters(), *layer.named_buffers())},
        features=z,
        y=torch.tensor([0, 1, 2]),
        weight=None,
        mean=lambda rows: rows.mean(0),
        through=lambda name, *inputs: layer.get_submodule(name.removeprefix("head."))(*inputs),
    )
    values = [guided(seen, g, embeddings, "head.embeddings", lam, 0.0) for lam in (0.0, 2.0)]  # type: ignore[arg-type]
    scale = layer.conditioning.scale[0].weight
    torch.testing.assert_close(*(torch.autograd.grad(value, scale)[0] for value in values))


def test_the_head_never_travels_and_traffic_is_that_of_body_embeddings_and_conditioning() -> None:
    sim = simulation("gpfl", rounds=2)
    assert not {"head.weight", "head.bias", "head.condition"} & {n for n, _ in tree.leaves(sim.server)}
    body = 64 * WIDE + WIDE
    sent = body + CLASSES * WIDE + 2 * (WIDE**2 + 3 * WIDE)
    assert sim.traffic.up == sim.traffic.down_unicast == 2 * len(SIZES) * sent
    assert sim.trained_scalars == sent + CLASSES * (WIDE + 1)
    ((_, late),) = sim.newcomer_models((NEWCOMER,), 0)
    assert torch.equal(late["head.weight"][0], sim.init["head.weight"])


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_term_may_run_a_layer_once_more_on_other_inputs(engine: str) -> None:
    """The gradient of Σ W v + c through `seen.through` alone, against that by hand."""

    def more(seen: Seen, v: Tensor) -> Tensor:
        return seen.through("head", v[None]).sum() + 0.0 * seen.loss + 2.0 * seen.state["fc1.bias"].sum()

    one_step = replace(TRAIN, epochs=None, steps=1, momentum=0.0, weight_decay=0.0, lr=1.0)
    sim = simulation("fedavg", engine=engine, train=one_step, rounds=1)  # without a term first
    start = sim.init
    v = torch.arange(float(WIDE))

    def local(client: Client, state: Any, received: Any) -> Any:
        return (client.fit(received, term=Term(more, given=(v,), replaces=True)),)

    (trained,) = sim.run((0, 2), sim.states.get((0, 2)), start, local)
    for k in range(2):
        torch.testing.assert_close(trained["head.weight"][k], start["head.weight"] - v)
        torch.testing.assert_close(trained["head.bias"][k], start["head.bias"] - 1)
        torch.testing.assert_close(trained["fc1.bias"][k], start["fc1.bias"] - 2)
        torch.testing.assert_close(trained["fc1.weight"][k], start["fc1.weight"])


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


def test_without_its_discrepancy_it_trains_privately() -> None:
    private = replace(TRAIN, dp=SampleDP(1.0, 1.0, "shuffle"))
    assert simulation(make("fedcp", lam=0.0), train=private, rounds=1).round == 1


def test_privacy_of_samples_does_not_cover_what_a_term_keeps() -> None:
    private = replace(STILL, dp=SampleDP(1.0, 1.0, "shuffle"))
    term = Term(lambda seen: (seen.mean(seen.outputs[:, 0]), {"kept": seen.own["kept"]}), keeps=("kept",))
    with pytest.raises(ModelError, match="keeps"):
        fit(simulation("fedavg", train=private), term)


def fit(sim, term: Term):
    start = tree.merge(sim.init, TensorDict({"kept": torch.zeros(2)}))

    def local(client: Client, state, received):
        return (client.fit(received, term=term, length=Length(epochs=2)),)

    (trained,) = sim.run((0, 2), sim.states.get((0, 2)), start, local)
    return trained


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_term_keeps_what_it_says_and_nothing_else_moves_it(engine: str) -> None:
    """It counts batches; clients of 15 and 7 samples have 4 and 2 of them an epoch. The momentum does not reach it."""

    def counting(seen):
        return seen.mean(seen.outputs[:, 0]) * 0.0, {"kept": seen.own["kept"] + 1}

    trained = fit(simulation("fedavg", engine=engine), Term(counting, keeps=("kept",)))
    assert trained["kept"].tolist() == [[8.0, 8.0], [4.0, 4.0]]


def test_a_term_that_does_not_return_what_it_keeps_is_told_so() -> None:
    for term in (
        Term(lambda seen: seen.loss, keeps=("kept",)),
        Term(lambda seen: (seen.loss, {}), keeps=("head.bias",)),
    ):
        with pytest.raises(TailorflError, match=r"new tensor|tensors of the start"):
            fit(simulation("fedavg"), term)
    with pytest.raises(TailorflError, match="public"):
        Term(lambda seen: seen.loss, public=2, keeps=("kept",))


def test_equal_features_have_no_discrepancy_and_no_slope() -> None:
    z = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    value = mmd_by_mean_distance(z, z.detach().clone(), None)
    assert float(value.detach()) == pytest.approx(0.0, abs=1e-6)
    assert float(torch.autograd.grad(value, z)[0].abs().max()) < 1e-6
    same = torch.ones(3, 2, requires_grad=True)
    (slope,) = torch.autograd.grad(mmd_by_mean_distance(same, torch.ones(3, 2), None), same)
    assert torch.equal(slope, torch.zeros(3, 2))


def test_four_points_in_closed_form_and_padding_that_counts_nothing() -> None:
    """z = 0, 0 and y = d, d: of 12 pairs 8 are d² apart, b = 2d²/3, so MMD² = 2 Σ_k (1 − exp(−1.5/2^{k−2}))."""
    expected = 2 * sum(1 - math.exp(-1.5 / 2 ** (k - 2)) for k in range(5))
    z, y = torch.tensor([[0.0], [77.0], [0.0]]), torch.tensor([[3.0], [-5.0], [3.0]])
    padded = mmd_by_mean_distance(z, y, torch.tensor([1.0, 0.0, 1.0]))
    assert float(padded) == pytest.approx(expected, abs=1e-6)
    assert float(mmd_by_mean_distance(z[::2], y[::2], None)) == pytest.approx(expected, abs=1e-6)
    pair = mmd(z[:1], y[:1], None, lambda square: torch.exp(-square))
    assert float(pair) == pytest.approx(2 - 2 * math.exp(-9.0), abs=1e-6)
    assert squared_distances(z[:2], y[:2]).tolist() == [[9.0, 25.0], [5476.0, 6724.0]]


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 0.0])])
@pytest.mark.parametrize("gap", [0.0, 1e-4, 1.0])
def test_one_sample_has_no_discrepancy(weight: Tensor | None, gap: float) -> None:
    rows = 1 if weight is None else 2
    z = torch.zeros(rows, 3, requires_grad=True)
    value = mmd_by_mean_distance(z, torch.full((rows, 3), gap), weight)
    assert float(value.detach()) == 0.0
    assert torch.equal(torch.autograd.grad(value, z)[0], torch.zeros(rows, 3))


def test_the_mean_of_features_is_collected_in_the_first_round_that_counts() -> None:
    """A round with too few replies leaves all as it was; later ones keep the mean and train."""
    sim = simulation(make("feddbe"))
    start, sim.min_replies = sim.server["w"], len(SIZES) + 1
    sim.step()
    assert not sim.server["mean"].any()
    sim.min_replies = 1
    sim.step()
    mean = sim.server["mean"].clone()
    assert mean.any()
    assert_same(dict(sim.server["w"].items()), dict(start.items()))
    sim.step()
    assert torch.equal(sim.server["mean"], mean)
    assert not torch.equal(sim.server["w"]["head.weight"], start["head.weight"])


def test_a_class_without_samples_gives_no_nan() -> None:
    """Client 2 of this federation has one class, for which the balanced loss is 0."""
    sim = simulation(make("fedrod"), rounds=2)
    assert all(torch.isfinite(t).all() for t in (*shared(sim).values(), *personal(sim).values()))
