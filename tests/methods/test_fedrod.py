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
