"""Temperatures against scipy's minimiser, and where there is no best one."""

from __future__ import annotations

import numpy as np
import pytest
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


@pytest.mark.parametrize(
    ("task", "scale", "samples"),
    [
        ("classification", 0.4, 2000),
        ("binary", 1.0, 2000),
        ("binary", 3.0, 2000),
        ("classification", 3.0, FEWEST),
    ],
)
def test_the_temperature_is_where_the_likelihood_is_largest(task: str, scale: float, samples: int) -> None:
    given = drawn(task, scale, samples)
    found = fitted(given)
    assert found is not None

    def loss(log_t: float) -> float:
        return float(log_loss(given.y, probabilities(task, given.outputs, np.exp(log_t))))

    by_scipy = np.exp(minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9}).x)
    assert found == pytest.approx(by_scipy, rel=1e-4)
    assert found == pytest.approx(scale, rel=0.15 if samples > FEWEST else 0.5)


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


@pytest.mark.parametrize("size", [0.2, 4.0])
@pytest.mark.parametrize(("right", "end"), [(True, 1 / HIGHEST), (False, HIGHEST)])
@pytest.mark.parametrize("task", ["classification", "binary"])
def test_outputs_that_are_always_right_or_wrong_get_an_end(
    task: str, right: bool, end: float, size: float
) -> None:
    """The likelihood then only rises, or only falls, with the size of the logits."""
    y = np.arange(FEWEST) % 2
    sign = np.where((y == 1) == right, 1.0, -1.0)[:, None] * size
    outputs = sign if task == "binary" else np.concatenate([-sign, sign], axis=1)
    assert fitted(said(outputs, y, task)) == end
    assert fitted(said(0 * outputs, y, task)) == 1.0
    assert fitted(said(outputs[1:], y[1:], task)) is None


def test_one_output_that_is_no_number_leaves_no_temperature() -> None:
    given = drawn("classification", 1.0, FEWEST)
    given.outputs[7, 2] = np.inf
    assert fitted(given) is None
