"""The batch plan: the samples of each client at each step, fixed by keys before training starts.

A pass visits a client's samples once, in an order drawn from (key, pass), and is cut into batches, the last of which
may be smaller. Epochs run whole passes; a number of steps runs through as many passes as it needs. A client's plan does
not depend on the clients that it is planned with.

Poisson batches, used for differential privacy, are equally many, but each holds every sample independently with
probability q = min(1, batch / samples), drawn from (key, batch). Their sizes vary, and they may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tailorfl.training.keys import Keys, bits, derive

Rows = NDArray[np.int64]
Steps = int | tuple[int, ...]
"""Steps of a fit: the same for all clients, or each client's."""


@dataclass(frozen=True)
class Length:
    """The length of one fit and its batches, instead of the run's settings; None takes the run's.

    Attributes:
        epochs: passes over the client's data, or a share of one (0.5), rounded up to a whole step.
        steps: instead of epochs; a 0-d tensor may differ by client.
        batch_size: samples a batch; 0 is the whole data set.
        batches: number of independent batches of each step, which a direction selects by number.
        repeat: number of steps on the same batch, or batches, before new ones are drawn.
        first: number of batches of this purpose's sequence to skip.
    """

    epochs: float | None = None
    steps: int | Tensor | None = None
    batch_size: int | None = None
    batches: int = 1
    repeat: int = 1
    first: int = 0


@dataclass(frozen=True)
class BatchPlan:
    """Rows of the source for every client and step."""

    rows: Rows
    """[clients, steps, batch] int64; entries past `count` repeat a row of the same client."""
    count: Rows
    """[clients, steps] int64: real samples of the batch; 0 if the client has finished."""
    steps: Rows
    """[clients] int64: number of batches of each client; equal to its steps if a step takes one batch."""
    poisson: bool = False
    """Whether batches are Poisson samples, which may be empty."""
    keys: Rows | None = None
    """[clients] int64: keys of all other random draws in these steps; None if there are none."""

    @property
    def active(self) -> Rows:
        """[steps] int64: number of clients that have not yet finished."""
        counts: Rows = (np.arange(self.count.shape[1]) < self.steps[:, None]).sum(0)
        return counts

    def ordered(self, order: Rows) -> BatchPlan:
        """Return the plan of the clients at `order`, in that order."""
        return self._part(order, None)

    def of(self, client: int) -> BatchPlan:
        """Return the plan of one client."""
        return self._part(slice(client, client + 1), int(self.steps[client]))

    def _part(self, which: slice | Rows, length: int | None) -> BatchPlan:
        keys = None if self.keys is None else self.keys[which]
        rows, count = self.rows[which, :length], self.count[which, :length]
        return BatchPlan(rows, count, self.steps[which], self.poisson, keys)


MOST_PADDING = 0.1
"""Largest share of padding samples that a cohort may compute, relative to the real ones."""


def runs(plan: BatchPlan) -> list[list[tuple[int, int]]]:
    """Return for every batch the runs (first client, end) of clients that are computed together, padded to the widest.

    A run has all active clients if that needs little padding; otherwise clients with few samples are separate. `plan`
    is ordered by falling steps, so the active clients of a batch come first.
    """
    active = plan.active
    widest = plan.count.max(0, initial=0)
    real = plan.count.sum(0)
    out = [[(0, int(clients))] for clients in active]
    ragged = np.flatnonzero(active * widest > real)
    spare = MOST_PADDING * float(real.sum())
    if float((active * widest - real).sum()) <= spare:
        return out
    for at in ragged:
        counts = plan.count[: active[at], at]
        if (np.diff(counts) <= 0).all():
            out[at] = _cut(counts, spare / len(ragged))
    return out


def _cut(counts: Rows, spare: float) -> list[tuple[int, int]]:
    """Cut falling `counts` into runs with at most `spare` padding samples, each time where that saves most."""
    bounds = [(0, len(counts))]
    while sum(int(counts[a]) * (b - a) for a, b in bounds) - int(counts.sum()) > spare:
        _, widest, at = max(
            (int(counts[a] - counts[k]) * (b - k), which, k)
            for which, (a, b) in enumerate(bounds)
            for k in range(a + 1, b)
        )
        a, b = bounds[widest]
        bounds[widest : widest + 1] = [(a, at), (at, b)]
    return bounds


def batches_per_pass(sizes: Rows, batch: int, min_batch: int = 1) -> Rows:
    """Return the number of batches of one pass, [clients].

    A last batch of fewer than `min_batch` samples is left out; `batch` 0 takes all samples at once.
    """
    if batch <= 0:
        return (sizes >= min_batch).astype(np.int64)
    full, remainder = np.divmod(sizes, batch)
    count: Rows = full + (remainder >= min_batch) * (remainder > 0)
    return count


def steps_of(
    sizes: Rows, batch: int, epochs: float | None, steps: Steps | None, min_batch: int, batches: int
) -> Rows:
    """Return the number of steps of each client, [clients]; a client without a usable batch takes none.

    Every step takes `batches` batches; if a pass leaves the last step incomplete, a further pass completes it.
    """
    per_pass = batches_per_pass(sizes, batch, min_batch)
    if steps is not None:
        return np.where(per_pass > 0, np.asarray(steps, dtype=np.int64), 0)
    assert epochs is not None
    # Rounded first: 0.07 of 100 batches are 7.000000000000001 in floating point.
    return np.ceil(np.round(per_pass * epochs / batches, 9)).astype(np.int64)


def batches_of(
    sizes: Rows,
    batch: int,
    epochs: float | None,
    steps: Steps | None,
    min_batch: int = 1,
    limit: int | None = None,
    batches: int = 1,
) -> Rows:
    """Return the number of batches of each client's plan, [clients]; arguments as in `make_plan`."""
    count = steps_of(sizes, batch, epochs, steps, min_batch, batches) * batches
    return count if limit is None else np.minimum(count, limit // batches * batches)


def batch_sizes(sizes: Rows, batch: int, taken: Rows, first: int = 0, min_batch: int = 1) -> Rows:
    """Return the size of each of the first `taken` [clients] batches of a plan, [clients, batches], without drawing.

    Other arguments as in `make_plan`. Sizes are those of shuffled batches, not of Poisson batches.
    """
    numbers = np.arange(int(taken.max(initial=0)))[None, :]
    position = (first + numbers) % np.maximum(batches_per_pass(sizes, batch, min_batch), 1)[:, None]
    samples = np.clip(sizes[:, None] - position * batch, 0, batch if batch > 0 else None)
    return np.asarray(samples * (numbers < taken[:, None]), dtype=np.int64)


def make_plan(
    members: Sequence[Rows],
    keys: Keys,
    batch: int,
    *,
    epochs: float | None = None,
    steps: Steps | None = None,
    first: int = 0,
    min_batch: int = 1,
    limit: int | None = None,
    batches: int = 1,
    poisson: bool = False,
) -> BatchPlan:
    """Return the plan of a cohort, in which step k takes the `batches` batches from k·`batches` on.

    `members[i]` are client i's rows; `keys` [clients] uint64; `batch` samples a batch (0: all in one); either
    `epochs` or `steps` (for all clients, or for each); `first` skips batches of the same endless sequence (so batch r
    can be computed alone); `min_batch` 2 leaves out a last batch of one sample, which batch norm cannot train on;
    `limit` bounds every client's batches, rounded down to whole steps; `poisson` draws every sample independently.
    """
    sizes = np.array([len(m) for m in members], dtype=np.int64)
    widest = int(sizes.max(initial=1))
    width = widest if batch <= 0 else min(batch, widest)
    per_pass = batches_per_pass(sizes, batch, min_batch)
    taken = batches_of(sizes, batch, epochs, steps, min_batch, limit, batches)
    if poisson:
        return _poisson_plan(members, keys, np.minimum(width, sizes), taken, first)
    longest = int(taken.max(initial=0))
    if longest == 0:
        empty = np.zeros((len(sizes), 0), dtype=np.int64)
        return BatchPlan(np.zeros((len(sizes), 0, width), dtype=np.int64), empty, taken)
    at = first + np.arange(longest)[None, :]
    divisor = np.maximum(per_pass, 1)[:, None]
    which_pass, which_batch = np.divmod(at, divisor)
    active = np.arange(longest)[None, :] < taken[:, None]
    position = which_batch[:, :, None] * batch + np.arange(width)
    real = (position < sizes[:, None, None]) & active[:, :, None]
    low = np.where(taken > 0, which_pass[:, 0], 0)
    last = which_pass[np.arange(len(sizes)), np.maximum(taken, 1) - 1]
    passes = np.where(taken > 0, last - low + 1, 0)
    order = _orders(sizes, keys, low, passes, widest)
    table = np.zeros((len(sizes), widest), dtype=np.int64)
    for row, member in zip(table, members, strict=True):
        row[: len(member)] = member
    pass_row = (np.cumsum(passes) - passes)[:, None] + np.clip(which_pass - low[:, None], 0, None)
    picked = order[np.where(active, pass_row, 0)[:, :, None], np.where(real, position, 0)]
    return BatchPlan(table[np.arange(len(sizes))[:, None, None], picked], real.sum(2), taken)


def _orders(sizes: Rows, keys: Keys, low: Rows, passes: Rows, widest: int) -> Rows:
    """Return random orders of samples, [all clients' passes, widest]: client i's passes from low[i] on, then i + 1's.

    Entries beyond a client's number of samples are not used. Clients of similar size are sorted together, since with
    equal steps small clients have many passes, which need not be sorted at the largest client's width.
    """
    client = np.repeat(np.arange(len(sizes)), passes)
    number = np.arange(len(client)) - np.repeat(np.cumsum(passes) - passes, passes) + low[client]
    drawn = derive(keys[client], number.astype(np.uint64))
    order = np.zeros((len(client), widest), dtype=np.int64)  # pages never written to use no memory
    classes = np.ceil(np.log2(np.maximum(sizes, 1)))[client]
    for size_class in np.unique(classes):
        chosen = np.flatnonzero(classes == size_class)
        width = int(sizes[client[chosen]].max(initial=1))
        draws = bits(drawn[chosen], width)
        draws[np.arange(width)[None, :] >= sizes[client[chosen]][:, None]] = np.iinfo(np.uint64).max
        order[chosen, :width] = np.argsort(draws, axis=1, kind="stable")
    return order


DRAWS_AT_ONCE = 2**21
"""Number of random numbers drawn at a time for Poisson batches."""


def _poisson_plan(members: Sequence[Rows], keys: Keys, expected: Rows, taken: Rows, first: int) -> BatchPlan:
    """Return a plan of Poisson batches; `expected` [clients] is the expected size of a batch."""
    drawn: list[list[Rows]] = []
    for member, key, size, length in zip(members, keys, expected, taken, strict=True):
        batches: list[Rows] = []
        block = max(1, DRAWS_AT_ONCE // max(len(member), 1))
        for start in range(0, int(length), block):
            numbers = first + np.arange(start, min(start + block, int(length)))
            words = bits(derive(key, "poisson", numbers.astype(np.uint64)), len(member))
            if size < len(member):
                # q · 2⁶⁴ rounded down: a random word in 0..2⁶⁴ − 1 is below it with probability q.
                chosen = words < np.uint64((int(size) << 64) // len(member))
            else:
                chosen = np.ones(words.shape, dtype=bool)
            batches += [member[row] for row in chosen]
        drawn.append(batches)
    longest = max(map(len, drawn), default=0)
    count = np.zeros((len(members), longest), dtype=np.int64)
    for i, batches in enumerate(drawn):
        count[i, : len(batches)] = [len(batch) for batch in batches]
    rows = np.zeros((len(members), longest, max(int(count.max(initial=0)), 1)), dtype=np.int64)
    for i, (member, batches) in enumerate(zip(members, drawn, strict=True)):
        rows[i] = member[0] if len(member) else 0
        for step, batch in enumerate(batches):
            rows[i, step, : len(batch)] = batch
    return BatchPlan(rows, count, taken, poisson=True)
