"""Building blocks of partitions: the deal, cutting a class by proportions, and repairing small clients."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tailorfl.errors import ConfigError, DataError
from tailorfl.partition.rows import Ints, Rows
from tailorfl.printable import shown

Floats = NDArray[np.float64]

NOBODY = -1
_ROUNDING = 1e-7  # keeps a product such as 3 * (1/3) from falling below its exact whole number
_SMALLEST_ALPHA, _LARGEST_ALPHA = 1e-9, 1e12


@dataclass(frozen=True)
class Deal:
    """Samples by client: for every client the ascending int64 positions of its samples in the arrays dealt.

    Attributes:
        train: per client, positions in `strata`; no position occurs twice.
        test: per client, positions in the official test part's strata; None if there is no such part.
        server: positions in `strata` that the server keeps (`dirichlet_perada`).
    """

    train: Rows
    test: Rows | None = None
    server: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @classmethod
    def of(cls, owner: Ints, test_owner: Ints | None, clients: int) -> Deal:
        """Return the deal with these owners of samples, see `positions_of`."""
        test = None if test_owner is None else positions_of(test_owner, clients)
        return cls(positions_of(owner, clients), test)


def positions_of(owner: Ints, clients: int) -> Rows:
    """Return the ascending positions that each client owns; `owner` is `[samples]` int64 client or NOBODY."""
    in_order = bool((owner[1:] >= owner[:-1]).all())
    order = np.arange(len(owner)) if in_order else np.argsort(owner, kind="stable")
    owned = owner[owner >= 0] if bool((owner < 0).any()) else owner
    stops = np.cumsum(np.bincount(owned, minlength=clients)) + (
        len(owner) - len(owned)
    )  # samples of NOBODY come first
    return Rows(order, np.append(len(owner) - len(owned), stops[:-1]), stops)


def compress(strata: Ints, test: Ints | None) -> tuple[Ints, Ints | None, int]:
    """Renumber strata as 0..count-1 over both parts together; returns (strata, test strata, count)."""
    both = strata if test is None else np.concatenate([strata, test])
    values, ids = np.unique(both, return_inverse=True)
    ids = ids.astype(np.int64)
    return ids[: len(strata)], None if test is None else ids[len(strata) :], len(values)


def cut(sizes: Ints, weights: Floats) -> Ints:
    """Return whole counts `[strata, clients]` proportional to `weights` by cumulative floor.

    Every row of counts adds up to its size, except that a row whose weights are all zero gives nothing to
    anybody. A client of weight zero gets nothing.

    Args:
        sizes: `[strata]` number of samples of each stratum.
        weights: `[strata, clients]`, not negative; rows need not add up to 1.
    """
    edges = np.cumsum(weights, axis=1)
    total = edges[:, -1:]
    edges = np.divide(edges, total, out=np.zeros_like(edges), where=total > 0)
    bounds = np.floor(edges * sizes[:, None] + _ROUNDING).astype(np.int64)
    return np.diff(bounds, axis=1, prepend=0)


def share_out(sizes: Ints, weights: Floats, rng: Generator) -> Ints:
    """Return `cut` with the clients of every stratum in random order, so that none is always rounded up."""
    order = np.argsort(rng.random(weights.shape), axis=1)
    counts = np.empty(weights.shape, dtype=np.int64)
    np.put_along_axis(counts, order, cut(sizes, np.take_along_axis(weights, order, axis=1)), axis=1)
    return counts


def assign(strata: Ints, counts: Ints, rng: Generator) -> Ints:
    """Return `[samples]` int64 owners: client i gets `counts[k, i]` random samples of stratum k, NOBODY the rest."""
    remaining = np.bincount(strata, minlength=len(counts)) - counts.sum(axis=1)
    receivers = np.append(np.arange(counts.shape[1]), NOBODY)
    table = np.column_stack([counts, remaining])
    owner = np.empty(len(strata), dtype=np.int64)
    shuffled = np.lexsort((rng.random(len(strata)), strata))
    owner[shuffled] = np.repeat(np.tile(receivers, len(counts)), table.ravel())
    return owner


def count_table(owner: Ints, strata: Ints, count: int, clients: int) -> Ints:
    """Return the number of samples of each stratum at each client, int64 `[count, clients]`."""
    owned = owner >= 0
    cells = strata[owned] * clients + owner[owned]
    return np.bincount(cells, minlength=count * clients).reshape(count, clients).astype(np.int64)


def assign_alike(
    test: Ints | None, owner: Ints, strata: Ints, count: int, clients: int, rng: Generator
) -> Ints | None:
    """Return the owners of an official test part, each stratum in the proportions of its training samples.

    Args:
        test: `[test samples]` int64 strata in 0..count-1; None if there is no such part.
        owner: `[samples]` int64 client of each training sample, or NOBODY.
        strata: `[samples]` int64 stratum of each training sample.
        count: number of strata.
        clients: number of clients.
        rng: source of randomness.
    """
    if test is None:
        return None
    realised = count_table(owner, strata, count, clients).astype(np.float64)
    return assign(test, cut(np.bincount(test, minlength=count), realised), rng)


def log_dirichlet(alpha: float, shape: tuple[int, ...], rng: Generator) -> Floats:
    """Return logarithms, up to a constant per row, of symmetric Dirichlet(alpha) draws along the last axis.

    A gamma draw of a tiny shape underflows to 0 and a row of zeros has no proportions. Gamma(a) = Gamma(a+1)
    U^(1/a) (Marsaglia and Tsang 2000) keeps the draw in log space.
    """
    uniform = 1.0 - rng.random(shape)  # in (0, 1], so that the logarithm is finite
    logs: Floats = np.log(rng.standard_gamma(alpha + 1.0, shape)) + np.log(uniform) / alpha
    return logs


def proportions(logs: Floats) -> Floats:
    """Return the softmax along the last axis: log-space Dirichlet draws -> proportions that add up to 1."""
    weights = np.exp(logs - logs.max(axis=-1, keepdims=True))
    shares: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return shares


def raise_to_minimum(owner: Ints, strata: Ints, clients: int, min_size: int, rng: Generator) -> Ints:
    """Return `owner` with samples moved from the largest clients until every client owns at least `min_size`.

    The largest clients are cut down to one common level, no further than needed. A client receives samples in
    runs of one donor and one stratum, so a repaired client of a skewed partition still holds few classes.

    Raises:
        DataError: if there are fewer samples than `clients * min_size`; otherwise it always succeeds.
    """
    sizes = np.bincount(owner[owner >= 0], minlength=clients)
    require_enough(int(sizes.sum()), clients, min_size)
    missing = np.maximum(min_size - sizes, 0)
    needed = int(missing.sum())
    if needed == 0:
        return owner
    give = _levelled(sizes, needed, min_size, rng)
    # The samples of each client get a random order, in which the first `give` are released.
    shuffled = np.lexsort((rng.random(len(owner)), owner))
    position = np.argsort(shuffled)
    first = np.searchsorted(owner[shuffled], np.arange(clients))
    released = np.flatnonzero(owner >= 0)
    released = released[position[released] - first[owner[released]] < give[owner[released]]]
    released = released[np.lexsort((strata[released], owner[released]))]
    repaired = owner.copy()
    repaired[released] = np.repeat(np.arange(clients), missing)
    return repaired


def _levelled(sizes: Ints, needed: int, min_size: int, rng: Generator) -> Ints:
    """Return how many samples each client gives, `needed` in total, so that the largest end up level."""
    low, high = min_size, int(sizes.max())  # the highest level at which enough is given is in low..high
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.maximum(sizes - middle, 0).sum()) >= needed:
            low = middle
        else:
            high = middle - 1
    give = np.maximum(sizes - low, 0)
    donors = rng.permutation(np.flatnonzero(give))
    give[donors[: int(give.sum()) - needed]] -= 1
    return give


def require_enough(samples: int, clients: int, least: int, option: str = "min_size") -> None:
    """Raise DataError if `samples` cannot give every client `least`, the value of `option`."""
    if samples < clients * least:
        raise DataError(
            f"{samples} samples cannot give each of {clients} clients {option}={least} "
            f"({clients * least} needed); use fewer clients, a smaller {option} or more samples"
        )


def require_number(name: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError unless option `name` is a number in low..high."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(
            f"partition option '{name}' must be a number from {low:g} to {high:g}, but is {shown(value)}"
        )


def require_whole(name: str, value: int, low: int) -> None:
    """Raise ConfigError unless option `name` is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise ConfigError(
            f"partition option '{name}' must be a whole number of at least {low}, but is {shown(value)}"
        )


def require_alpha(value: float) -> None:
    """Raise ConfigError unless `value` can be a Dirichlet concentration."""
    require_number("alpha", value, _SMALLEST_ALPHA, _LARGEST_ALPHA)
