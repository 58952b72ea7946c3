"""FedRoD: its two losses in closed form, and who the generic model listens to."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from methods.reductions import Same, fedavg
from methods.settings import Card, Row, make
from methods.small import TRAIN, assert_close, federation, model, personal, shared, simulation
from tailorfl.data.federation import Federation
from tailorfl.errors import ConfigError
from tailorfl.methods.fedrod import OWN, two_heads
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training.objective import LOSSES
from tailorfl.training.terms import Seen

CONTRACTS = {
    # A second head trains beside the model.
    "fedrod": Row(
        Card(whole, whole, lambda s: s.d + s.head, True, True),
        same=(
            fedavg("γ = 0", exact=False, gamma=0.0, said=True),
            Same(
                "κ = 0",
                {"personal_rate": 0.0},
                "fedrod",
                {"personal_rate": 0.0},
                "personal",
                "global",
                said=True,
            ),
            Same("global path", {"personal_rate": 3.0}, "fedrod", {"personal_rate": 0.5}),
        ),
    ),
}


NAMES = ("head.weight", "head.bias")


def seen(g: Tensor, z: Tensor, y: Tensor, p: tuple[Tensor, Tensor]) -> Seen:
    own = {OWN + n: t for n, t in zip(NAMES, p, strict=True)}
    return Seen(model("mlp"), LOSSES["classification"], (z, y, None), g, lambda: z, own)


def heads(classes: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(classes, width, requires_grad=True), torch.zeros(classes, requires_grad=True)


@pytest.mark.parametrize(("label", "wanted"), [(0, 0.2876821), (1, 1.3862944)])
@pytest.mark.parametrize("times", [1.0, 7.0])
def test_the_balanced_softmax_of_two_classes(label: int, wanted: float, times: float) -> None:
    """g = (0, 0) and counts (3, 1), or a multiple of them: −log(3/4) and −log(1/4); the personal loss adds log 2."""
    prior = (torch.tensor([3.0, 1.0]) * times).log()
    batch = seen(torch.zeros(1, 2), torch.ones(1, 3), torch.tensor([label]), heads(2, 3))
    assert float(two_heads(batch, prior, NAMES).detach()) - math.log(2) == pytest.approx(wanted, abs=1e-6)


def test_gradients_of_the_two_losses_do_not_mix() -> None:
    """Of g: σ(g + prior) − onehot, of p: (σ(g + p z) − onehot) zᵀ, of z through the head that is p's: nothing."""
    rng = torch.Generator().manual_seed(1)
    g, z = (torch.randn(5, k, generator=rng, requires_grad=True) for k in (3, 4))
    y, prior = torch.tensor([0, 2, 1, 1, 0]), torch.tensor([1.0, -2.0, 0.3])
    p = heads(3, 4)
    with torch.no_grad():
        p[0].normal_(generator=rng)
    found = torch.autograd.grad(two_heads(seen(g, z, y, p), prior, NAMES), [g, z, *p], allow_unused=True)
    right = torch.nn.functional.one_hot(y, 3)
    of_p = ((g + z @ p[0].T + p[1]).softmax(1) - right).detach() / 5
    torch.testing.assert_close(found[0], ((g + prior).softmax(1) - right).detach() / 5)
    assert found[1] is None
    torch.testing.assert_close(found[2], of_p.T @ z.detach())
    torch.testing.assert_close(found[3], of_p.sum(0))


def test_with_a_generic_head_of_zero_the_personal_one_is_a_linear_probe() -> None:
    rng = torch.Generator().manual_seed(2)
    z, y, p = torch.randn(9, 4, generator=rng), torch.arange(9) % 3, heads(3, 4)
    loss = two_heads(seen(torch.zeros(9, 3), z, y, p), torch.zeros(3), NAMES) - math.log(3)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(z @ p[0].T + p[1], y))


def test_a_class_without_samples_gives_no_nan() -> None:
    """Client 2 of this federation has one class, for which the balanced loss is 0 and has no gradient."""
    sim = simulation(make("fedrod"), rounds=2)
    assert all(torch.isfinite(t).all() for t in (*shared(sim).values(), *personal(sim).values()))
    prior = torch.tensor([5.0, 0.0]).clamp(min=1e-12).log()
    g = torch.zeros(1, 2, requires_grad=True)
    loss = two_heads(seen(g, torch.ones(1, 3), torch.tensor([0]), heads(2, 3)), prior, NAMES)
    assert float(loss.detach()) - math.log(2) == pytest.approx(0.0, abs=1e-6)
    assert float(torch.autograd.grad(loss, g)[0].abs().max()) < 1e-6


def balanced() -> Federation:
    """Two clients with two samples of each of the four classes, in inputs of their own."""
    base = federation((8, 8))
    y = base.source.y.clone()
    for rows in base.train[:2]:
        y[torch.from_numpy(rows)] = torch.arange(8) % 4
    return replace(base, source=replace(base.source, y=y))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_with_equal_class_counts_the_generic_model_is_fedavgs(engine: str) -> None:
    runs = [simulation(make(name), engine=engine, rounds=3, data=balanced()) for name in ("fedrod", "fedavg")]
    assert_close(shared(runs[0]), shared(runs[1]))
    unequal = [simulation(make(name), engine=engine, rounds=3) for name in ("fedrod", "fedavg")]
    a, b = map(shared, unequal)
    assert any(not torch.allclose(t, b[n], atol=1e-3) for n, t in a.items())


def test_what_the_generic_model_needs_of_a_model_and_a_task_is_said() -> None:
    frozen = Model(lambda: copy.deepcopy(model("mlp").module), trainable=["fc1.*"])
    with pytest.raises(
        ConfigError, match="FedRoD needs a model whose head is one linear layer that is trained"
    ):
        Simulation(make("fedrod"), federation(), frozen, TRAIN)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_rate_of_the_personal_head_is_its_own_under_every_optimizer(engine: str, optimizer: str) -> None:
    """The first step of p_i, which starts at 0, is as long as its rate says (AdamW sees no factor on a loss)."""
    train = replace(TRAIN, epochs=None, steps=1, momentum=0.0, weight_decay=0.0, optimizer=optimizer, lr=0.01)
    moved = []
    for rate in (0.25, 1.0, 4.0):
        sim = simulation(make("fedrod", personal_rate=rate), engine=engine, rounds=1, train=train)
        moved.append(dict(sim.states.get(range(5)).items()))
    for name, tensor in moved[1].items():
        assert float(tensor.abs().max()) > 0
        torch.testing.assert_close(moved[0][name], 0.25 * tensor)
        torch.testing.assert_close(moved[2][name], 4.0 * tensor)


def test_with_a_rate_of_zero_the_personal_head_stays_where_it_is() -> None:
    for train in (TRAIN, replace(TRAIN, optimizer="adamw", momentum=0.0)):
        sim = simulation(make("fedrod", personal_rate=0.0), rounds=2, train=train)
        assert all(float(t.abs().max()) == 0.0 for t in sim.states.get(range(5)).values())
