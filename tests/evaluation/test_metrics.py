"""The metrics against scikit-learn, brute force and values worked out by hand."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from tailorfl.errors import ConfigError
from tailorfl.evaluation import metrics


def logits_for(predicted: np.ndarray, classes: int, seed: int) -> np.ndarray:
    """Random logits whose largest entry is at `predicted`."""
    logits = np.random.default_rng(seed).normal(size=(len(predicted), classes))
    logits[np.arange(len(predicted)), predicted] += 10
    return logits


@settings(deadline=None)
@given(st.integers(2, 12), st.integers(1, 60), st.integers(0, 10_000), st.integers(1, 12))
def test_classification_equals_scikit_learn(classes: int, samples: int, seed: int, present: int) -> None:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, min(present, classes), samples)  # often with absent classes, down to a single one
    predicted = rng.integers(0, classes, samples)
    found = metrics.compute(
        "classification", torch.tensor(logits_for(predicted, classes, seed)), torch.tensor(y)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns about predicted classes that are absent from y
        expected = {
            "accuracy": reference.accuracy_score(y, predicted),
            "balanced_accuracy": reference.balanced_accuracy_score(y, predicted),
            "macro_f1": reference.f1_score(y, predicted, average="macro"),
        }
    assert found == pytest.approx(expected, abs=1e-12)


def test_counts_have_every_sample_once() -> None:
    outputs = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, math.nan], [1.0, 1.0]])
    counts = metrics.ClassCounts.of(outputs, np.array([0, 0, 1, 0]), [3, 1])
    assert counts.targets.tolist() == [[2, 1], [1, 0]]
    assert counts.predictions.tolist() == [[1, 1], [1, 0]]  # a tie is won by the lower class
    assert counts.hits.tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize("y", [[0, 3], [-1, 0]])
def test_class_outside_the_model_is_an_error(y: list[int]) -> None:
    with pytest.raises(ValueError, match="the model has 3 classes"):
        metrics.compute("classification", torch.zeros(2, 3), torch.tensor(y))


def test_nan_outputs_never_count_as_right() -> None:
    diverged = torch.full((4, 3), math.nan)
    y = torch.zeros(4, dtype=torch.int64)  # argmax of NaN is 0, which would score 100 %
    assert metrics.compute("classification", diverged, y) == {
        "accuracy": 0.0,
        "balanced_accuracy": 0.0,
        "macro_f1": 0.0,
    }
    binary = metrics.compute("binary", diverged[:, :1], y[:, None])
    assert binary["accuracy"] == 0
    assert math.isnan(binary["auc"])
    multilabel = metrics.compute("multilabel", diverged, torch.zeros(4, 3))
    assert multilabel["accuracy"] == 0
    assert math.isnan(multilabel["auc"])
    assert math.isnan(metrics.compute("regression", diverged, torch.rand(4, 3))["mse"])
    survival = torch.tensor([[1.0, 1.0], [1.0, 2.0]])
    assert math.isnan(metrics.compute("survival", diverged[:2, :1], survival)["c_index"])


@pytest.mark.parametrize("shape", [(30,), (30, 1)])
def test_binary_equals_scikit_learn(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    logit, y = rng.normal(size=30).round(1), rng.integers(0, 2, 30)
    found = metrics.compute("binary", torch.tensor(logit).view(shape), torch.tensor(y).view(shape))
    predicted = logit > 0
    assert found == pytest.approx(
        {
            "accuracy": reference.accuracy_score(y, predicted),
            "balanced_accuracy": reference.balanced_accuracy_score(y, predicted),
            "macro_f1": reference.f1_score(y, predicted, average="macro"),
            "auc": reference.roc_auc_score(y, logit),
        },
        abs=1e-12,
    )


def test_auc_skips_labels_with_one_class() -> None:
    rng = np.random.default_rng(2)
    scores, y = rng.normal(size=(50, 4)), rng.integers(0, 2, (50, 4)).astype(float)
    y[:, 1], y[:, 3] = 0, 1
    expected = np.mean([reference.roc_auc_score(y[:, label], scores[:, label]) for label in (0, 2)])
    found = metrics.compute("multilabel", torch.tensor(scores), torch.tensor(y))
    assert found["auc"] == pytest.approx(expected, abs=1e-12)
    assert found["accuracy"] == pytest.approx(np.mean((scores > 0) == (y > 0.5)))


def test_one_score_that_is_no_number_leaves_no_auc_to_its_part_alone() -> None:
    """Of any label: a model that has diverged must not look good on the labels where it has not."""
    scores, y = np.arange(8.0).reshape(4, 2), np.array([[0, 0], [1, 1], [0, 1], [1, 0]])
    both, targets = np.concatenate([scores, scores]), np.concatenate([y, y])
    both[1, 1] = math.nan
    found = metrics.auc_parts(both, targets, [4, 4])
    assert math.isnan(found[0])
    assert found[1] == pytest.approx((0.75 + 0.5) / 2)


def test_auc_without_any_usable_label_is_nan() -> None:
    assert math.isnan(metrics.auc(np.arange(3.0), np.ones(3)))
    assert math.isnan(metrics.auc(np.zeros((4, 2)), np.zeros((4, 2))))


def test_auc_takes_infinite_scores_by_their_order() -> None:
    assert metrics.auc(np.array([-np.inf, 0.0, np.inf]), np.array([0, 1, 1])) == 1


def slow_concordance(event: np.ndarray, time: np.ndarray, risk: np.ndarray) -> float:
    pairs, right = 0, 0.0
    for i in range(len(event)):
        for j in range(len(event)):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                pairs += 1
                right += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return right / pairs if pairs else math.nan


@given(st.integers(0, 10_000), st.integers(1, 25), st.integers(1, 8))
def test_concordance_equals_the_definition(seed: int, samples: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    event, time, risk = (
        rng.integers(0, 2, samples),
        rng.integers(0, levels, samples),
        rng.integers(0, levels, samples),
    )
    expected = slow_concordance(event, time, risk)
    assert metrics.concordance_index(event, time, risk) == pytest.approx(expected, nan_ok=True)


def test_concordance_does_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    event, time, risk = rng.integers(0, 2, 200), rng.random(200), rng.random(200)
    whole = metrics.concordance_index(event, time, risk)
    for block in (1, 450, 10_000):
        monkeypatch.setattr(metrics, "PAIR_BLOCK", block)
        assert metrics.concordance_index(event, time, risk) == whole


def test_concordance_by_hand() -> None:
    # comparable: (0,1), (0,2), (1 is censored), (2 has no later one); right: 0 before 1; wrong: 0 before 2
    event, time, risk = [1, 0, 1], [1.0, 2.0, 3.0], [5.0, 4.0, 6.0]
    y = torch.tensor([event, time]).T
    assert metrics.compute("survival", torch.tensor(risk)[:, None], y) == {"c_index": 0.5}
    assert math.isnan(metrics.concordance_index(np.zeros(3), np.array(time), np.array(risk)))


def test_regression_equals_scikit_learn() -> None:
    rng = np.random.default_rng(4)
    predicted, y = rng.normal(size=(20, 3)), rng.normal(size=(20, 3))
    assert metrics.compute("regression", torch.tensor(predicted), torch.tensor(y)) == pytest.approx(
        {"mse": reference.mean_squared_error(y, predicted), "r2": reference.r2_score(y, predicted)}
    )
    y[:, 0] = 0.1  # the mean of 20 times 0.1 is not exactly 0.1
    varying = reference.r2_score(y[:, 1:], predicted[:, 1:])
    assert metrics.compute("regression", predicted, y)["r2"] == pytest.approx(varying)
    assert math.isnan(metrics.compute("regression", predicted[:1], y[:1])["r2"])


def test_errors_of_counts_equal_scikit_learn() -> None:
    rng = np.random.default_rng(4)
    logs, y = rng.normal(size=(30, 2)), rng.poisson(1.5, (30, 2)).astype(float)
    assert (y == 0).any()
    assert metrics.compute("counts", torch.tensor(logs), torch.tensor(y)) == pytest.approx(
        {
            "deviance": reference.mean_poisson_deviance(y.ravel(), np.exp(logs).ravel()),
            "mae": reference.mean_absolute_error(y, np.exp(logs)),
        }
    )
    logs[3, 1] = np.nan
    assert all(math.isnan(value) for value in metrics.compute("counts", logs, y).values())
    assert metrics.compute("counts", np.array([[1e3]]), np.array([[1.0]]))["deviance"] == math.inf


def test_infinite_predictions_have_infinite_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = metrics.compute("regression", np.array([[1e200], [0.0]]), np.array([[0.0], [1.0]]))
        assert found == {"mse": math.inf, "r2": -math.inf}


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\[4, 1\] for targets of shape \[4, 2\]"):
        metrics.compute("regression", torch.zeros(4, 1), torch.zeros(4, 2))
    with pytest.raises(ValueError, match="3 outputs for 4 targets"):
        metrics.compute("classification", torch.zeros(3, 2), torch.zeros(4))


SHAPES = {
    "classification": ((0, 3), (0,)),
    "binary": ((0, 1), (0,)),
    "multilabel": ((0, 3), (0, 3)),
    "regression": ((0, 2), (0, 2)),
    "counts": ((0, 2), (0, 2)),
    "survival": ((0, 1), (0, 2)),
    "generation": ((0, 5), (0, 7)),
}


@pytest.mark.parametrize("task", list(metrics.METRICS))
def test_empty_test_set_is_nan(task: str) -> None:
    outputs, y = (torch.zeros(shape) for shape in SHAPES[task])
    found = metrics.compute(task, outputs, y)
    assert tuple(found) == metrics.METRICS[task]
    assert all(math.isnan(value) for value in found.values())


@pytest.mark.parametrize("task", list(metrics.METRICS))
def test_names_and_types(task: str) -> None:
    torch.manual_seed(0)
    outputs, y = (torch.rand(6, *shape[1:]).round() for shape in SHAPES[task])
    found = metrics.compute(task, outputs.bfloat16().requires_grad_(), y)
    assert set(found) == set(metrics.METRICS[task])
    assert all(type(value) is float for value in found.values())
    assert metrics.primary(task)[0] in found


def test_primary_metrics() -> None:
    assert metrics.primary("classification") == ("accuracy", True)
    assert metrics.primary("binary") == ("accuracy", True)
    assert metrics.primary("multilabel") == ("auc", True)
    assert metrics.primary("regression") == ("mse", False)
    assert metrics.primary("counts") == ("deviance", False)
    assert metrics.primary("survival") == ("c_index", True)
    assert metrics.primary("generation") == ("rouge1", True)
    with pytest.raises(ConfigError, match="Did you mean 'regression'"):
        metrics.primary("regresion")
