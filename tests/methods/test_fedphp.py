"""FedPHP: what v_i keeps of itself, what teaches, and when it teaches nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from methods.reductions import fedavg
from methods.settings import Card, Row, make
from methods.small import TRAIN, assert_close, assert_same, federation, model, personal, simulation
from tailorfl.errors import ConfigError, ModelError
from tailorfl.methods.discrepancy import mmd, mmd_by_mean_distance, squared_distances
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training.sample_privacy import SampleDP

CONTRACTS = {
    "fedphp": Row(
        Card(whole, whole, whole, True, True),
        {"lam": 0.3, "horizon": 2.0},
        same=(fedavg("λ = 0", lam=0.0, said=True), fedavg("λ = 0", lam=0.0, teach="mmd", said=True)),
    ),
}


def test_v_is_the_first_model_and_then_a_moving_average() -> None:
    """λ = 0: θ_t are FedAvg's local models; μ = 0, then 0.9/(qT)."""
    sim, plain = simulation(make("fedphp", lam=0.0, horizon=2.0)), simulation("fedavg")
    thetas = []
    for _ in range(2):
        ids = plain.sample(plain.round)
        (theta,) = plain.run(ids, plain.states.get(ids), plain.server["w"], lambda c, s, r: (c.fit(r),))
        thetas.append(dict(theta.items()))
        sim.step()
        plain.step()
        if len(thetas) == 1:
            assert_close(personal(sim), thetas[0], atol=1e-7)
    mu = 0.9 / 2.0
    assert_close(personal(sim), {n: mu * t + (1 - mu) * thetas[1][n] for n, t in thetas[0].items()})


def test_without_lesson_and_memory_v_is_the_own_last_model() -> None:
    sim, plain = (
        simulation(make("fedphp", lam=0.0, horizon=math.inf), fraction=0.6),
        simulation("fedavg", fraction=0.6),
    )
    for _ in range(3):
        ids = plain.sample(plain.round)
        (theta,) = plain.run(ids, plain.states.get(ids), plain.server["w"], lambda c, s, r: (c.fit(r),))
        sim.step()
        plain.step()
        assert_close(personal(sim, ids), dict(theta.items()), atol=1e-7)


def test_the_share_it_keeps_of_itself_has_an_end() -> None:
    sim = simulation(make("fedphp", horizon=2.0), train=replace(TRAIN, lr=1e-30), rounds=6)
    start = {n: t.expand(5, *t.shape) for n, t in sim.init.items()}
    assert_close(personal(sim), start)
    assert sim.states.get(range(5))["count"].tolist() == [6.0] * 5


def test_equal_features_have_no_discrepancy_and_no_slope() -> None:
    z = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for y in (z.detach().clone(), z.detach().clone()):
        value = mmd_by_mean_distance(z, y, None)
        assert float(value.detach()) == pytest.approx(0.0, abs=1e-6)
        assert float(torch.autograd.grad(value, z)[0].abs().max()) < 1e-6
    same = torch.ones(3, 2, requires_grad=True)
    (slope,) = torch.autograd.grad(mmd_by_mean_distance(same, torch.ones(3, 2), None), same)
    assert torch.equal(slope, torch.zeros(3, 2))


def test_four_points_in_closed_form_and_padding_that_counts_nothing() -> None:
    """z = 0, 0 and y = d, d: of 12 pairs 8 are d² apart, b = 2d²/3, so MMD² = 2 Σ_k (1 − exp(−1.5/2^{k−2}))."""
    wanted = 2 * sum(1 - math.exp(-1.5 / 2 ** (k - 2)) for k in range(5))
    z, y = torch.tensor([[0.0], [77.0], [0.0]]), torch.tensor([[3.0], [-5.0], [3.0]])
    found = mmd_by_mean_distance(z, y, torch.tensor([1.0, 0.0, 1.0]))
    assert float(found) == pytest.approx(wanted, abs=1e-6)
    assert float(mmd_by_mean_distance(z[::2], y[::2], None)) == pytest.approx(wanted, abs=1e-6)
    one = mmd(z[:1], y[:1], None, lambda square: torch.exp(-square))
    assert float(one) == pytest.approx(2 - 2 * math.exp(-9.0), abs=1e-6)
    assert squared_distances(z[:2], y[:2]).tolist() == [[9.0, 25.0], [5476.0, 6724.0]]


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 0.0])])
@pytest.mark.parametrize("gap", [0.0, 1e-4, 1.0])
def test_one_sample_has_no_discrepancy(weight: Tensor | None, gap: float) -> None:
    rows = 1 if weight is None else 2
    z = torch.zeros(rows, 3, requires_grad=True)
    value = mmd_by_mean_distance(z, torch.full((rows, 3), gap), weight)
    assert float(value.detach()) == 0.0
    assert torch.equal(torch.autograd.grad(value, z)[0], torch.zeros(rows, 3))


def test_a_client_that_comes_late_inherits_the_global_model() -> None:
    sim = simulation("fedphp", rounds=2)
    ((_, models),) = sim.newcomer_models((5,), 0)
    assert_same({n: t[0] for n, t in models.items()}, dict(sim.server["w"].items()))


def test_what_it_cannot_do_is_said() -> None:
    private = replace(TRAIN, momentum=0.0, weight_decay=0.0, dp=SampleDP(1.0, 1.0, "shuffle"))
    with pytest.raises(ModelError, match="compares the samples of a batch"):
        simulation(make("fedphp", teach="mmd"), train=private).step()
    base = federation()
    source = replace(base.source, y=base.source.y[:, None].float(), task="regression", outputs=1)
    with pytest.raises(ConfigError, match="FedPHP tells classes apart"):
        Simulation(make("fedphp"), replace(base, source=source), model("logistic"), TRAIN)
