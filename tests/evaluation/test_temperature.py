"""Temperatures against scipy's minimiser and torch's LBFGS."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.metrics import log_loss

from tailorfl.evaluation.calibration import probabilities
from tailorfl.evaluation.predictions import Predictions
from tailorfl.evaluation.temperature import FEWEST, HIGHEST, fitted, measures


def said(outputs: np.ndarray, y: np.ndarray, task: str = "classification") -> Predictions:
    rows = np.arange(len(y))
    return Predictions(task, np.zeros(len(y), dtype=np.int64), rows, y, outputs.astype(np.float32))


def drawn(task: str, scale: float, samples: int = 2000, seed: int = 0) -> Predictions:
    """Outputs that are `scale` times what the labels are drawn by."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(samples, 1 if task == "binary" else 4)) * 1.5
    p = probabilities(task, logits)
    y = np.array([rng.choice(p.shape[1], p=row) for row in p])
    return said(scale * logits, y, task)


@pytest.mark.parametrize("task", ["classification", "binary"])
@pytest.mark.parametrize("scale", [0.4, 1.0, 3.0])
def test_the_temperature_is_where_the_likelihood_is_largest(task: str, scale: float) -> None:
    given = drawn(task, scale)
    found = fitted(given)
    assert found is not None

    def loss(log_t: float) -> float:
        return float(log_loss(given.y, probabilities(task, given.outputs, np.exp(log_t))))

    by_scipy = np.exp(minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9}).x)
    assert found == pytest.approx(by_scipy, rel=1e-4)
    z = torch.from_numpy(given.outputs).double()
    z = torch.cat([torch.zeros_like(z), z], 1) if task == "binary" else z
    log_t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [log_t], max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(z / log_t.exp(), torch.from_numpy(given.y))
        value.backward()
        return value

    optimizer.step(closure)
    assert found == pytest.approx(float(log_t.detach().exp()), rel=1e-5)
    assert found == pytest.approx(scale, rel=0.15)


def test_a_temperature_mends_what_was_too_sure_and_changes_no_prediction() -> None:
    val, test = drawn("classification", 3.0, 2000), drawn("classification", 3.0, 2000, seed=1)
    temperature = fitted(val)
    assert temperature is not None
    before, after = measures(test), measures(test, temperature)
    assert before["ece"] > 0.15
    assert after["ece"] < 0.05
    assert after["brier"] < before["brier"]
    assert after["nll"] < before["nll"]
    assert before["nll"] == pytest.approx(log_loss(test.y, probabilities("classification", test.outputs)))
    same = probabilities("classification", test.outputs, temperature).argmax(1) == test.outputs.argmax(1)
    assert same.all()


def test_what_has_no_best_temperature_ends_at_a_bound_or_has_none() -> None:
    y = np.arange(2 * FEWEST) % 2
    right = np.where(y[:, None] == np.arange(2), 2.0, -2.0)
    assert fitted(said(right, y)) == pytest.approx(1 / HIGHEST)
    assert fitted(said(-right, y)) == pytest.approx(HIGHEST)
    assert fitted(said(0 * right, y)) == 1.0
    assert fitted(said(right[: FEWEST - 1], y[: FEWEST - 1])) is None
    assert fitted(said(right * np.nan, y)) is None


def test_as_few_samples_as_are_enough_have_the_temperature_of_scipy() -> None:
    given = drawn("classification", 3.0, FEWEST)

    def loss(log_t: float) -> float:
        return float(log_loss(given.y, probabilities("classification", given.outputs, np.exp(log_t))))

    by_scipy = minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9}).x
    assert fitted(given) == pytest.approx(np.exp(by_scipy), rel=1e-4)


def test_one_output_that_is_no_number_leaves_no_temperature() -> None:
    given = drawn("classification", 1.0, FEWEST)
    given.outputs[7, 2] = np.inf
    assert fitted(given) is None
