"""Intervals by resampling, against scipy's bootstrap, formulas, and metrics of the resampled samples one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as reference

from tailorfl.evaluation import bootstrap
from tailorfl.evaluation.bootstrap import RESAMPLES, _draws, _measured, interval, resampled
from tailorfl.evaluation.calibration import probabilities
from tailorfl.evaluation.predictions import Predictions


def said(task: str, samples: int = 60, seed: int = 0, client: int = 3, better: float = 1.0) -> Predictions:
    rng = np.random.default_rng(seed)
    classes = 4 if task == "classification" else 2
    y = rng.integers(0, classes, samples)
    logits = rng.normal(size=(samples, classes))
    logits[np.arange(samples), y] += better
    outputs = logits[:, 1:] - logits[:, :1] if task == "binary" else logits
    return Predictions(
        task, np.full(samples, client), np.arange(samples), y, np.ascontiguousarray(outputs, dtype=np.float32)
    )


BY_SCIKIT_LEARN = {
    ("classification", "accuracy"): lambda y, p: reference.accuracy_score(y, p.argmax(1)),
    ("classification", "balanced_accuracy"): lambda y, p: reference.balanced_accuracy_score(y, p.argmax(1)),
    ("binary", "balanced_accuracy"): lambda y, p: reference.balanced_accuracy_score(y, p.argmax(1)),
    ("binary", "macro_f1"): lambda y, p: reference.f1_score(y, p.argmax(1), average="macro"),
    ("binary", "auc"): lambda y, p: reference.roc_auc_score(y, p[:, 1]),
    ("classification", "brier"): lambda y, p: reference.brier_score_loss(y, p, scale_by_half=False),
    ("classification", "auc"): lambda y, p: reference.roc_auc_score(y, p, multi_class="ovr"),
}


@pytest.mark.filterwarnings("ignore")  # scikit-learn warns of classes that a resample lacks
@pytest.mark.parametrize(("task", "metric"), BY_SCIKIT_LEARN)
def test_every_resample_is_measured_as_scikit_learn_measures_it(task: str, metric: str) -> None:
    given, of = said(task), BY_SCIKIT_LEARN[task, metric]
    given.outputs[:] = given.outputs.round()  # so that scores are equal
    p = probabilities(task, given.outputs)
    assert _measured(metric, given, np.array([60]))[0] == pytest.approx(of(given.y, p))
    found = resampled(metric, given, seed=5, resamples=20)
    drawn = np.concatenate(list(_draws(5, given, 20)))
    assert drawn.shape == (20, 60)
    assert found == pytest.approx([of(given.y[rows], p[rows]) for rows in drawn])


@pytest.mark.parametrize("metric", ["auc", "accuracy"])
def test_logits_of_two_classes_are_ranked_however_large_they_are(metric: str) -> None:
    """Their probabilities round to 1 from 37 on, so that ranks of probabilities would have ties."""
    given, large = said("binary"), said("binary")
    large.outputs[:] *= 100
    assert (_measured(metric, large, np.array([60])) == _measured(metric, given, np.array([60]))).all()
    assert resampled(metric, large, 5, 20).tolist() == resampled(metric, given, 5, 20).tolist()


def test_intervals_are_those_of_scipy() -> None:
    given = said("classification", samples=200)
    right = (given.outputs.argmax(1) == given.y).astype(float)
    found = interval(resampled("accuracy", given, seed=0))
    assert found is not None
    theirs = stats.bootstrap((right,), np.mean, method="percentile", n_resamples=20_000, rng=1)
    assert found.low == pytest.approx(theirs.confidence_interval.low, abs=0.012)
    assert found.high == pytest.approx(theirs.confidence_interval.high, abs=0.012)
    assert found.low < right.mean() < found.high


def test_a_gain_is_paired_so_that_what_two_models_share_cancels() -> None:
    alone = said("classification", samples=150, better=1.5)
    outputs = alone.outputs.copy()
    outputs[:10] = 0
    outputs[np.arange(10), alone.y[:10]] = 1  # ten samples are right now; nothing else changes
    now = Predictions(alone.task, alone.client, alone.row, alone.y, outputs)
    gains = resampled("accuracy", now, seed=0) - resampled("accuracy", alone, seed=0)
    found = interval(gains)
    assert found is not None
    assert found.low >= 0
    other = resampled("accuracy", now, seed=1) - resampled("accuracy", alone, seed=0)
    unpaired = interval(other)
    assert unpaired is not None
    assert unpaired.high - unpaired.low > 2 * (found.high - found.low)


def test_what_is_undefined_has_no_interval() -> None:
    given = said("binary", samples=8)
    y = np.zeros(8, dtype=np.int64)
    one_class = Predictions("binary", given.client, given.row, y, given.outputs)
    assert math.isnan(_measured("auc", one_class, np.array([len(one_class.y)]))[0])
    assert interval(resampled("auc", one_class, seed=0)) is None
    y = y.copy()
    y[0] = 1  # a third of the resamples lack it
    assert (
        interval(resampled("auc", Predictions("binary", given.client, given.row, y, given.outputs), 0))
        is None
    )
    assert interval(resampled("accuracy", one_class, seed=0)) is not None


def test_resamples_depend_on_seed_client_and_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one, better = said("classification"), said("classification", better=3.0, seed=9)
    draws = [np.concatenate(list(_draws(s, p, 20))) for s, p in ((0, one), (0, better), (1, one))]
    assert np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])
    other = said("classification", client=4)
    assert not np.array_equal(draws[0], np.concatenate(list(_draws(0, other, 20))))
    assert len(resampled("accuracy", one, 0)) == RESAMPLES
    monkeypatch.setattr(bootstrap, "AT_ONCE", 200)
    in_parts = list(_draws(0, one, 20))
    assert max(part.size for part in in_parts) <= 200, "memory is bounded"
    assert np.array_equal(np.concatenate(in_parts), draws[0])
