"""Intervals of one client's metric, and of its gain: percentile bootstrap of the client's test samples.

A resample draws n of the client's n test samples with replacement; all models of a client are measured on the same
resamples, so a difference of two is paired sample by sample. The interval ends at the 2.5th and 97.5th percentile of
the metric (or difference) over `RESAMPLES` resamples. It shows the uncertainty due to a small test part, not that of
another training run or another split.

Resamples in which the metric is undefined (AUC with one class) are left out; if it is defined in fewer than the share
`ENOUGH` of them, there is no interval.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tailorfl.evaluation.calibration import FURTHER, further_parts, logits_of, probabilities
from tailorfl.evaluation.metrics import ClassCounts, Floats, compute_parts, means_where
from tailorfl.evaluation.predictions import Predictions
from tailorfl.partition.rows import Ints
from tailorfl.training.keys import generator

RESAMPLES = 2000
LEVEL = 0.95
ENOUGH = 0.9
"""Share of the resamples in which a metric must be defined."""
AT_ONCE = 500_000
"""Number of samples that are measured together."""
CLASSES = ("classification", "binary")
COUNTED = ("accuracy", "balanced_accuracy", "macro_f1")
"""Metrics that can be computed from class counts, which are sums over samples."""


@dataclass(frozen=True)
class Interval:
    """Ends of a 95 % interval."""

    low: float
    high: float

    @property
    def leaves_out_zero(self) -> bool:
        """Whether a difference exceeds the noise of the test part."""
        return self.low > 0 or self.high < 0


def resampled(metric: str, predictions: Predictions, seed: int, resamples: int = RESAMPLES) -> Floats:
    """Return the metric on every resample of one client's predictions, [resamples].

    Resamples depend only on the seed, the client and its number of samples.
    """
    values = []
    for drawn in _draws(seed, predictions, resamples):
        if predictions.task in CLASSES and metric in COUNTED:
            values.append(_counted(metric, predictions, _times(drawn)))
        elif predictions.task in CLASSES and metric == "auc":
            values.append(_areas(predictions, _times(drawn)))
        else:
            sizes = np.full(len(drawn), len(predictions.y))
            values.append(_measured(metric, predictions.at(drawn.ravel()), sizes))
    return np.concatenate(values)


def interval(values: Floats) -> Interval | None:
    """Return the percentile interval of a metric, or of a difference, on resamples; None if too few are defined."""
    finite = values[np.isfinite(values)]
    if len(finite) < ENOUGH * len(values):
        return None
    low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def _draws(seed: int, predictions: Predictions, resamples: int) -> Iterator[Ints]:
    """Yield positions of the samples of resamples, [some resamples, samples]."""
    samples = len(predictions.y)
    rng = generator(seed, "bootstrap", int(predictions.client[0]))
    step = max(1, AT_ONCE // samples)
    for start in range(0, resamples, step):
        yield rng.integers(0, samples, size=(min(step, resamples - start), samples))


def _times(drawn: Ints) -> Floats:
    """Return how often each sample occurs in each resample, [resamples, samples]."""
    cells = drawn + drawn.shape[1] * np.arange(len(drawn))[:, None]
    return np.bincount(cells.ravel(), minlength=drawn.size).reshape(drawn.shape).astype(np.float64)


def _counted(metric: str, predictions: Predictions, times: Floats) -> Floats:
    """Return the metric of resamples from class counts, which are sums over samples."""
    y = predictions.y.ravel().astype(np.int64)
    counts = ClassCounts.of(
        logits_of(predictions), y, np.ones(len(y), dtype=np.int64)
    )  # every sample is a part
    sums = (np.rint(times @ part).astype(np.int64) for part in vars(counts).values())
    return ClassCounts(*sums).metrics()[metric]


def _areas(predictions: Predictions, times: Floats) -> Floats:
    """Return the AUC of resamples: the share of pairs in the right order, each counted as often as it is drawn."""
    # Probabilities near 1 are rounded, which would make ties of unequal logits.
    of_logits = predictions.task == "binary"
    scores = logits_of(predictions) if of_logits else probabilities(predictions.task, predictions.outputs)
    if np.isnan(scores).any():
        return np.full(len(times), np.nan)
    areas, y = [], predictions.y.ravel().astype(np.int64)
    for k in [1] if of_logits else range(scores.shape[1]):
        _, tie = np.unique(scores[:, k], return_inverse=True)
        order = np.argsort(tie)
        first = np.flatnonzero(
            np.diff(tie[order], prepend=-1)
        )  # the first sample of each score, in rising order
        positives, negatives = (
            np.add.reduceat(np.where(chosen, times, 0.0)[:, order], first, axis=1)
            for chosen in (y == k, y != k)
        )
        below = np.cumsum(negatives, axis=1) - negatives / 2  # an equal score is half below
        with np.errstate(invalid="ignore"):  # without positives or negatives it is undefined
            areas.append((positives * below).sum(1) / (positives.sum(1) * negatives.sum(1)))
    by_class = np.ascontiguousarray(np.stack(areas, axis=1))
    return means_where(by_class, ~np.isnan(by_class))


def _measured(metric: str, predictions: Predictions, sizes: Ints) -> Floats:
    arguments = predictions.task, predictions.outputs, predictions.y, sizes
    if metric in FURTHER.get(predictions.task, ()):
        return further_parts(*arguments, [metric])[metric]
    return compute_parts(*arguments)[metric]
