"""What a private fit writes into the ledger, and what it would write without being trained.

The noise that a wanted ε needs must be known before the first round. So a cohort may be told to count only: its fits
note what they would use and hand back their start. How many gradients of a batch a direction asks for is found by
running it on gradients of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from tailorfl.training.active import steps_of_clients
from tailorfl.training.custom_gradient import gradients_asked
from tailorfl.training.packing import CohortLayout, Layout, Packed
from tailorfl.training.plan import batch_sizes, batches_of, batches_per_pass
from tailorfl.training.request import FitRequest, FitResult


def account(
    request: FitRequest,
    positions: Sequence[int],
    gradients: NDArray[np.int64],
    samples: NDArray[np.int64],
) -> Tensor:
    """Return how many gradients of single samples a fit computed, float [clients], and record what it released.

    `gradients` [clients, batches] were taken of each batch, which has so many `samples`; those of public samples count.
    """
    _note(request, positions, gradients)
    cohort, length = request.cohort, request.length
    total: NDArray[np.int64] = (gradients * samples).sum(1)
    if request.public and cohort.public is not None:
        steps = length.repeat * ((samples > 0).sum(1) // length.batches)
        for term in request.public:
            total = total + min(term.public or 0, len(cohort.public)) * steps
    return torch.from_numpy(total.astype(np.float32)).to(cohort.device)


def _note(request: FitRequest, positions: Sequence[int], gradients: NDArray[np.int64]) -> None:
    """Record what a private fit released, from the gradients of each batch [clients, batches].

    Of shuffled batches a sample is in one a pass, so what counts is how many passes there were, and how many gradients
    the batch with most of them had.
    """
    cohort, dp, batch = request.cohort, request.dp, request.batch
    if dp is None or cohort.record is None:
        return
    for position, of_batches in zip(positions, gradients, strict=True):
        samples, client = max(len(cohort.members[position]), 1), cohort.ids[position]
        rate = 1.0 if batch <= 0 or dp.sampling == "shuffle" else min(1.0, batch / samples)
        used = _of_passes(request, samples, of_batches) if dp.sampling == "shuffle" else of_batches
        cohort.record.add(client, rate, dp.noise_of(client), used)


def _of_passes(request: FitRequest, samples: int, gradients: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the most gradients that a batch of each pass has, from those of all batches."""
    (length,) = batches_per_pass(np.array([samples]), request.batch, request.cohort.min_batch)
    which = (request.length.first + np.arange(len(gradients))) // max(length, 1)
    return np.array([gradients[which == n].max() for n in np.unique(which)], dtype=np.int64)


def counted(
    request: FitRequest,
    positions: Sequence[int],
    inputs: dict[str, Any],
    stacked: bool,
) -> FitResult:
    """Record what a fit would use and return its start, as trained with a loss of 0.

    A direction has no conditions on values, so that of the first client tells how many gradients each asks for.
    """
    cohort, length, dp = request.cohort, request.length, request.dp
    batch, epochs = request.batch, request.epochs
    steps, layout = steps_of_clients(request, inputs, len(positions)), Layout()
    if stacked:
        layout = CohortLayout(len(positions))
    start = {
        name: dict(zip(state, layout.views(list(state.values())), strict=True))
        for name, state in inputs["start"].items()
    }

    def one(tensor: Tensor) -> Tensor:
        return tensor[0] if stacked else tensor

    states = {
        name: TensorDict({n: one(start[name][n]) for n in names}, batch_size=[])
        for name, names in request.trained.items()
    }
    given = Packed(list(map(one, layout.views(inputs["given"]))), request.given.form).unpack()
    state = states[""] if tuple(states) == ("",) else TensorDict(dict(states), batch_size=[])
    asked = np.array(gradients_asked(request.direction, state, given, length.batches)) * length.repeat
    sizes, first = cohort.sizes[list(positions)], length.first
    taken = batches_of(sizes, batch, epochs, steps, cohort.min_batch, cohort.left(first), length.batches)
    each = np.tile(asked, int(taken.max(initial=0)) // length.batches)
    gradients = each * (np.arange(len(each)) < taken[:, None])
    if dp is not None and dp.sampling == "poisson":
        whole = np.minimum(sizes, batch) if batch > 0 else sizes
        samples = np.broadcast_to(whole[:, None], gradients.shape)
    else:
        samples = batch_sizes(sizes, batch, taken, first, cohort.min_batch)
    work = account(request, positions, gradients, samples)
    loss = torch.zeros(len(positions)) if stacked else torch.zeros(())
    return FitResult(loss, work if stacked else work[0], start)
