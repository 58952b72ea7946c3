"""The metrics against scikit-learn, brute force and values worked out by hand."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference
from torch import Tensor

from tailorfl.errors import ConfigError
from tailorfl.evaluation import metrics


def compute(task: str, outputs: Any, y: Any) -> dict[str, float]:
    """The metrics of all samples as one part."""
    return {
        name: float(of[0]) for name, of in metrics.compute_parts(task, outputs, y, [len(outputs)]).items()
    }


def auc(scores: Any, y: Any) -> float:
    return float(metrics.auc_parts(scores, y, [len(scores)])[0])


def logits_for(predicted: np.ndarray, classes: int, seed: int) -> np.ndarray:
    """Random logits whose largest entry is at `predicted`."""
    logits = np.random.default_rng(seed).normal(size=(len(predicted), classes))
    logits[np.arange(len(predicted)), predicted] += 10
    return logits


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 12), st.integers(1, 60), st.integers(0, 10_000), st.integers(1, 12))
def test_classification_equals_scikit_learn(classes: int, samples: int, seed: int, present: int) -> None:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, min(present, classes), samples)  # often with absent classes, down to a single one
    predicted = rng.integers(0, classes, samples)
    found = compute("classification", torch.tensor(logits_for(predicted, classes, seed)), torch.tensor(y))
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


SURVIVAL = [[1.0, 1.0], [1.0, 2.0], [1.0, 3.0], [1.0, 4.0]]


@pytest.mark.parametrize(
    ("task", "y", "expected"),
    [
        # argmax of NaN is 0, which would score 100 %
        ("classification", [0] * 4, {"accuracy": 0, "balanced_accuracy": 0, "macro_f1": 0}),
        ("binary", [[0]] * 4, {"accuracy": 0, "auc": math.nan}),
        ("multilabel", [[0, 0, 0]] * 4, {"accuracy": 0, "auc": math.nan}),
        ("regression", [[0.1, 0.5, 0.7]] * 4, {"mse": math.nan}),
        ("survival", SURVIVAL, {"c_index": math.nan}),
    ],
)
def test_nan_outputs_never_count_as_right(task: str, y: list[Any], expected: dict[str, float]) -> None:
    width = 1 if task in ("binary", "survival") else 3
    found = compute(task, torch.full((4, width), math.nan), torch.tensor(y))
    assert {name: found[name] for name in expected} == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("shape", [(30,), (30, 1)])
def test_binary_equals_scikit_learn(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    logit, y = rng.normal(size=30).round(1), rng.integers(0, 2, 30)
    found = compute("binary", torch.tensor(logit).view(shape), torch.tensor(y).view(shape))
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
    scores, y = rng.normal(size=(50, 4)).round(), rng.integers(0, 2, (50, 4)).astype(float)
    y[:, 1], y[:, 3] = 0, 1
    expected = np.mean([reference.roc_auc_score(y[:, label], scores[:, label]) for label in (0, 2)])
    found = compute("multilabel", torch.tensor(scores), torch.tensor(y))
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


def test_auc_at_its_limits() -> None:
    assert math.isnan(auc(np.arange(3.0), np.ones(3)))
    assert math.isnan(auc(np.zeros((4, 2)), np.zeros((4, 2))))
    assert auc(np.array([-np.inf, 0.0, np.inf]), np.array([0, 1, 1])) == 1


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
    event = rng.integers(0, 2, samples)
    time, risk = rng.integers(0, levels, (2, samples))
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
    assert compute("survival", torch.tensor(risk)[:, None], y) == {"c_index": 0.5}
    assert math.isnan(metrics.concordance_index(np.zeros(3), np.array(time), np.array(risk)))


def test_regression_equals_scikit_learn() -> None:
    rng = np.random.default_rng(4)
    predicted, y = rng.normal(size=(20, 3)), rng.normal(size=(20, 3))
    assert compute("regression", torch.tensor(predicted), torch.tensor(y)) == pytest.approx(
        {"mse": reference.mean_squared_error(y, predicted), "r2": reference.r2_score(y, predicted)}
    )
    y[:, 0] = 0.1  # the mean of 20 times 0.1 is not exactly 0.1
    varying = reference.r2_score(y[:, 1:], predicted[:, 1:])
    assert compute("regression", predicted, y)["r2"] == pytest.approx(varying)
    assert math.isnan(compute("regression", predicted[:1], y[:1])["r2"])


def test_errors_of_counts_equal_scikit_learn() -> None:
    rng = np.random.default_rng(4)
    logs, y = rng.normal(size=(30, 2)), rng.poisson(1.5, (30, 2)).astype(float)
    assert (y == 0).any()
    assert compute("counts", torch.tensor(logs), torch.tensor(y)) == pytest.approx(
        {
            "deviance": reference.mean_poisson_deviance(y.ravel(), np.exp(logs).ravel()),
            "mae": reference.mean_absolute_error(y, np.exp(logs)),
        }
    )
    logs[3, 1] = np.nan
    assert all(math.isnan(value) for value in compute("counts", logs, y).values())
    assert compute("counts", np.array([[1e3]]), np.array([[1.0]]))["deviance"] == math.inf


def test_infinite_predictions_have_infinite_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compute("regression", np.array([[1e200], [0.0]]), np.array([[0.0], [1.0]]))
        assert found == {"mse": math.inf, "r2": -math.inf}


@pytest.mark.parametrize(
    ("task", "outputs", "y", "sizes", "message"),
    [
        ("classification", torch.zeros(2, 3), torch.tensor([0, 3]), [2], "the model has 3 classes"),
        ("classification", torch.zeros(2, 3), torch.tensor([-1, 0]), [2], "the model has 3 classes"),
        ("classification", torch.zeros(3, 2), torch.zeros(4), [4], "3 outputs for 4 targets"),
        ("classification", torch.zeros(3, 2), torch.zeros(3), [1, 1], "3 targets, in parts of 2 samples"),
        ("regression", torch.zeros(4, 1), torch.zeros(4, 2), [4], r"\[4, 1\] for targets of shape \[4, 2\]"),
    ],
)
def test_targets_that_do_not_fit_are_an_error(
    task: str, outputs: Tensor, y: Tensor, sizes: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.compute_parts(task, outputs, y, sizes)


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
    found = compute(task, outputs, y)
    assert tuple(found) == metrics.METRICS[task]
    assert all(math.isnan(value) for value in found.values())


@pytest.mark.parametrize("task", list(metrics.METRICS))
def test_names_and_types(task: str) -> None:
    torch.manual_seed(0)
    outputs, y = (torch.rand(6, *shape[1:]).round() for shape in SHAPES[task])
    found = compute(task, outputs.bfloat16().requires_grad_(), y)
    assert set(found) == set(metrics.METRICS[task])
    assert all(type(value) is float for value in found.values())
    assert metrics.primary(task)[0] in found


def test_primary_metrics() -> None:
    assert {task: metrics.primary(task) for task in metrics.METRICS} == {
        "classification": ("accuracy", True),
        "binary": ("accuracy", True),
        "multilabel": ("auc", True),
        "regression": ("mse", False),
        "counts": ("deviance", False),
        "survival": ("c_index", True),
        "generation": ("rouge1", True),
    }
    with pytest.raises(ConfigError, match="Did you mean 'regression'"):
        metrics.primary("regresion")


# -- many parts at once --------------------------------------------------------------------------------


def samples(task: str, n: int, seed: int, decimals: int) -> tuple[Tensor, Tensor]:
    """Outputs, with ties where `decimals` are few and now and then no number, and targets with absent classes."""
    rng = np.random.default_rng(seed)
    width = int(rng.integers(2, 12))
    shape = {
        "classification": (n, width),
        "multilabel": (n, width),
        "regression": (n, 2),
        "counts": (n, 2),
    }.get(task, (n, 1))
    outputs = rng.normal(size=shape).round(decimals)
    if n and seed % 3 == 0:
        outputs[rng.integers(n), 0] = rng.choice([np.nan, np.inf, -np.inf])
    targets = {
        "classification": rng.integers(0, int(rng.integers(1, width + 1)), n),
        "binary": rng.integers(0, 2, n),
        "multilabel": (rng.random(shape) < rng.random()).astype(float),
        "regression": rng.normal(size=shape),
        "counts": rng.poisson(2, shape).astype(float),
        "survival": np.stack([rng.integers(0, 2, n), rng.integers(0, 6, n)], axis=1).astype(float),
        "generation": np.zeros(shape),
    }[task]
    if task == "generation":
        outputs = rng.random((n, 5))
    return torch.from_numpy(outputs), torch.from_numpy(targets)


@pytest.mark.parametrize("task", list(metrics.METRICS))
@settings(deadline=None, max_examples=15)
@given(
    sizes=st.lists(st.integers(0, 25), min_size=1, max_size=8),
    seed=st.integers(0, 10_000),
    decimals=st.integers(0, 3),
)
def test_together_is_one_by_one(task: str, sizes: list[int], seed: int, decimals: int) -> None:
    outputs, y = samples(task, sum(sizes), seed, decimals)
    together = metrics.compute_parts(task, outputs, y, sizes)
    assert tuple(together) == metrics.METRICS[task]
    for k, (some, few) in enumerate(zip(torch.split(outputs, sizes), torch.split(y, sizes), strict=True)):
        one = compute(task, some, few)
        np.testing.assert_array_equal([values[k] for values in together.values()], list(one.values()))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=6), st.integers(0, 10_000), st.integers(0, 3))
def test_areas_are_those_of_scikit_learn(sizes: list[int], seed: int, decimals: int) -> None:
    """With ties; a part without one of the classes has none."""
    rng = np.random.default_rng(seed)
    scores, y = rng.normal(size=sum(sizes)).round(decimals), rng.random(sum(sizes)) < rng.random()
    found = metrics.auc_parts(scores, y, sizes)
    cuts = np.cumsum(sizes)[:-1]
    for area, some, few in zip(found, np.split(scores, cuts), np.split(y, cuts), strict=True):
        if few.all() or not few.any():
            assert math.isnan(area)
        else:
            assert area == pytest.approx(reference.roc_auc_score(few, some), rel=1e-15)
