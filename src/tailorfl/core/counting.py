"""What a private fit writes into the ledger, and what it would write without being trained.

The noise that a wanted ε needs must be known before the first round. So a cohort may be told to count only: its fits
note what they would use and hand back their start. How many gradients of a batch a direction asks for is found by
running it on gradients of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.arranged import Arranged
from tailorfl.core.directed import gradients_asked
from tailorfl.core.plan import batches_of, batches_per_pass

if TYPE_CHECKING:
    from tailorfl.core.operations import Fit


def note(fit: Fit, positions: Sequence[int], gradients: NDArray[np.int64]) -> None:
    """Records what a private fit released, from the gradients of each batch [clients, batches].

    Of shuffled batches a sample is in one a pass, so what counts is how many passes there were, and how many gradients
    the batch with most of them had.
    """
    dp, cohort = fit.options.dp, fit.cohort
    if dp is None or cohort.record is None:
        return
    for position, mine in zip(positions, gradients, strict=True):
        samples, client = max(len(cohort.members[position]), 1), cohort.ids[position]
        rate = 1.0 if fit.batch <= 0 or dp.sampling == "shuffle" else min(1.0, fit.batch / samples)
        used = _of_passes(fit, samples, mine) if dp.sampling == "shuffle" else mine
        cohort.record.add(client, rate, dp.noise_of(client), used)


def _of_passes(fit: Fit, samples: int, gradients: NDArray[np.int64]) -> NDArray[np.int64]:
    """The most gradients that a batch of each pass has, from those of all batches."""
    (length,) = batches_per_pass(np.array([samples]), fit.batch, fit.cohort.min_batch)
    which = (fit.first + np.arange(len(gradients))) // max(length, 1)
    return np.array([gradients[which == n].max() for n in np.unique(which)], dtype=np.int64)


def worked(fit: Fit, gradients: NDArray[np.int64], samples: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns how many gradients of single samples a fit computed, [clients]: of private ones, and of public ones.

    `gradients` [clients, batches] were taken of each batch, which has so many `samples`.
    """
    found: NDArray[np.int64] = (gradients * samples).sum(1)
    if fit.public is not None and fit.cohort.public is not None:
        each = min(fit.public.batch_size, len(fit.cohort.public))
        found = found + each * fit.options.repeat * ((samples > 0).sum(1) // fit.options.batches)
    return np.asarray(found, dtype=np.float32)


def counted(fit: Fit, arranged: Arranged, positions: Sequence[int]) -> tuple[Tensor, ...]:
    """Records what a fit would use and returns its result as if nothing had moved: a loss of 0, no gradient, then its
    start.
    """
    options, stacked = fit.options, arranged.stacked
    unmoved: list[Tensor] = []
    parts = []
    for names in options.trained:
        trained = {n: arranged.spread() for n in names}
        unmoved += [*trained.values(), *(arranged.spread() for _ in fit.moving_names)]
        parts.append(TensorDict({n: t[0] if stacked else t for n, t in trained.items()}, batch_size=[]))
        for _ in fit.fixed_names:
            arranged.view()
    for _ in range(fit.centred * sum(map(len, options.trained)) + fit.strong + fit.rated):
        arranged.view()
    flat = [arranged.spread() for paths in fit.given_paths for _ in (("",) if paths is None else paths)]
    given = fit.given([t[0] if stacked else t for t in flat])
    alone = options.components == ("",)
    state = parts[0] if alone else TensorDict(dict(zip(options.components, parts, strict=True)))
    asked = np.array(gradients_asked(options.direction, state, given, options.batches)) * options.repeat
    cohort = fit.cohort
    length = (fit.batch, fit.epochs, fit.steps, cohort.min_batch, cohort.left(fit.first), options.batches)
    taken = batches_of(cohort.sizes[list(positions)], *length)
    each = np.tile(asked, int(taken.max(initial=0)) // options.batches)
    note(fit, positions, each * (np.arange(len(each)) < taken[:, None]))
    loss = torch.zeros(len(positions)) if stacked else torch.zeros(())
    return (loss, torch.zeros_like(loss), *(t.clone() for t in unmoved))
