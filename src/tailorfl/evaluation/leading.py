"""The leading metric, by which methods are compared and models are chosen on validation data.

It is the task's primary metric, unless one class has most samples, so that always guessing it looks good; then it is
balanced accuracy, the mean recall of the classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tailorfl.data.remote_federation import REMOTE
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, check_known
from tailorfl.evaluation.calibration import FURTHER, all_metrics
from tailorfl.evaluation.metrics import UNIT_METRICS, primary
from tailorfl.settings.experiment import ExperimentConfig

DOMINANT = 0.8
"""With two classes, share of all samples, or of a natural client's, from which on a class dominates."""
MULTIPLE = 2.0
"""With more classes, a class dominates if it has half of all samples, and at least this many times its equal share."""
FEWEST = 20
"""Fewest samples of a natural client whose shares are checked."""


def leading(source: Source, metric: str | None = None) -> str:
    """Return the leading metric on a source: `metric` if given, else the one that suits the data.

    Raises:
        ConfigError: the task has no such metric; names those that it has.
    """
    if metric is not None:
        check_known(f"metric (eval.metric) of a {source.task} task", metric, all_metrics(source.task))
        return metric
    return "balanced_accuracy" if dominated(source) else primary(source.task)[0]


def first_metric(config: ExperimentConfig, source: Source) -> str:
    """Return the metric by which methods are compared on a source.

    Raises:
        ConfigError: the task lacks this metric or one of `eval.metrics`, or the metric cannot reach `eval.target`.
    """
    further(source, config.eval.metrics)
    metric = leading(source, config.eval.metric)
    check_target(config.eval.target, metric)
    return metric


def check_target(target: float | None, metric: str) -> None:
    """Check that a primary metric can reach `target`.

    Raises:
        ConfigError: it cannot, for instance an accuracy of 95 instead of 0.95.
    """
    if target is not None and metric in UNIT_METRICS and not 0 <= target <= 1:
        meant = f"; give {target / 100:g} for {target:g} %" if 1 < target <= 100 else ""
        raise ConfigError(f"a target for {metric} must be between 0 and 1, but is {target:g}{meant}")


def further(source: Source, names: Sequence[str]) -> tuple[str, ...]:
    """Return the requested metrics that are not measured by default, each once.

    Raises:
        ConfigError: the task has no such metric; names those that it has.
    """
    for name in names:
        check_known(f"metric (eval.metrics) of a {source.task} task", name, all_metrics(source.task))
    return tuple(name for name in FURTHER.get(source.task, ()) if name in names)


def dominated(source: Source) -> str:
    """Return whose samples are mostly of one class, with the share, as text; "" if no class dominates.

    Only data that are the same for every seed are checked: all samples, and with two classes those of natural clients.
    Samples on remote clients are not known.
    """
    if source.task not in ("classification", "binary") or source.info.get(REMOTE):
        return ""
    several = 2 if source.task == "binary" else source.outputs
    if several < 2:
        return ""
    y, owners = source.y.numpy(), source.groups.get("client")
    names, counts = [f"'{source.name}'"], np.bincount(y, minlength=several)[None]
    if several == 2 and owners is not None:
        clients = source.group_names["client"]
        of_clients = np.bincount(2 * owners.numpy() + y, minlength=2 * len(clients)).reshape(-1, 2)
        large = np.flatnonzero(of_clients.sum(axis=1) >= FEWEST)
        names += [f"client '{clients[i]}'" for i in large]
        counts = np.concatenate([counts, of_clients[large]])
    shares = counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)
    limit = DOMINANT if several == 2 else max(0.5, MULTIPLE / several)
    over = np.flatnonzero(shares >= limit)
    return (
        f"{shares[over[0]]:.0%} of the samples of {names[over[0]]} have the same class" if len(over) else ""
    )
