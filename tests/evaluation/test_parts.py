"""Metrics of many parts at once: equal to the last bit to those of every part by itself, and to scikit-learn's."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor

from tailorfl.evaluation import metrics, parts

lengths = st.lists(st.integers(0, 25), min_size=1, max_size=8)


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
@settings(deadline=None, max_examples=40)
@given(sizes=lengths, seed=st.integers(0, 10_000), decimals=st.integers(0, 3))
def test_together_is_one_by_one(task: str, sizes: list[int], seed: int, decimals: int) -> None:
    outputs, y = samples(task, sum(sizes), seed, decimals)
    together = metrics.compute_parts(task, outputs, y, sizes)
    assert tuple(together) == metrics.METRICS[task]
    for k, (some, few) in enumerate(zip(torch.split(outputs, sizes), torch.split(y, sizes), strict=True)):
        one = metrics.compute(task, some, few)
        np.testing.assert_array_equal([values[k] for values in together.values()], list(one.values()))


@settings(deadline=None, max_examples=60)
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
            assert area == pytest.approx(roc_auc_score(few, some), rel=1e-15)


@settings(deadline=None)
@given(lengths, st.integers(0, 10_000))
def test_sums_and_means_are_those_of_numpy(sizes: list[int], seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=sum(sizes))
    pieces = np.split(values, np.cumsum(sizes)[:-1])
    held = np.array(sizes, dtype=np.int64)
    assert parts.sums(values, held).tolist() == [float(piece.sum()) for piece in pieces]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of empty pieces
        np.testing.assert_array_equal(parts.means(values, held), [piece.mean() for piece in pieces])


def test_a_mean_over_chosen_entries_leaves_out_the_others() -> None:
    rng = np.random.default_rng(0)
    values, chosen = rng.normal(size=(30, 20)), rng.random((30, 20)) < 0.6
    chosen[4] = False
    found = parts.means_where(values, chosen)
    assert math.isnan(found[4])
    assert [found[i] for i in range(30) if i != 4] == [
        values[i][chosen[i]].mean() for i in range(30) if i != 4
    ]


def test_parts_must_hold_all_samples() -> None:
    with pytest.raises(ValueError, match="3 outputs for 3 targets, in parts of 2 samples"):
        metrics.compute_parts("classification", torch.zeros(3, 2), torch.zeros(3), [1, 1])
