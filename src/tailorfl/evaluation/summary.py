"""Distribution of a metric over clients: mean, spread and tails; and summaries of an evaluation's records.

The tails follow PLGU ("How to Prevent the Poor Performance Clients for Personalized Federated Learning?",
CVPR 2023), whose tables show the average and the lowest and top 5 % of the clients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tailorfl.evaluation.metrics import LOWER_IS_BETTER

NAN = float("nan")

Record = dict[str, Any]
"""{round, client, set, model, samples, loss, metric values}."""
OF_RECORD = ("round", "client", "set", "model", "samples")
"""Keys that identify a record; all others are measured."""
QUANTILES = (10, 25, 50, 75, 90)
"""Quantiles over clients, in percent, of the leading metric in a round's record."""
Summaries = dict[str, dict[str, dict[str, dict[str, float]]]]
"""{model: {set: {metric: statistics over clients}}}."""


def summarize(
    values: ArrayLike,
    weights: ArrayLike,
    reference: ArrayLike | None = None,
    *,
    higher_is_better: bool = True,
) -> dict[str, float]:
    """Return statistics of one metric over clients, by name.

    `values` [clients] is the metric of each client, `weights` [clients] its number of test samples (not
    negative), `reference` [clients] the same metric of LocalTrain's personal models. Returned:

    - mean (clients have equal weights), weighted_mean, std (population, ddof 0), median, min, max;
    - worst5, worst10, best5, best10: the mean of the ceil(0.05 N) or ceil(0.1 N) worst or best clients, where
      worst is the low end if higher is better and the high end otherwise;
    - clients: number of counted clients; excluded: number of others, whose value is NaN (without test samples);
    - share_beating_local: share of the counted clients that are strictly better than their reference, among
      those that have one.

    A statistic over no clients is NaN. Raises ValueError if lengths differ or a weight is negative.
    """
    scores = np.asarray(values, dtype=np.float64)
    sizes = np.asarray(weights, dtype=np.float64)
    local = np.full_like(scores, NAN) if reference is None else np.asarray(reference, dtype=np.float64)
    if scores.ndim != 1 or scores.shape != sizes.shape or scores.shape != local.shape:
        raise ValueError(
            f"expected one value, weight and reference per client, got shapes {scores.shape}, {sizes.shape} and "
            f"{local.shape}"
        )
    if (sizes < 0).any():
        raise ValueError("weights are sample counts and cannot be negative")
    counted = ~np.isnan(scores)
    scores, sizes, local = scores[counted], sizes[counted], local[counted]
    result = {"clients": float(len(scores)), "excluded": float((~counted).sum())}
    for name, is_worst in (("worst", higher_is_better), ("best", not higher_is_better)):
        found = tails(scores, (5, 10), low=is_worst)
        result |= {f"{name}{percent}": value for percent, value in zip((5, 10), found, strict=True)}
    known = ~np.isnan(local)
    better = scores > local if higher_is_better else scores < local
    # a metric may be infinite (a diverged regression): its mean is infinite, its spread undefined
    with np.errstate(invalid="ignore"):
        return {
            "mean": _mean(scores),
            "weighted_mean": float(np.sum(scores * (sizes / sizes.sum()))) if sizes.sum() > 0 else NAN,
            "std": float(np.std(scores)) if len(scores) else NAN,
            "median": float(np.median(scores)) if len(scores) else NAN,
            "min": float(scores.min()) if len(scores) else NAN,
            "max": float(scores.max()) if len(scores) else NAN,
            **result,
            "share_beating_local": _mean(better[known].astype(np.float64)),
        }


def tails(values: ArrayLike, percents: Iterable[int], *, low: bool) -> list[float]:
    """Return for each p the mean of the ceil(p N / 100) lowest (or highest) of N values; NaN are left out.

    Without values the means are NaN.
    """
    scores = np.sort(np.asarray(values, dtype=np.float64))
    scores = scores[: len(scores) - int(np.isnan(scores).sum())]  # NaN are sorted to the end
    counts = [-(-len(scores) * percent // 100) for percent in percents]  # the ceiling, in integers
    return [_mean(scores[:count] if low else scores[len(scores) - count :]) for count in counts]


def mean(values: ArrayLike) -> float:
    """Return the mean of a metric over clients that have it, as in `summarize`; NaN if none has."""
    scores = np.asarray(values, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return _mean(scores[~np.isnan(scores)])


def summaries(records: Iterable[Record]) -> Summaries:
    """Return {model: {set: {metric: statistics over clients}}} of the records of one evaluation, the loss last."""
    return {
        model: {
            name: {
                metric: summarize(
                    [row[metric] for row in rows],
                    [row["samples"] for row in rows],
                    higher_is_better=metric not in LOWER_IS_BETTER,
                )
                for metric in _measured(rows[0])
            }
            for name, rows in sets.items()
        }
        for model, sets in _grouped(records).items()
    }


def means(records: Iterable[Record]) -> dict[str, float]:
    """Return {model/set/metric: mean over clients} of the records of one evaluation, as in `summaries`."""
    return {
        f"{model}/{name}/{metric}": mean([row[metric] for row in rows])
        for model, sets in _grouped(records).items()
        for name, rows in sets.items()
        for metric in _measured(rows[0])
    }


def quantiles(records: Iterable[Record], metric: str) -> dict[str, float]:
    """Return {model/set/metric/pQ: quantile over clients, Q in percent} of one metric; empty if it is not measured.

    Clients without samples of a set are left out; quantiles are interpolated linearly between clients.
    """
    found: dict[str, float] = {}
    for model, sets in _grouped(records).items():
        for name, rows in sets.items():
            values = np.array([row[metric] for row in rows if metric in row], dtype=np.float64)
            values = values[~np.isnan(values)]
            if len(values):
                levels = np.quantile(values, [q / 100 for q in QUANTILES]).tolist()
                pairs = zip(QUANTILES, levels, strict=True)
                found |= {f"{model}/{name}/{metric}/p{q}": value for q, value in pairs}
    return found


def _grouped(records: Iterable[Record]) -> dict[str, dict[str, list[Record]]]:
    """Return {model: {set: records}}."""
    grouped: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        grouped.setdefault(record["model"], {}).setdefault(record["set"], []).append(record)
    return grouped


def _measured(record: Record) -> tuple[str, ...]:
    """Return the names of a record's measured values, the loss last."""
    return (*(name for name in record if name not in (*OF_RECORD, "loss")), "loss")


def _mean(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    return float(np.mean(values)) if len(values) else NAN
