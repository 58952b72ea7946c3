"""FedPHP: what v_i keeps of itself, what teaches, and when it teaches nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from methods.reductions import fedavg
from methods.settings import Card, Row, make
from methods.small import TRAIN, simulation
from tailorfl.errors import ModelError
from tailorfl.methods.discrepancy import mmd, mmd_by_mean_distance, squared_distances
from tailorfl.testing.contract import whole
from tailorfl.training.sample_privacy import SampleDP

CONTRACTS = {
    "fedphp": Row(
        Card(whole, whole, whole, True, True),
        {"lam": 0.3, "horizon": 2.0},
        same=(fedavg("λ = 0", lam=0.0, said=True), fedavg("λ = 0", lam=0.0, teach="mmd", said=True)),
    ),
}


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


def test_a_discrepancy_of_features_is_refused_under_sample_level_privacy() -> None:
    private = replace(TRAIN, momentum=0.0, weight_decay=0.0, dp=SampleDP(1.0, 1.0, "shuffle"))
    with pytest.raises(ModelError, match="compares the samples of a batch"):
        simulation(make("fedphp", teach="mmd"), train=private).step()
