"""One client that trains by itself along its gradient: the loop of `tailorfl.training.local_sgd` at its barest.

Nothing here has a client axis. The batches of several steps are gathered at once, no step is cut into parts, and what
autograd sees are leaves made once. For a small model the arithmetic of a step takes a tenth of a millisecond, so
everything that is the same in all steps is done before the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.source import Source
from tailorfl.models.layouts import laid_out
from tailorfl.training.active import ActiveClients
from tailorfl.training.gradients import LocalObjective, Pass, filled
from tailorfl.training.plan import BatchPlan

GATHERED_BYTES = 2**20
"""The inputs of so many steps are gathered at once as fit into this: they stay in the cache."""

Move = Callable[[int, int, list[Tensor]], None]
"""(number of the batch, number of the step, gradient): moves the parameters."""


def descend(
    objective: LocalObjective,
    source: Source,
    every: ActiveClients,
    plan: BatchPlan,
    first: int,
    repeat: int,
    move: Move,
) -> list[Tensor]:
    """Takes `repeat` steps on each batch of a plan of one client, in place; returns their losses, 0-d each.

    Args:
        objective: what is differentiated.
        source: the samples.
        every: the tensors of the one client.
        plan: of that client.
        first: number of its first batch within the sequence; images are augmented and units dropped by it.
        repeat: steps on each batch before the next.
        move: takes the step.
    """
    (carry,) = every.carries
    leaves = [p.detach().requires_grad_() for p in every.params]
    state = {**carry.common, **carry.own, **carry.moving, **dict(zip(carry.trained, leaves, strict=True))}
    given = carry.given_one if objective.takes else ()
    key, draws = every.keys[0], objective.model.has_dropout
    classes = None if every.classes is None else every.classes[0]
    losses = []
    last = objective.model.channels_last(key.device)
    with torch.enable_grad():  # of the leaves alone, so nothing else is recorded
        for number, (x, y) in enumerate(_batches(source, plan, key, first, last)):
            for again in range(repeat):
                mask = key + ((first + number) * repeat + again) if draws else key
                # The running statistics are this loop's own: the pass updates them where they are.
                value, kept = objective.value(state, (), carry.names, Pass(x, y, None, mask, classes), given)
                found = torch.autograd.grad(value, leaves, allow_unused=True)
                if kept:
                    carry.keep(kept)
                losses.append(value.detach())
                move(number, number * repeat + again, filled(found, leaves))
    return losses


def _batches(
    source: Source, plan: BatchPlan, key: Tensor, first: int, last: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs (channels `last` in memory) and targets of every batch; images are augmented by their batch's number."""
    sizes = plan.count[0].tolist()
    real = np.arange(plan.rows.shape[2]) < plan.count[0][:, None]
    rows = torch.from_numpy(plan.rows[0][real]).to(source.x.device)
    if source.augment != "none":
        for number, own in enumerate(torch.split(rows, sizes), start=first):
            x, y = source.batch(own, key + number)
            yield laid_out(x, last), y
        return
    bytes_of_one = 4 * math.prod(source.input_shape) * max(sizes, default=1)
    at_once = max(GATHERED_BYTES // max(bytes_of_one, 1), 1)
    begin = 0
    for start in range(0, len(sizes), at_once):
        some = sizes[start : start + at_once]
        x, y = source.batch(rows[begin : begin + sum(some)], key)
        x = laid_out(x, last)
        yield from zip(torch.split(x, some), torch.split(y, some), strict=True)
        begin += sum(some)
