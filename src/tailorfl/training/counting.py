"""What a private fit writes into the ledger, and what it would write without being trained.

The noise that a wanted ε needs must be known before the first round. So a cohort may be told to count only: its fits
note what they would use and hand back their start. How many gradients of a batch a direction asks for is found by
running it on gradients of zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from tailorfl.training.cohort import Cohort
from tailorfl.training.custom_gradient import gradients_asked
from tailorfl.training.local_sgd import FitOptions
from tailorfl.training.plan import batch_sizes, batches_of, batches_per_pass


def account(
    cohort: Cohort,
    options: FitOptions,
    positions: Sequence[int],
    gradients: NDArray[np.int64],
    samples: NDArray[np.int64],
) -> Tensor:
    """Returns how many gradients of single samples a fit computed, float [clients], and records what it released.

    `gradients` [clients, batches] were taken of each batch, which has so many `samples`; those of public samples count.
    """
    _note(cohort, options, positions, gradients)
    found: NDArray[np.int64] = (gradients * samples).sum(1)
    if options.public and cohort.public is not None:
        steps = options.repeat * ((samples > 0).sum(1) // options.batches)
        for term in options.public:
            found = found + min(term.public or 0, len(cohort.public)) * steps
    return torch.from_numpy(found.astype(np.float32)).to(cohort.device)


def _note(
    cohort: Cohort, options: FitOptions, positions: Sequence[int], gradients: NDArray[np.int64]
) -> None:
    """Records what a private fit released, from the gradients of each batch [clients, batches].

    Of shuffled batches a sample is in one a pass, so what counts is how many passes there were, and how many gradients
    the batch with most of them had.
    """
    dp = options.dp
    if dp is None or cohort.record is None:
        return
    for position, mine in zip(positions, gradients, strict=True):
        samples, client = max(len(cohort.members[position]), 1), cohort.ids[position]
        rate = 1.0 if options.batch <= 0 or dp.sampling == "shuffle" else min(1.0, options.batch / samples)
        used = _of_passes(cohort, options, samples, mine) if dp.sampling == "shuffle" else mine
        cohort.record.add(client, rate, dp.noise_of(client), used)


def _of_passes(
    cohort: Cohort, options: FitOptions, samples: int, gradients: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The most gradients that a batch of each pass has, from those of all batches."""
    (length,) = batches_per_pass(np.array([samples]), options.batch, cohort.min_batch)
    which = (options.first + np.arange(len(gradients))) // max(length, 1)
    return np.array([gradients[which == n].max() for n in np.unique(which)], dtype=np.int64)


def count(
    cohort: Cohort,
    options: FitOptions,
    positions: Sequence[int],
    trained: Mapping[str, TensorDict],
    given: Sequence[Any],
) -> Tensor:
    """Records what a fit of the clients at `positions` would use; returns how many gradients of single samples it would
    compute, float [clients] (what is expected of Poisson batches).

    Args:
        cohort: those that run together.
        options: of the fit.
        positions: in the cohort.
        trained: the trained parameters of one client by component; a direction has no conditions on values.
        given: what its direction is given, of one client.
    """
    state = trained[""] if options.components == ("",) else TensorDict(dict(trained), batch_size=[])
    asked = np.array(gradients_asked(options.direction, state, given, options.batches)) * options.repeat
    length = (
        options.batch,
        options.epochs,
        options.steps,
        cohort.min_batch,
        cohort.left(options.first),
        options.batches,
    )
    sizes = cohort.sizes[list(positions)]
    taken = batches_of(sizes, *length)
    each = np.tile(asked, int(taken.max(initial=0)) // options.batches)
    gradients = each * (np.arange(len(each)) < taken[:, None])
    if options.dp is not None and options.dp.sampling == "poisson":
        whole = np.minimum(sizes, options.batch) if options.batch > 0 else sizes
        samples = np.broadcast_to(whole[:, None], gradients.shape)
    else:
        samples = batch_sizes(sizes, options.batch, taken, options.first, cohort.min_batch)
    return account(cohort, options, positions, gradients, samples)
