"""Whether probabilities can be believed: Brier score, expected calibration error, and what a reliability diagram shows.

Brier score: of two classes mean (p − y)², of more mean Σ_k (p_k − [y = k])² (Brier, 1950), as in scikit-learn.

Expected calibration error: the confidence of a sample is the probability of the class that is predicted (a tie is won
by the lower class). Samples are ordered by it and cut into B = min(15, n) bins of equally many (±1); samples of exactly
one confidence are taken to be right alike, by their mean, so that their order does not matter. Then

    ECE = Σ_b (n_b / n) |accuracy_b − mean confidence_b|

With few samples a bin this is biased upwards: true probabilities (of two classes, Beta(2, 2)) have 0.20 with 50
samples, 0.10 with 200 and 0.04 with 1,000. `error_by_chance` says what to expect of true ones.

Both are NaN without samples and where an output is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailorfl.evaluation import parts
from tailorfl.evaluation.metrics import METRICS, auc_parts
from tailorfl.evaluation.parts import Bools, Floats
from tailorfl.partition.rows import Ints

if TYPE_CHECKING:
    from torch import Tensor

BINS = 15
DRAWS = 200
NAN = float("nan")
FURTHER: dict[str, tuple[str, ...]] = {"classification": ("auc", "brier", "ece"), "binary": ("brier", "ece")}
"""What is measured where it is asked for (`eval.metrics`), beside `METRICS`."""


def all_metrics(task: str) -> tuple[str, ...]:
    """Return the names of all metrics that a task has."""
    return (*METRICS[task], *FURTHER.get(task, ()))


def probabilities(task: str, outputs: Tensor | NDArray[Any], temperature: float = 1.0) -> Floats:
    """Return the probabilities of the classes, [samples, classes] (two of a binary task), of outputs / temperature.

    `outputs` are logits [samples, classes], of a binary task [samples] or [samples, 1].
    """
    from scipy.special import softmax

    logits = _numpy(outputs) / temperature
    if task == "binary":
        flat = logits.reshape(-1, 1)
        logits = np.concatenate([np.zeros_like(flat), flat], axis=1)
    with np.errstate(invalid="ignore"):  # of a diverged model: its probabilities are NaN
        p: Floats = softmax(logits, axis=1)
    return p


def further_parts(
    task: str,
    outputs: Tensor | NDArray[Any],
    y: Tensor | NDArray[Any],
    sizes: ArrayLike,
    names: Iterable[str],
) -> dict[str, Floats]:
    """Return the metrics `names` out of `FURTHER` of every part of the samples, by name [parts].

    The arguments are those of `compute_parts`.

    `auc` of several classes is the mean over classes of that of each against the rest, by its probability: over the
    classes of which the part has samples, but not those alone. NaN where there are none.
    """
    requested, lengths = set(names), np.asarray(sizes, dtype=np.int64)
    if not requested:
        return {}
    p, labels = probabilities(task, outputs), _numpy(y).ravel().astype(np.int64)
    values: dict[str, Floats] = {}
    if "auc" in requested:
        values["auc"] = auc_parts(p, np.eye(p.shape[1])[labels], lengths)
    cuts = np.cumsum(lengths)[:-1]
    pairs = list(zip(np.split(p, cuts), np.split(labels, cuts), strict=True))
    if "brier" in requested:
        values["brier"] = np.array([brier(*pair) for pair in pairs])
    if "ece" in requested:
        values["ece"] = np.array([Reliability.of(*pair).error for pair in pairs])
    return values


def brier(p: Floats, y: Ints) -> float:
    """Return the Brier score of probabilities [samples, classes] and classes [samples]."""
    if not len(y):
        return NAN
    if p.shape[1] == 2:
        return float(np.square(p[:, 1] - y).mean())
    return float(np.square(p - np.eye(p.shape[1])[y]).sum(axis=1).mean())


@dataclass(frozen=True)
class Reliability:
    """The bins of a reliability diagram, in the order of their confidence, [bins] each; none without samples."""

    samples: Ints
    confidence: Floats
    """Mean probability of the predicted class."""
    accuracy: Floats

    @classmethod
    def of(cls, p: Floats, y: Ints, bins: int = BINS) -> Reliability:
        """So many bins of probabilities [samples, classes] and classes [samples], fewer of fewer samples.

        Where a probability is NaN it is one bin of NaN.
        """
        predicted = p.argmax(axis=1)
        confidence = np.take_along_axis(p, predicted[:, None], axis=1)[:, 0]
        return cls.binned(confidence, predicted == y, bins)

    @classmethod
    def binned(cls, confidence: Floats, right: Bools, bins: int = BINS) -> Reliability:
        """Return the bins of samples by their confidence and whether the prediction is right, [samples] each."""
        if np.isnan(confidence).any():
            return cls(np.array([len(right)]), np.array([NAN]), np.array([NAN]))
        if not len(right):
            none = np.empty(0)
            return cls(np.empty(0, dtype=np.int64), none, none)
        order, cuts, sizes, accuracy = _bins(confidence, right[None], bins)
        return cls(sizes, np.add.reduceat(confidence[order], cuts) / sizes, accuracy[0])

    @property
    def error(self) -> float:
        """The expected calibration error."""
        if not len(self.samples):
            return NAN
        gap = np.abs(self.accuracy - self.confidence)
        return float((self.samples * gap).sum() / self.samples.sum())


def error_by_chance(p: Floats, rng: np.random.Generator) -> float:
    """Return the calibration error to expect if probabilities [samples, classes] were true.

    The mean of `DRAWS` draws.
    """
    if not len(p) or np.isnan(p).any():
        return NAN
    confidence = p.max(axis=1)  # of the classes it matters alone whether the predicted one is right
    order, cuts, sizes, accuracy = _bins(confidence, rng.random((DRAWS, len(p))) < confidence)
    gap = np.abs(accuracy - np.add.reduceat(confidence[order], cuts) / sizes)
    return float((gap @ sizes / len(p)).mean())


def _bins(confidence: Floats, right: Bools, bins: int = BINS) -> tuple[Ints, Ints, Ints, Floats]:
    """Return samples in the order of their bins, where bins begin, their sizes and accuracy for every row of `right`.

    `confidence` [samples], at least one; `right` [rows, samples]; the accuracy is [rows, bins].
    """
    order = np.argsort(confidence, kind="stable")
    _, first, tie, count = np.unique(
        confidence[order], return_index=True, return_inverse=True, return_counts=True
    )
    alike = np.add.reduceat(right[:, order], first, axis=1, dtype=np.float64) / count
    bins = min(bins, len(order))
    smallest, larger = divmod(len(order), bins)
    sizes = np.array([smallest + (b < larger) for b in range(bins)], dtype=np.int64)
    cuts = parts.starts(sizes)
    return order, cuts, sizes, np.add.reduceat(alike[:, tie], cuts, axis=1) / sizes


def _numpy(values: Tensor | NDArray[Any]) -> Floats:
    if not isinstance(values, np.ndarray):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)
