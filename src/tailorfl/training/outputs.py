"""The outputs of models on samples, in forward passes that fit into memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tailorfl.data.source import Source
from tailorfl.training.cohort import rows_at_once


def in_passes(
    answer: Callable[[Tensor], Tensor], source: Source, rows: Tensor, models: int = 1, dim: int = 0
) -> Tensor:
    """Returns what `answer` makes of the inputs of `rows`, as many at once as fit for so many models.

    `rows` int64 [rows] or [models, rows]; `dim` is the axis of the rows in what `answer` returns.
    """
    parts = torch.split(rows.to(source.x.device), rows_at_once(source, models), dim=-1)
    return torch.cat([answer(source.take(part)) for part in parts], dim=dim)
