"""SGD towards a fixed centroid: its gradient against autograd and the method's own term, and what falling rates do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from studies.perfed_ckt_formulas import example, softmax, squared_norms
from tailorfl.methods.perfed_ckt import towards


def test_gradient_is_that_of_cross_entropy_and_the_method_s_own_term() -> None:
    task, rng = example(lam=1.7), np.random.default_rng(3)
    w = rng.standard_normal((4, 3))
    own, seen = np.array([3, 5, 5, 8]), np.array([0, 7, 11])
    weights = torch.from_numpy(w).requires_grad_()
    fit = torch.nn.functional.cross_entropy(
        torch.from_numpy(task.x[own]) @ weights, torch.from_numpy(task.y[own])
    )
    (term,) = towards(1.7, torch.from_numpy(task.centroid), 3)

    class Seen:
        outputs = torch.from_numpy(task.public[seen]) @ weights
        rows = torch.from_numpy(seen)

    (expected,) = torch.autograd.grad(fit + term.function(Seen, *term.given), weights)
    assert task.gradient(w, own, seen) == pytest.approx(expected.numpy(), abs=1e-12)


def test_softmax_of_large_outputs_is_finite() -> None:
    assert softmax(np.array([[1000.0, 0.0], [0.0, 0.0]])).tolist() == [[1.0, 0.0], [0.5, 0.5]]


def test_gradients_vanish_with_falling_rates_and_stay_with_constant_ones() -> None:
    """What a rate of 1/2 leaves is the noise of its batches: a larger batch leaves less."""
    _, falling = squared_norms(example(), 4000, lambda t: (1 + t / 20) ** -0.75)
    _, constant = squared_norms(example(), 4000, lambda t: 0.5)
    _, steadier = squared_norms(example(), 4000, lambda t: 0.5, batch=64)
    late = slice(3000, None)
    assert falling[late].mean() < 0.05 * falling[0]
    assert constant[late].mean() > 10 * falling[late].mean()
    assert steadier[late].mean() < 0.2 * constant[late].mean()
