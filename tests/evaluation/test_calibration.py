"""Brier score, calibration error and one-vs-rest AUC, against scikit-learn and brute force."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

import tailorfl
from tailorfl.errors import ConfigError
from tailorfl.evaluation.calibration import (
    BINS,
    Reliability,
    error_by_chance,
    further_parts,
    probabilities,
)


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


@settings(deadline=None)
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


@settings(deadline=None)
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
        for name, values in found.items():
            alone = further_parts("classification", some, few, [len(few)], (name,))[name][0]
            assert values[k] == alone or (math.isnan(values[k]) and math.isnan(alone))
    assert [math.isnan(v[1]) for v in found.values()] == [True] * 3
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
    p = rng.beta(2, 2, 50)
    p = np.stack([1 - p, p], axis=1)
    found = error_by_chance(p, np.random.default_rng(0))
    brute = np.mean(
        [Reliability.of(p, (rng.random(50) < p[:, 1]).astype(np.int64)).error for _ in range(400)]
    )
    assert found == pytest.approx(float(brute), abs=0.01)
    assert 0.15 < found < 0.25


def test_a_diverged_model_has_no_number() -> None:
    outputs = np.array([[0.0, 1.0, 0.0], [np.nan, 0.0, 0.0], [1.0, 0.0, 0.0]])
    found = measured("classification", outputs, np.array([1, 0, 2]))
    assert all(math.isnan(value) for value in found.values())


def test_runs_measure_what_is_asked_for_and_can_be_led_by_it(tmp_path: Path) -> None:
    def run(name: str, **evaluation: object) -> tailorfl.ExperimentResult:
        settings = {"every": 0, "final": ["local"], **evaluation}
        data = {"clients": 2, "samples": 80}
        out = tmp_path / name
        return tailorfl.run(method="local", data=data, rounds=1, seeds=1, eval=settings, out=out)

    plain = run("plain").clients.columns
    assert not {"auc", "brier", "ece"} & set(plain)
    found = run("more", metrics=["brier", "ece"])
    assert {"brier", "ece"} <= set(found.clients.columns)
    assert found.metric == "accuracy"
    led = run("led", metric="auc")
    assert led.metric == "auc"
    assert 0 <= led.table["mean"].iloc[0] <= 1
    with pytest.raises(ConfigError, match=r"metric \(eval.metrics\) of a regression task"):
        tailorfl.run(
            method="local", data="synthetic_linear", model="linear", rounds=1, seeds=1, out=tmp_path / "no",
            eval={"metrics": ["ece"]},
        )  # fmt: skip


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
