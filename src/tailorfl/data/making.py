"""A source out of what was read from a user's own data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tailorfl.data.columns import numbered
from tailorfl.data.folder import channel_scaling
from tailorfl.data.scaling import Channels
from tailorfl.data.source import Source, Task, check_finite
from tailorfl.errors import DataError

if TYPE_CHECKING:
    import pandas as pd  # at run time only where tables are read: it takes 60 MB


def make_source(
    name: str,
    x: Tensor,
    y: Tensor,
    task: Task,
    outputs: int,
    owners: pd.Series[Any] | None,
    test: Tensor | None,
    info: Mapping[str, Any],
    scaling: Channels = "train",
    *,
    unprepared: bool = False,
) -> Source:
    """Returns the checked source; `owners` are ids of any kind, images are scaled as `scaling` says.

    Features that are `unprepared` may be NaN.

    Raises:
        DataError: no training samples, or numbers that are not finite.
    """
    if not len(x) or (test is not None and bool(test.all())):
        raise DataError(f"source '{name}' has no training samples")
    groups, names, mean, std = {}, {}, None, None
    if owners is not None:
        ids, found = numbered(owners)
        groups, names = {"client": ids}, {"client": found}
    if x.dtype == torch.uint8:
        mean, std, scaled = channel_scaling(x if test is None else x[~test], scaling)
        info = {**info, **scaled}
    source = Source(name, x, y, task, outputs, test, groups, names, mean, std, info)
    if not unprepared:
        check_finite(source)
    return source
