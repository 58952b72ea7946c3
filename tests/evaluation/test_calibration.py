"""Brier score, calibration error, one-vs-rest AUC and temperatures, against scikit-learn, scipy and brute force."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from sklearn import metrics as reference

import tailorfl
from tailorfl.errors import ConfigError
from tailorfl.evaluation.calibration import (
    BINS,
    FEWEST,
    HIGHEST,
    Reliability,
    error_by_chance,
    fitted,
    further_parts,
    measures,
    probabilities,
)
from tailorfl.evaluation.predictions import Predictions

# -- probabilities ---------------------------------------------------------------------------------------------------


def measured(task: str, outputs: np.ndarray, y: np.ndarray) -> dict[str, float]:
    names = ("auc", "brier", "ece") if task == "classification" else ("brier", "ece")
    return {name: float(v[0]) for name, v in further_parts(task, outputs, y, [len(y)], names).items()}


def softmax(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).softmax(1).numpy()


def by_hand(p: np.ndarray, y: np.ndarray) -> float:
    """The calibration error of samples of different confidence, bin by bin."""
    rows = sorted((max(row), float(row.argmax() == label)) for row, label in zip(p, y, strict=True))
    bins, n, total, start = min(15, len(y)), len(y), 0.0, 0
    for b in range(bins):
        size = n // bins + (b < n % bins)
        part = rows[start : start + size]
        start += size
        total += size / n * abs(sum(r for _, r in part) / size - sum(c for c, _ in part) / size)
    return total


@settings(deadline=None, max_examples=20)
@given(st.integers(3, 6), st.integers(1, 80), st.integers(0, 10_000))
def test_several_classes_equal_scikit_learn_and_brute_force(classes: int, samples: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits, y = rng.normal(size=(samples, classes)) * 2, rng.integers(0, classes, samples)
    found, p = measured("classification", logits, y), softmax(logits)
    names = np.arange(classes)
    assert found["brier"] == pytest.approx(
        reference.brier_score_loss(y, p, labels=names, scale_by_half=False), abs=1e-12
    )
    assert found["ece"] == pytest.approx(by_hand(p, y), abs=1e-12)
    each = [reference.roc_auc_score(y == k, p[:, k]) for k in range(classes) if 0 < (y == k).sum() < samples]
    if each:
        assert found["auc"] == pytest.approx(float(np.mean(each)), abs=1e-12)
    else:
        assert math.isnan(found["auc"])
    if len(np.unique(y)) == classes:
        assert found["auc"] == pytest.approx(reference.roc_auc_score(y, p, multi_class="ovr"), abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 80), st.integers(0, 10_000))
def test_binary_equals_scikit_learn_and_brute_force(samples: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits, y = rng.normal(size=(samples, 1)) * 2, rng.integers(0, 2, samples)
    p = 1 / (1 + np.exp(-logits[:, 0]))
    found = measured("binary", logits, y)
    assert found["brier"] == pytest.approx(reference.brier_score_loss(y, p, labels=[0, 1]), abs=1e-12)
    assert found["ece"] == pytest.approx(by_hand(np.stack([1 - p, p], 1), y), abs=1e-12)
    assert probabilities("binary", torch.from_numpy(logits))[:, 1] == pytest.approx(p)


def test_parts_are_measured_apart_and_empty_ones_are_undefined() -> None:
    rng = np.random.default_rng(1)
    logits, y, sizes = rng.normal(size=(50, 4)), rng.integers(0, 4, 50), [20, 0, 29, 1]
    found = further_parts("classification", logits, y, sizes, ("auc", "brier", "ece"))
    cuts = np.cumsum(sizes)[:-1]
    for k, (some, few) in enumerate(zip(np.split(logits, cuts), np.split(y, cuts), strict=True)):
        alone = measured("classification", some, few)
        np.testing.assert_array_equal([found[name][k] for name in alone], list(alone.values()))
    assert all(math.isnan(values[1]) for values in found.values())
    assert math.isnan(found["auc"][3])  # one class alone
    assert found["brier"][3] > 0


def test_samples_of_one_confidence_may_stand_in_any_order() -> None:
    rng = np.random.default_rng(2)
    logits = np.repeat([[0.0, 0.4], [0.0, 1.3], [0.7, 0.0]], 20, axis=0)
    y = rng.integers(0, 2, 60)
    errors = {
        round(measured("classification", logits[order], y[order])["ece"], 12)
        for order in (rng.permutation(60) for _ in range(5))
    }
    assert len(errors) == 1


def test_probabilities_that_are_true_are_calibrated_and_confident_ones_are_not() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(200_000, 1)) * 2
    y = (rng.random(200_000) < 1 / (1 + np.exp(-logits[:, 0]))).astype(np.int64)
    assert measured("binary", logits, y)["ece"] < 0.005
    assert measured("binary", 3 * logits, y)["ece"] > 0.1
    bins = Reliability.of(probabilities("binary", logits), y)
    assert len(bins.samples) == BINS
    assert bins.samples.max() - bins.samples.min() <= 1
    assert bins.accuracy == pytest.approx(bins.confidence, abs=0.02)


def test_few_samples_have_an_error_by_chance() -> None:
    rng = np.random.default_rng(4)
    right = rng.beta(2, 2, 50)
    p = np.stack([1 - right, right], axis=1)
    found = error_by_chance(p, np.random.default_rng(0))
    draws = [Reliability.of(p, (rng.random(50) < right).astype(np.int64)).error for _ in range(400)]
    assert found == pytest.approx(float(np.mean(draws)), abs=0.01)
    assert 0.15 < found < 0.25


def test_a_diverged_model_has_no_number() -> None:
    outputs = np.array([[0.0, 1.0, 0.0], [np.nan, 0.0, 0.0], [1.0, 0.0, 0.0]])
    found = measured("classification", outputs, np.array([1, 0, 2]))
    assert all(math.isnan(value) for value in found.values())


def test_runs_measure_what_is_asked_for_and_can_be_led_by_it(tmp_path: Path) -> None:
    def run(evaluation: dict[str, Any], data: Any = None, **more: Any) -> tailorfl.ExperimentResult:
        folder, sets = tmp_path / str(len(list(tmp_path.iterdir()))), {"every": 0, "final": ["local"]}
        settings = {"method": "local", "data": data or {"clients": 2, "samples": 80}, "rounds": 1, "seeds": 1}
        return tailorfl.run(**settings, **more, eval={**sets, **evaluation}, out=folder)

    assert not {"auc", "brier", "ece"} & set(run({}).clients.columns)
    found = run({"metrics": ["brier", "ece"]})
    assert {"brier", "ece"} <= set(found.clients.columns)
    assert found.metric == "accuracy"
    led = run({"metric": "auc"})
    assert led.metric == "auc"
    assert 0 <= led.table["mean"].iloc[0] <= 1
    with pytest.raises(ConfigError, match=r"metric \(eval.metrics\) of a regression task"):
        run({"metrics": ["ece"]}, "synthetic_linear", model="linear")


def test_bins_hold_equal_numbers_of_samples_also_where_confidences_are_alike() -> None:
    """Samples of one confidence share their accuracy: ½ of 0.6, 1 of 0.9; each of the six is a bin of its own."""
    confidence = np.array([0.6, 0.6, 0.9, 0.9, 0.9, 0.9])
    found = Reliability.binned(confidence, np.array([True, False, True, True, True, True]))
    assert found.samples.tolist() == [1] * 6
    assert found.error == pytest.approx((2 * 0.1 + 4 * 0.1) / 6)


def test_as_many_bins_as_are_asked_for() -> None:
    found = Reliability.binned(np.array([0.9, 0.6, 0.8, 0.7]), np.array([True, False, True, True]), bins=2)
    assert found.samples.tolist() == [2, 2]
    assert found.confidence.tolist() == pytest.approx([0.65, 0.85])
    assert found.accuracy.tolist() == [0.5, 1.0]


# -- temperatures ----------------------------------------------------------------------------------------------------


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
    predictions = drawn(task, scale, samples)
    found = fitted(predictions)
    assert found is not None

    def loss(log_t: float) -> float:
        return float(
            reference.log_loss(predictions.y, probabilities(task, predictions.outputs, np.exp(log_t)))
        )

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
    assert before["nll"] == pytest.approx(
        reference.log_loss(test.y, probabilities("classification", test.outputs))
    )
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
    predictions = drawn("classification", 1.0, FEWEST)
    predictions.outputs[7, 2] = np.inf
    assert fitted(predictions) is None
