"""Labels to deal, and tables of what was dealt, for tests of several partitions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailorfl.partition import Deal, partition

Ints = NDArray[np.int64]


def balanced(samples: int, classes: int) -> Ints:
    """Classes in turn."""
    return np.arange(samples, dtype=np.int64) % classes


def dealt(name: str, strata: Ints, clients: Any, rng: int = 0, test: Any = None, **options: Any) -> Deal:
    return partition(name, strata, clients, np.random.default_rng(rng), test=test, options=options)


def table_of(strata: Ints, rows: Iterable[Ints] | None) -> Ints:
    """Samples of each class `[clients, classes]`."""
    return np.stack([np.bincount(strata[mine], minlength=int(strata.max()) + 1) for mine in rows or ()])


def supports(strata: Ints, rows: Iterable[Ints] | None) -> list[set[int]]:
    """The classes that each client holds."""
    return [set(strata[mine].tolist()) for mine in rows or ()]


def sizes_of(rows: Iterable[Ints] | None) -> list[int]:
    return [len(mine) for mine in rows or ()]
