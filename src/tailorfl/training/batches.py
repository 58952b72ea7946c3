"""The batches of a fit: the samples of every step, of one client or of all that take the step together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tailorfl.models.layouts import laid_out
from tailorfl.training.active import ActiveClients, Which
from tailorfl.training.gradients import Batch
from tailorfl.training.plan import BatchPlan, runs
from tailorfl.training.request import FitRequest

GATHERED_BYTES = 2**20
"""The inputs of so many steps of one client are gathered at once as fit into this: they stay in the cache."""


class Step(NamedTuple):
    """One step, or the part of it that clients with batches of equal sizes take together."""

    number: int
    """Within the fit, from 0."""
    at: int
    """The same of steps on new batches: a step may be repeated on its batches."""
    who: Which
    """Positions of the clients."""
    batches: list[Batch]
    """One, unless the direction asks for several."""


def steps_of(request: FitRequest, clients: ActiveClients, plan: BatchPlan, stacked: bool) -> Iterator[Step]:
    """Yield every step of a fit in order, with its batches.

    Images are augmented by the number of their batch, so that fits of one purpose see equal images, however often they
    repeat; what else is drawn differs from step to step.
    """
    first, several, repeat = request.length.first, request.length.batches, request.length.repeat
    draws, keys = plan.keys is not None, clients.keys
    loaded = _of_cohort(request, clients, plan) if stacked else _of_client(request, clients, plan)
    for at, who, tensors in loaded:
        begin = first + at * several
        for again in range(repeat):
            batches = []
            for number, (x, y, weight) in enumerate(tensors, start=begin):
                key = keys[who] if stacked else keys
                key = key + (number * repeat + again) if draws else key
                classes, prior = clients.classes, clients.prior
                if stacked:
                    classes, prior = (None if t is None else t[who] for t in (classes, prior))
                batches.append(Batch(x, y, weight, key, classes, prior))
            yield Step(at * repeat + again, at, who, batches)


Loaded = tuple[int, Which, list[tuple[Tensor, Tensor, Tensor | None]]]
"""(number of the step, its clients, (x, y, weight) of each of its batches)."""


def _of_client(request: FitRequest, clients: ActiveClients, plan: BatchPlan) -> Iterator[Loaded]:
    """Yield the batches of one client, without an axis of clients; those of several steps are gathered at once."""
    source, several, who = request.cohort.source, request.length.batches, slice(0, 1)
    last, key = clients.channels_last, clients.keys
    # A Poisson batch may be empty: it is one sample of padding.
    sizes, empty = plan.count[0].clip(min=1), torch.zeros(1, device=key.device)
    rows = torch.from_numpy(plan.rows[0][np.arange(plan.rows.shape[2]) < sizes[:, None]]).to(source.x.device)
    weights = [None if real else empty for real in plan.count[0].tolist()]
    sizes = sizes.tolist()

    def samples() -> Iterator[tuple[Tensor, Tensor]]:
        if source.augment != "none":
            for number, part in enumerate(torch.split(rows, sizes), start=request.length.first):
                x, y = source.batch(part, key + number)
                yield laid_out(x, True) if last else x, y
            return
        bytes_of_one = 4 * math.prod(source.input_shape) * max(sizes, default=1)
        at_once, begin = max(GATHERED_BYTES // max(bytes_of_one, 1), 1), 0
        for start in range(0, len(sizes), at_once):
            some = sizes[start : start + at_once]
            x, y = source.batch(rows[begin : begin + sum(some)], key)
            begin += sum(some)
            x = laid_out(x, True) if last else x
            yield from zip(torch.split(x, some), torch.split(y, some), strict=True)

    left = ((x, y, weight) for (x, y), weight in zip(samples(), weights, strict=True))
    for at in range(len(sizes) // several):
        yield at, who, list(islice(left, several))


def _of_cohort(request: FitRequest, clients: ActiveClients, plan: BatchPlan) -> Iterator[Loaded]:
    """Yield the batches of a cohort that is ordered by falling steps.

    Batches of unequal size are padded where that costs little (`runs`), except where a batch counts as a whole (batch
    norm): there the clients with equal sizes of all batches of a step are batched together.
    """
    source, several, keys = request.cohort.source, request.length.batches, clients.keys
    rows = torch.from_numpy(plan.rows).to(source.x.device)
    # Poisson batches are for privacy, which trains no batch norm; there empty ones are all padding.
    apart = request.cohort.model.has_batch_statistics and not plan.poisson
    uneven = ((plan.count > 0) & (plan.count < plan.count.max(0))).any(0).tolist()
    cuts = runs(plan) if len(plan.count) > 1 else [[(0, 1)]] * plan.count.shape[1]

    def loaded(number: int, who: Which, parts: Sequence[tuple[Tensor, Tensor | None]]) -> Loaded:
        batches = []
        for k, (part, weight) in enumerate(parts, start=request.length.first + number * several):
            x, y = source.batch(part, keys[who] + k)
            batches.append((x, y, None if weight is None else weight.to(keys.device)))
        return number, who, batches

    for number in range(len(uneven) // several):
        at = range(number * several, (number + 1) * several)
        if not (apart and any(uneven[k] for k in at)):
            # The batches of one step are those of the same clients.
            for a, b in cuts[at[0]] if several == 1 else [(0, cuts[at[0]][-1][1])]:
                widest = plan.count[a:b, at[0] : at[-1] + 1].max(0).clip(min=1)
                parts = [
                    (rows[a:b, k, :wide], _weights(plan, a, b, k)) for k, wide in zip(at, widest, strict=True)
                ]
                yield loaded(number, slice(a, b), parts)
            continue
        active = cuts[at[0]][-1][1]
        counts = plan.count[:active, at[0] : at[0] + several]
        for sizes in sorted(set(map(tuple, counts.tolist()))):
            chosen = torch.from_numpy((counts == sizes).all(1).nonzero()[0])
            yield loaded(
                number, chosen, [(rows[chosen, k, :size], None) for k, size in zip(at, sizes, strict=True)]
            )


def _weights(plan: BatchPlan, first: int, end: int, at: int) -> Tensor | None:
    """Return 1 for real samples and 0 for padding, float [clients, widest]; None where nothing is padded."""
    counts = plan.count[first:end, at]
    if (counts == counts[0]).all() and counts[0] > 0:
        return None
    return (torch.arange(max(int(counts.max()), 1))[None, :] < torch.from_numpy(counts)[:, None]).float()
