"""Which metric comes first: the one that methods are compared by, and that choices by validation go by.

It is the task's primary metric, except where one class holds most samples, so that always guessing it looks good: then
balanced accuracy, the mean recall of the classes, comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tailorfl.data.hollow import HOLLOW
from tailorfl.data.source import Source
from tailorfl.errors import unknown
from tailorfl.evaluation.calibration import FURTHER, all_metrics
from tailorfl.evaluation.metrics import primary

DOMINANT = 0.8
"""Share of one class of two from which on it dominates, of all samples or of a natural client's."""
MULTIPLE = 2.0
"""Of more classes one dominates that has half of all samples, and so many times its equal share."""
FEWEST = 20
"""Samples of a natural client of which shares are looked at."""


def leading(source: Source, wanted: str | None = None) -> str:
    """Returns the metric that comes first on a source: the one that is wanted, or what suits the data.

    Raises:
        ConfigError: the task has no such metric; names those that it has.
    """
    if wanted is not None:
        if wanted not in all_metrics(source.task):
            raise unknown(f"metric (eval.metric) of a {source.task} task", wanted, all_metrics(source.task))
        return wanted
    return "balanced_accuracy" if dominated(source) else primary(source.task)[0]


def further(source: Source, wanted: Sequence[str]) -> tuple[str, ...]:
    """Returns which of the metrics that are wanted are not measured anyway, each once.

    Raises:
        ConfigError: the task has no such metric; names those that it has.
    """
    for name in wanted:
        if name not in all_metrics(source.task):
            raise unknown(f"metric (eval.metrics) of a {source.task} task", name, all_metrics(source.task))
    return tuple(name for name in FURTHER.get(source.task, ()) if name in wanted)


def dominated(source: Source) -> str:
    """Returns whose samples are mostly of one class, and how much; "" where nobody's are.

    Looked at is what is the same for every seed: all samples, and of two classes those of the natural clients. Of
    samples that are elsewhere nobody knows.
    """
    if source.task not in ("classification", "binary") or source.info.get(HOLLOW):
        return ""
    classes = source.strata.numpy()
    several = 2 if source.task == "binary" else source.outputs
    limit = DOMINANT if several <= 2 else max(0.5, MULTIPLE / several)
    for name, mine in _groups(source, classes, several):
        share = float(np.bincount(mine).max() / len(mine)) if len(mine) else 0.0
        if several > 1 and share >= limit:
            return f"{share:.0%} of the samples of {name} are of one class"
    return ""


def _groups(
    source: Source, classes: NDArray[np.int64], several: int
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    yield f"'{source.name}'", classes
    owners = source.groups.get("client")
    if several != 2 or owners is None:
        return
    ids = owners.numpy()
    for number, name in enumerate(source.group_names["client"]):
        mine = classes[ids == number]
        if len(mine) >= FEWEST:
            yield f"client '{name}'", mine
