"""Metrics of one model on one test set, from model outputs and targets.

| task | outputs | targets | metrics (the first one is the primary metric) |
|---|---|---|---|
| classification | [samples, classes] logits | [samples] class | accuracy, balanced_accuracy, macro_f1 |
| binary | [samples] or [samples, 1] logit | as outputs, 0/1 | accuracy, balanced_accuracy, macro_f1, auc |
| multilabel | [samples, labels] logits | [samples, labels] 0/1 | auc, accuracy |
| regression | [samples, targets] | [samples, targets] | mse, r2 |
| counts | [samples, counts] logarithms of means | [samples, counts] | deviance, mae |
| survival | [samples] or [samples, 1] risk | [samples, 2] event 0/1, time | c_index |
| generation | [samples, 5], see below | not used | rouge1, rouge1_precision, rouge1_recall, token_accuracy |

For generation, outputs are computed where the model runs: the number of right tokens of a sample's response, each
predicted from the right ones before it; the number of tokens; and ROUGE-1 precision, recall and F1 in [0, 1] of the
generated text (NaN: none). ROUGE-1 is reported in percent, token_accuracy as the share of all tokens.

An undefined metric is NaN, never a made-up number: every metric of an empty test set, AUC if only one class is present.
A model that has diverged must not look good by accident: a sample whose output is NaN counts as wrong in metrics that
count samples, and makes metrics that rank or average outputs NaN.

Metrics of many parts of the samples at once, such as every client's, are bit-identical to those of each part alone.
Parts are consecutive in one array, with lengths `sizes` [parts]. Floating sums depend on their order, so parts of equal
length are summed together as rows of a table: numpy sums a row like an array of that length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailorfl.errors import check_known
from tailorfl.partition.rows import Ints

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "balanced_accuracy", "macro_f1"),
    "binary": ("accuracy", "balanced_accuracy", "macro_f1", "auc"),
    "multilabel": ("auc", "accuracy"),
    "regression": ("mse", "r2"),
    "counts": ("deviance", "mae"),
    "survival": ("c_index",),
    "generation": ("rouge1", "rouge1_precision", "rouge1_recall", "token_accuracy"),
}
UNIT_METRICS = frozenset({"accuracy", "balanced_accuracy", "macro_f1", "auc", "c_index", "token_accuracy"})
"""Metrics between 0 and 1: reports show them in percent, and a target may be given as a share."""
LOWER_IS_BETTER = frozenset({"mse", "deviance", "mae", "loss", "sharpness", "brier", "ece"})
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("accuracy", "balanced_accuracy", "macro_f1", "auc", "c_index", "ece"), (0.0, 1.0)),
    **dict.fromkeys(("rouge1", "rouge1_precision", "rouge1_recall"), (0.0, 100.0)),
    **dict.fromkeys(("mse", "deviance", "mae"), (0.0, math.inf)),
    "token_accuracy": (0.0, 1.0),
    "brier": (0.0, 2.0),
    "r2": (-math.inf, 1.0),
}
"""Lowest and highest value of metrics; for other metrics these are unknown."""
PAIR_BLOCK = 1 << 22  # most pairs that `concordance_index` compares at once: keeps it within tens of MB


def primary(task: str) -> tuple[str, bool]:
    """Return the name of the metric that selects and compares models of a task, and whether higher is better."""
    name = _names(task)[0]
    return name, name not in LOWER_IS_BETTER


def compute_parts(
    task: str, outputs: Tensor | NDArray[Any], y: Tensor | NDArray[Any], sizes: ArrayLike
) -> dict[str, Floats]:
    """Return all metrics of a task for every part of the samples, by name [parts]; shapes and names as in the table.

    `sizes` [parts] are the lengths of the parts, which are consecutive in `outputs` and `y`. Raises ConfigError for an
    unknown task and ValueError if outputs and targets do not fit each other.
    """
    names = _names(task)
    lengths = np.asarray(sizes, dtype=np.int64)
    if not len(outputs) == len(y) == lengths.sum():
        raise ValueError(f"{len(outputs)} outputs for {len(y)} targets, in parts of {lengths.sum()} samples")
    if task == "classification":
        return ClassCounts.of(_as_given(outputs), _as_given(y), lengths).metrics()
    scores, targets = float64(outputs), float64(y)
    if task == "binary":
        flat, labels = scores.ravel(), targets.ravel()
        _same_shape(flat, labels)
        logits = np.stack([np.zeros_like(flat), flat], axis=1)
        counts = ClassCounts.of(logits, labels, lengths)
        return {**counts.metrics(), "auc": auc_parts(flat, labels, lengths)}
    if task == "multilabel":
        _same_shape(scores, targets)
        correct = (((scores > 0) == (targets > 0.5)) & ~np.isnan(scores)).astype(np.float64)
        shares = part_means(correct.ravel(), lengths * scores.shape[1])
        return {"auc": auc_parts(scores, targets, lengths), "accuracy": shares}
    if task in ("regression", "counts"):
        _same_shape(scores, targets)
    cuts = np.cumsum(lengths)[:-1]
    measured = [
        _of_part(task, some, few) if len(some) else dict.fromkeys(names, float("nan"))
        for some, few in zip(np.split(scores, cuts), np.split(targets, cuts), strict=True)
    ]
    return {name: np.array([values[name] for values in measured], dtype=np.float64) for name in names}


def _of_part(task: str, scores: Floats, targets: Floats) -> dict[str, float]:
    """Return the metrics of one part, which has samples, for tasks that compute parts one by one."""
    if task == "survival":
        return {"c_index": concordance_index(targets[:, 0], targets[:, 1], scores)}
    if task == "generation":
        return _of_responses(scores)
    with np.errstate(over="ignore", invalid="ignore"):  # a diverged model's errors are infinite or NaN
        return _of_numbers(scores, targets) if task == "regression" else _of_counts(scores, targets)


@dataclass(frozen=True)
class ClassCounts:
    """Class counts of the samples of each part, [parts, classes] each."""

    hits: Ints
    """Samples of which the class is the target and is predicted."""
    targets: Ints
    predictions: Ints
    """A NaN output predicts no class."""

    @classmethod
    def of(cls, outputs: NDArray[Any], y: NDArray[Any], sizes: ArrayLike) -> ClassCounts:
        """Return the counts of `outputs` [samples, classes], logits or probabilities, and `y` [samples] classes.

        The lower class wins a tie. Raises ValueError for a class outside 0 .. classes - 1.
        """
        lengths, labels = np.asarray(sizes, dtype=np.int64), y.astype(np.int64)
        classes = outputs.shape[1]
        if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
            raise ValueError(
                f"labels are in {labels.min()} .. {labels.max()}, but the model has {classes} classes"
            )
        predicted = outputs.argmax(axis=1)
        # argmax treats NaN as the largest value, which would credit a diverged model with some class
        is_number = ~np.isnan(np.take_along_axis(outputs, predicted[:, None], axis=1)[:, 0])
        first = owners(lengths) * classes
        of_target, of_prediction = first + labels, (first + predicted)[is_number]
        counted = of_target[is_number & (predicted == labels)], of_target, of_prediction
        shape = (len(lengths), classes)
        return cls(*(np.bincount(c, minlength=shape[0] * classes).reshape(shape) for c in counted))

    def metrics(self) -> dict[str, Floats]:
        """Return the three metrics computed from counts, [parts]; all NaN for a part without samples.

        accuracy: the share of hits. balanced_accuracy: mean recall over the classes that occur in the targets.
        macro_f1: mean F1 over the classes in targets or predictions. All as in scikit-learn.
        """
        # F1 = 2 TP / (2 TP + FP + FN), and its denominator is the number of targets plus the number of
        # predictions
        either = self.targets + self.predictions
        with np.errstate(invalid="ignore"):
            return {
                "accuracy": self.hits.sum(axis=1) / self.targets.sum(axis=1),
                "balanced_accuracy": means_where(self.hits / self.targets, self.targets > 0),
                "macro_f1": means_where(2 * self.hits / either, either > 0),
            }


def auc_parts(scores: Tensor | NDArray[Any], y: Tensor | NDArray[Any], sizes: ArrayLike) -> Floats:
    """Return the mean area under the ROC curve over the labels that have both classes, [parts].

    `scores` and `y` (0/1) are [samples] or [samples, labels]; only the order of scores matters, so logits need no
    sigmoid. NaN for a part in which no label has both classes or a score is NaN.
    """
    ranked, targets = _columns(float64(scores)), _columns(float64(y)) > 0.5
    _same_shape(ranked, targets)
    lengths, labels = np.asarray(sizes, dtype=np.int64), ranked.shape[1]
    # every label of every part has its own curve: [labels, samples], label by label
    curves = np.tile(lengths, labels)
    positives = np.bincount(owners(curves), weights=targets.T.ravel(), minlength=len(curves)).reshape(
        labels, -1
    )
    diverged = np.bincount(owners(lengths), weights=np.isnan(ranked).any(axis=1), minlength=len(lengths))
    present = (positives > 0) & (positives < lengths) & (diverged == 0)
    of_present = np.repeat(present.ravel(), curves)
    # only the order of infinite scores matters
    finite = np.clip(ranked.T.ravel()[of_present], -1e300, 1e300)
    areas = np.zeros(present.shape)
    if of_present.any():
        areas[present] = roc_areas(finite, targets.T.ravel()[of_present], curves[present.ravel()])
    return means_where(np.ascontiguousarray(areas.T), np.ascontiguousarray(present.T))


def concordance_index(
    event: Tensor | NDArray[Any], time: Tensor | NDArray[Any], risk: Tensor | NDArray[Any]
) -> float:
    """Return Harrell's concordance index: the share of comparable pairs whose higher risk has the earlier event.

    `event` [samples] is 1 for an observed event and 0 for censoring, `time` [samples] its time in any unit,
    `risk` [samples] or [samples, 1] is higher for an earlier event. A pair (i, j) is comparable if i has an event and
    either t_i < t_j, or t_i = t_j and j is censored (j outlived i). Equal risks count one half. NaN without comparable
    pairs, and if a risk is NaN.
    """
    happened, times, risks = float64(event) > 0.5, float64(time), float64(risk).ravel()
    if not len(happened) == len(times) == len(risks):
        raise ValueError(f"{len(happened)} events, {len(times)} times and {len(risks)} risks")
    if np.isnan(risks).any():
        return float("nan")
    rows = np.flatnonzero(happened)
    pairs, concordant = 0, 0.0
    for start in range(0, len(rows), step := max(1, PAIR_BLOCK // max(1, len(times)))):
        block = rows[start : start + step]
        later = times[block, None] < times
        later |= (times[block, None] == times) & ~happened
        higher, equal = risks[block, None] > risks, risks[block, None] == risks
        pairs += int(later.sum())
        concordant += int((later & higher).sum()) + 0.5 * int((later & equal).sum())
    return concordant / pairs if pairs else float("nan")


def _of_numbers(predicted: Floats, targets: Floats) -> dict[str, float]:
    """Return the mean squared error, and the mean coefficient of determination over the targets that vary.

    R² is NaN if no target varies, as with fewer than two samples: the variance that it compares with is then zero.
    Arguments are [samples] or [samples, targets].
    """
    squares = np.square(predicted - targets)
    total = np.square(targets - targets.mean(axis=0)).sum(axis=0)
    # not `total > 0`: the mean of equal numbers may be off by one rounding, which leaves a tiny positive sum
    varies = targets.max(axis=0) > targets.min(axis=0)
    shares = squares.sum(axis=0)[varies] / total[varies]
    return {"mse": float(squares.mean()), "r2": float(np.mean(1 - shares)) if varies.any() else float("nan")}


def _of_counts(logs: Floats, targets: Floats) -> dict[str, float]:
    """Return the mean Poisson deviance 2 (y log(y / m) - y + m) and mean |y - m|, m = exp(output)."""
    means = np.exp(logs)
    excess = targets * (np.log(np.where(targets > 0, targets, 1.0)) - np.where(targets > 0, logs, 0.0))
    deviance = 2 * (excess - targets + means)
    return {"deviance": float(deviance.mean()), "mae": float(np.abs(targets - means).mean())}


def credited(outputs: Tensor | NDArray[Any], credit: Tensor | NDArray[Any]) -> float:
    """Return 100 times the mean credit of the likeliest classes; NaN without samples; a NaN output earns nothing.

    `outputs` and `credit` (in [0, 1]) are [samples, classes].
    """
    scores, values = float64(outputs), float64(credit)
    _same_shape(scores, values)
    if not len(scores):
        return float("nan")
    earned = np.take_along_axis(values, scores.argmax(axis=1)[:, None], axis=1)[:, 0]
    return float(100 * np.where(np.isnan(scores).any(axis=1), 0.0, earned).mean())


def _of_responses(scores: Floats) -> dict[str, float]:
    """Return the metrics of a generation task from [samples, 5] (right tokens, tokens, precision, recall, F1)."""
    generated = scores[~np.isnan(scores[:, 4]), 2:]
    precision, recall, f1 = 100 * generated.mean(axis=0) if len(generated) else (float("nan"),) * 3
    return {
        "rouge1": float(f1),
        "rouge1_precision": float(precision),
        "rouge1_recall": float(recall),
        "token_accuracy": float(scores[:, 0].sum() / max(scores[:, 1].sum(), 1.0)),
    }


def _names(task: str) -> tuple[str, ...]:
    check_known("task", task, METRICS)
    return METRICS[task]


def _as_given(values: Tensor | NDArray[Any]) -> NDArray[Any]:
    """Return the values on the CPU in their own precision, or a higher one for types that numpy lacks."""
    if not isinstance(values, np.ndarray) and hasattr(values, "detach"):
        tensor = values.detach().cpu()
        values = tensor.numpy() if tensor.dtype.itemsize >= 4 else tensor.double().numpy()
    return np.asarray(values)


def float64(values: Tensor | NDArray[Any]) -> Floats:
    """Return the values as float64 on the CPU, which is exact for float32, float16, bfloat16 and class numbers."""
    if not isinstance(values, np.ndarray) and hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def _columns(values: Floats) -> Floats:
    return values[:, None] if values.ndim == 1 else values


def _same_shape(scores: NDArray[Any], targets: NDArray[Any]) -> None:
    """Raise ValueError unless shapes agree: broadcasting would turn [n] against [n, 1] into n x n pairs."""
    if scores.shape != targets.shape:
        raise ValueError(f"outputs of shape {list(scores.shape)} for targets of shape {list(targets.shape)}")


def owners(sizes: Ints) -> Ints:
    """Return the part of every sample, [samples]."""
    return np.repeat(np.arange(len(sizes)), sizes)


def starts(sizes: Ints) -> Ints:
    """Return the start of every part, [parts]."""
    begin: Ints = np.cumsum(sizes) - sizes
    return begin


def part_sums(values: Floats, sizes: Ints) -> Floats:
    """Return the sum of every part of `values` [samples], [parts]; 0 for an empty one."""
    begin, out = starts(sizes), np.zeros(len(sizes))
    for length in np.unique(sizes[sizes > 0]):
        chosen = np.flatnonzero(sizes == length)
        out[chosen] = values[begin[chosen, None] + np.arange(length)].sum(axis=1)
    return out


def part_means(values: Floats, sizes: Ints) -> Floats:
    """Return the mean of every part of `values` [samples], [parts]; NaN for an empty one."""
    with np.errstate(invalid="ignore"):
        return part_sums(values, sizes) / sizes


def means_where(values: Floats, chosen: Bools) -> Floats:
    """Return the mean over the chosen entries of every row of `values` [parts, entries], [parts].

    NaN for a row without chosen entries.
    """
    return part_means(values[chosen], chosen.sum(axis=1))


def roc_areas(scores: Floats, positive: Bools, sizes: Ints) -> Floats:
    """Return the area under the ROC curve of every part, [parts]; each has samples of both classes.

    `scores` [samples] are finite, `positive` [samples]. The curve has a corner for every distinct score, except corners
    on a line between their neighbours, and its area is summed by trapezoids, in the order and with the rounding of
    scikit-learn's `roc_auc_score`, which spends most of its time on checking its arguments.
    """
    part = owners(sizes)
    order = np.lexsort((-scores, part))
    ranked, part = scores[order], part[order]
    begin, so_far = starts(sizes), np.cumsum(positive[order], dtype=np.int64)
    right = so_far - np.concatenate([[0], so_far])[begin][part]
    wrong = np.arange(1, len(part) + 1) - begin[part] - right
    # Equal scores are one corner, after the last of them.
    corner = np.concatenate([(ranked[1:] != ranked[:-1]) | (part[1:] != part[:-1]), [True]])
    right, wrong, part = right[corner], wrong[corner], part[corner]
    bends = _bends(right, part) | _bends(wrong, part)
    right, wrong, part = right[bends], wrong[bends], part[bends]
    corners = np.bincount(part, minlength=len(sizes))
    first, last = starts(corners), np.cumsum(corners) - 1
    y, x = right / right[last][part], wrong / wrong[last][part]
    before_y, before_x = np.concatenate([[0.0], y[:-1]]), np.concatenate([[0.0], x[:-1]])
    before_y[first] = before_x[first] = 0.0  # every curve starts at the origin
    return part_sums((x - before_x) * (y + before_y) / 2.0, corners)


def _bends(counts: Ints, part: Ints) -> Bools:
    """Return where the second difference of `counts` is not 0, and both ends of every part."""
    bends = np.ones(len(counts), dtype=np.bool_)
    inner = (part[2:] == part[:-2]) & (counts[2:] - 2 * counts[1:-1] + counts[:-2] == 0)
    bends[1:-1] = ~inner
    return bends
