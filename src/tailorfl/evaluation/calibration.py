"""Calibration of probabilities: Brier score, expected calibration error, reliability bins, and temperature scaling.

Brier score: mean (p − y)² for two classes, mean Σ_k (p_k − [y = k])² for more (Brier, 1950), as in scikit-learn.

Expected calibration error: the confidence of a sample is the probability of the predicted class (the lower class wins a
tie). Samples are ordered by confidence and cut into B = min(15, n) bins of equal size (±1); samples with exactly the
same confidence share their mean accuracy, so that their order does not matter. Then

    ECE = Σ_b (n_b / n) |accuracy_b − mean confidence_b|

With few samples per bin it is biased upwards: true probabilities (of two classes, Beta(2, 2)) have 0.20 with 50
samples, 0.10 with 200 and 0.04 with 1,000. `error_by_chance` estimates the error of true probabilities.

Both are NaN without samples and if an output is NaN.

Temperature scaling (Guo et al., ICML 2017) divides a client's logits by one number:

    T = argmin_T −(1/n) Σ_j log softmax(z_j / T)[y_j]   over the client's VALIDATION part

The predicted class does not change; probabilities are fitted to the validation samples. In β = 1/T the loss is convex,
so T is where its derivative mean(Σ_k p_k z_k − z_y) changes sign, between 1/HIGHEST and HIGHEST.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailorfl.evaluation.metrics import METRICS, Bools, Floats, auc_parts, float64, starts
from tailorfl.evaluation.predictions import Predictions
from tailorfl.partition.rows import Ints

if TYPE_CHECKING:
    from torch import Tensor

BINS = 15
DRAWS = 200
NAN = float("nan")
HIGHEST = 10.0
"""Temperatures are limited to [1/HIGHEST, HIGHEST]: separable samples would have 0."""
FEWEST = 50
"""Fewest validation samples to fit a temperature. With fewer it does more harm than good: for two classes and logits
that are 1.5 times too large, the likelihood of new samples falls on average with 20 and 30 samples and rises with 50;
if logits are right, it falls by 0.015 with 50 and by 0.002 with 200."""
FURTHER: dict[str, tuple[str, ...]] = {"classification": ("auc", "brier", "ece"), "binary": ("brier", "ece")}
"""Metrics that are measured on request (`eval.metrics`), in addition to `METRICS`."""


def all_metrics(task: str) -> tuple[str, ...]:
    """Return the names of all metrics of a task."""
    return (*METRICS[task], *FURTHER.get(task, ()))


def probabilities(task: str, outputs: Tensor | NDArray[Any], temperature: float = 1.0) -> Floats:
    """Return class probabilities, [samples, classes] (two for a binary task), from outputs / temperature.

    `outputs` are logits [samples, classes]; for a binary task [samples] or [samples, 1].
    """
    from scipy.special import softmax

    logits = float64(outputs) / temperature
    if task == "binary":
        flat = logits.reshape(-1, 1)
        logits = np.concatenate([np.zeros_like(flat), flat], axis=1)
    with np.errstate(invalid="ignore"):  # the probabilities of a diverged model are NaN
        p: Floats = softmax(logits, axis=1)
    return p


def further_parts(
    task: str,
    outputs: Tensor | NDArray[Any],
    y: Tensor | NDArray[Any],
    sizes: ArrayLike,
    names: Iterable[str],
) -> dict[str, Floats]:
    """Return the metrics `names` of `FURTHER` for every part of the samples, by name [parts].

    The arguments are those of `compute_parts`.

    `auc` of several classes is the mean over classes of one-against-rest AUCs, ranked by the class's probability, over
    the classes that occur in the part together with others. NaN if there are none.
    """
    requested, lengths = set(names), np.asarray(sizes, dtype=np.int64)
    if not requested:
        return {}
    p, labels = probabilities(task, outputs), float64(y).ravel().astype(np.int64)
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
    """The bins of a reliability diagram, ordered by confidence, [bins] each; none without samples."""

    samples: Ints
    confidence: Floats
    """Mean probability of the predicted class."""
    accuracy: Floats

    @classmethod
    def of(cls, p: Floats, y: Ints, bins: int = BINS) -> Reliability:
        """Return `bins` bins, or one per sample if these are fewer, of `p` [samples, classes] and `y` [samples].

        If a probability is NaN, there is one bin of NaN.
        """
        predicted = p.argmax(axis=1)
        confidence = np.take_along_axis(p, predicted[:, None], axis=1)[:, 0]
        return cls.binned(confidence, predicted == y, bins)

    @classmethod
    def binned(cls, confidence: Floats, right: Bools, bins: int = BINS) -> Reliability:
        """Return bins from the samples' confidence and whether their predictions are right, [samples] each."""
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
    """Return the expected calibration error if probabilities [samples, classes] were true.

    It is the mean of `DRAWS` draws.
    """
    if not len(p) or np.isnan(p).any():
        return NAN
    confidence = p.max(axis=1)  # only the predicted class matters, and whether it is right
    order, cuts, sizes, accuracy = _bins(confidence, rng.random((DRAWS, len(p))) < confidence)
    gap = np.abs(accuracy - np.add.reduceat(confidence[order], cuts) / sizes)
    return float((gap @ sizes / len(p)).mean())


def _bins(confidence: Floats, right: Bools, bins: int = BINS) -> tuple[Ints, Ints, Ints, Floats]:
    """Return samples in the order of bins, the bins' starts and sizes, and their accuracy for every row of `right`.

    `confidence` [samples], at least one; `right` [rows, samples]; the accuracy is [rows, bins].
    """
    order = np.argsort(confidence)
    _, first, tie, count = np.unique(
        confidence[order], return_index=True, return_inverse=True, return_counts=True
    )
    alike = np.add.reduceat(right[:, order], first, axis=1, dtype=np.float64) / count
    bins = min(bins, len(order))
    smallest, larger = divmod(len(order), bins)
    sizes = np.array([smallest + (b < larger) for b in range(bins)], dtype=np.int64)
    cuts = starts(sizes)
    return order, cuts, sizes, np.add.reduceat(alike[:, tie], cuts, axis=1) / sizes


def fitted(predictions: Predictions) -> float | None:
    """Return the temperature fitted to one client's validation part.

    None with fewer than `FEWEST` samples, or if outputs are not finite.
    """
    from scipy.optimize import brentq
    from scipy.special import logsumexp

    if len(predictions.y) < FEWEST or not np.isfinite(predictions.outputs).all():
        return None
    logits, y = logits_of(predictions), predictions.y.ravel().astype(np.int64)

    def slope(log_beta: float) -> float:
        beta = float(np.exp(log_beta))
        scaled = beta * logits
        p = np.exp(scaled - logsumexp(scaled, axis=1, keepdims=True))
        return float(((p * logits).sum(1) - logits[np.arange(len(y)), y]).mean())

    end = float(np.log(HIGHEST))
    low, high = slope(-end), slope(end)
    if low == high == 0.0:
        return 1.0  # each sample's logits are all equal, so no temperature changes anything
    if low >= 0:
        return HIGHEST
    if high <= 0:
        return 1 / HIGHEST
    return float(np.exp(-brentq(slope, -end, end, xtol=1e-10)))


def measures(predictions: Predictions, temperature: float = 1.0) -> dict[str, float]:
    """Return ece, brier and nll (mean negative log-likelihood) of one client's samples; NaN without samples."""
    from scipy.special import logsumexp

    y = predictions.y.ravel().astype(np.int64)
    p = probabilities(predictions.task, predictions.outputs, temperature)
    logits = logits_of(predictions) / temperature
    nll = logsumexp(logits, axis=1) - logits[np.arange(len(y)), y] if len(y) else np.array([np.nan])
    return {"ece": Reliability.of(p, y).error, "brier": brier(p, y), "nll": float(nll.mean())}


def logits_of(predictions: Predictions) -> Floats:
    """Return the logits of every class, float64 [samples, classes]."""
    logits = predictions.outputs.astype(np.float64)
    return np.concatenate([np.zeros_like(logits), logits], axis=1) if predictions.task == "binary" else logits
