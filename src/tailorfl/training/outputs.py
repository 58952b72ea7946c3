"""The outputs of models on samples, in forward passes that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from tailorfl.data.source import Source
from tailorfl.models.functional import Model
from tailorfl.models.layouts import laid_out
from tailorfl.training.cohort import rows_at_once

CACHED_FLOATS, FEWEST_IMAGES = 40_000, 20
"""A network of convolutions alone sees inputs of so many numbers at once, 50 images of 28 x 28, or so many images."""


def in_passes(
    answer: Callable[[Tensor], Tensor], source: Source, rows: Tensor, models: int = 1, dim: int = 0
) -> Tensor:
    """Returns what `answer` makes of the inputs of `rows`, as many at once as fit for so many models.

    `rows` int64 [rows] or [models, rows]; `dim` is the axis of the rows in what `answer` returns.
    """
    parts = torch.split(rows.to(source.x.device), rows_at_once(source, models), dim=-1)
    return torch.cat([answer(source.take(part)) for part in parts], dim=dim)


def one_by_one(
    model: Model, states: Mapping[str, Tensor], count: int, device: torch.device
) -> list[Callable[[Tensor], Tensor]]:
    """Returns what gives the outputs of each of `count` models `states` [models, ...] on inputs [rows, ...].

    Convolutions run with channels last where that is faster, on so few images that a layer finds in the cache what the
    layer before has made.
    """
    each = [{name: tensor[i] for name, tensor in states.items()} for i in range(count)]
    if not model.channels_last(device):
        return [partial(model, state) for state in each]
    return [
        partial(_in_cache, model, {name: laid_out(t, True) for name, t in state.items()}) for state in each
    ]


def _in_cache(model: Model, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
    few = max(FEWEST_IMAGES, CACHED_FLOATS // max(1, x[0].numel()))
    return torch.cat([model(state, laid_out(part, True)) for part in torch.split(x, few)])
