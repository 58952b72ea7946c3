"""Intervals of one client's metric, and of what it gains: percentile bootstrap of its own test samples.

A resample draws n of the client's n test samples with replacement; all models of a client are measured on the same
resamples, so a difference of two is paired sample by sample. The interval lies between the 2.5th and 97.5th percentile
of the metric (or difference) over `RESAMPLES` resamples. It says how far the number may be off because the test part
is small; not what another training run, or another split, would give.

Resamples in which the metric is undefined (AUC with one class) are left out; with fewer than `ENOUGH` of them defined
there is no interval.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailorfl.data.rows import Ints
from tailorfl.evaluation import parts
from tailorfl.evaluation.calibration import FURTHER, further_parts, probabilities
from tailorfl.evaluation.metrics import ClassCounts, compute_parts
from tailorfl.evaluation.parts import Floats
from tailorfl.evaluation.predictions import Predictions
from tailorfl.training.keys import generator

RESAMPLES = 2000
LEVEL = 0.95
ENOUGH = 0.9
"""Share of the resamples in which a metric must be defined."""
AT_ONCE = 500_000
"""Samples that are measured together."""
CLASSES = ("classification", "binary")
COUNTED = ("accuracy", "balanced_accuracy", "macro_f1")
"""Metrics that follow from how often classes are hit, so from sums over samples."""


@dataclass(frozen=True)
class Interval:
    """Ends of a 95 % interval."""

    low: float
    high: float

    @property
    def leaves_out_zero(self) -> bool:
        """Whether a difference is beyond the noise of the test part."""
        return self.low > 0 or self.high < 0


def value(metric: str, said: Predictions) -> float:
    """Return a metric of one client's predictions; NaN where it is undefined."""
    return float(_measured(said.task, metric, said.outputs, said.y, np.array([len(said.y)]))[0])


def resampled(metric: str, said: Predictions, seed: int, resamples: int = RESAMPLES) -> Floats:
    """Return the metric on every resample of one client's predictions, [resamples].

    Resamples depend on the seed, the client and its number of samples alone.
    """
    found = []
    for drawn in _draws(seed, said, resamples):
        if said.task in CLASSES and metric in COUNTED:
            found.append(_counted(metric, said, _times(drawn)))
        elif said.task in CLASSES and metric == "auc":
            found.append(_areas(said, _times(drawn)))
        else:
            rows, sizes = drawn.ravel(), np.full(len(drawn), len(said.y))
            found.append(_measured(said.task, metric, said.outputs[rows], said.y[rows], sizes))
    return np.concatenate(found)


def interval(values: Floats) -> Interval | None:
    """Return the percentile interval of a metric, or of a difference, on resamples; None where too few are defined."""
    known = values[np.isfinite(values)]
    if len(known) < ENOUGH * len(values):
        return None
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def _draws(seed: int, said: Predictions, resamples: int) -> Iterator[Ints]:
    """Places of the samples of each resample, [some resamples, samples]."""
    samples = len(said.y)
    rng = generator(seed, "bootstrap", int(said.client[0]))
    step = max(1, AT_ONCE // samples)
    for start in range(0, resamples, step):
        yield rng.integers(0, samples, size=(min(step, resamples - start), samples))


def _times(drawn: Ints) -> Floats:
    """How often each sample is in each resample, [resamples, samples]."""
    place = drawn + drawn.shape[1] * np.arange(len(drawn))[:, None]
    return np.bincount(place.ravel(), minlength=drawn.size).reshape(drawn.shape).astype(np.float64)


def _counted(metric: str, said: Predictions, times: Floats) -> Floats:
    """Return the metric of resamples, whose counts of classes are sums over samples."""
    y = said.y.ravel().astype(np.int64)
    logits: NDArray[Any] = said.outputs
    if said.task == "binary":
        logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
    one = ClassCounts.of(logits, y, np.ones(len(y), dtype=np.int64))  # every sample is a part
    sums = [np.rint(times @ part).astype(np.int64) for part in (one.hits, one.targets, one.predictions)]
    return ClassCounts(*sums).metrics()[metric]


def _areas(said: Predictions, times: Floats) -> Floats:
    """Return the AUC of resamples: the share of pairs in the right order, every pair as often as it is drawn."""
    p, y = probabilities(said.task, said.outputs), said.y.ravel().astype(np.int64)
    if np.isnan(p).any():
        return np.full(len(times), np.nan)
    found = []
    for k in [1] if said.task == "binary" else range(p.shape[1]):
        positive = y == k
        above = p[positive, k][:, None] - p[~positive, k][None]
        ordered = (above > 0) + 0.5 * (above == 0)
        here, rest = times[:, positive], times[:, ~positive]
        with np.errstate(invalid="ignore"):  # without positives or negatives it is undefined
            found.append(((here @ ordered) * rest).sum(1) / (here.sum(1) * rest.sum(1)))
    each = np.ascontiguousarray(np.stack(found, axis=1))
    return parts.means_where(each, ~np.isnan(each))


def _measured(task: str, metric: str, outputs: NDArray[Any], y: NDArray[Any], sizes: Ints) -> Floats:
    if metric in FURTHER.get(task, ()):
        return further_parts(task, outputs, y, sizes, [metric])[metric]
    return compute_parts(task, outputs, y, sizes)[metric]
