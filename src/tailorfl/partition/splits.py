"""Stratified splits of clients' samples into train, validation and test parts, for all clients at once or for one."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tailorfl.errors import ConfigError, DataError
from tailorfl.partition.rows import Ints, Rows
from tailorfl.settings.data import SplitShares

Floats = NDArray[np.float64]

TestSource = Literal["client", "official", "classes", "global"]
PERFED_CKT_TRAIN = (0.1, 0.3, 0.4)
_TOLERANCE = 1e-9
_BLOCK = 1 << 17
"""Rows that are split at once, so temporary arrays stay in the cache, and memory does not grow with clients."""


@dataclass(frozen=True)
class SplitRule:
    """The use of a client's samples.

    Attributes:
        train, val, test: shares of a client's samples; the rest is discarded. `test` is 0 if the official test part
            is used.
        source: the origin of test samples: the client's own samples, the official test part dealt by the
            same recipe as the training part, all official test samples of the client's training classes, or the whole
            official test part for every client.
        train_choices: if not empty, every client's train share is drawn from these instead.
    """

    train: float
    val: float
    test: float
    source: TestSource = "client"
    train_choices: tuple[float, ...] = ()

    def shares(self, clients: int, rng: Generator) -> Floats:
        """Return `[3, clients]` shares of train, val and test for every client."""
        train = np.full(clients, self.train)
        if self.train_choices:
            train = rng.choice(np.array(self.train_choices), size=clients)
        return np.stack([train, np.full(clients, self.val), np.full(clients, self.test)])


def read_split(split: SplitShares | Literal["perfed_ckt"] | None, official: bool) -> SplitRule:
    """Return the rule for a split setting.

    Args:
        split: None: 0.7/0.1/0.2, or 0.9/0.1 and the official test part if there is one. "perfed_ckt":
            train 0.1, 0.3 or 0.4 drawn for every client, validation 0.1, test 0.5, the rest discarded, all
            from the training part (PerFed-CKT). Or shares of train, val and test; by default val is 0.1
            without train and 0 with it, and the other missing share is the rest. test may also be
            "official" (each client's part of the official test part, the default if the source has one) or
            "classes" (all of it that is of the client's classes) or "global" (all of it for every client).
        official: whether the source has an official test part.

    Raises:
        ConfigError: for shares adding up to more than 1, or an official test part that does not exist.
    """
    if split is None:
        return SplitRule(0.9, 0.1, 0.0, "official") if official else SplitRule(0.7, 0.1, 0.2)
    if isinstance(split, str):
        return SplitRule(max(PERFED_CKT_TRAIN), 0.1, 0.5, train_choices=PERFED_CKT_TRAIN)
    val = split.val if split.val is not None else 0.0 if split.train is not None else 0.1
    test = "official" if split.test is None and official else split.test
    if isinstance(test, str) and not official:
        raise ConfigError(f"split test='{test}' needs an official test part, which this source does not have")
    share = test if isinstance(test, float) else 0.0 if test is not None else 0.2
    train = 1.0 - val - share if split.train is None else split.train
    if test is None:
        share = max(0.0, 1.0 - val - train)
    rule = SplitRule(train, val, share, test if isinstance(test, str) else "client")
    if rule.train <= 0.0 or rule.train + rule.val + rule.test > 1.0 + _TOLERANCE:
        raise ConfigError(
            f"split shares train={rule.train:g}, val={rule.val:g}, test={rule.test:g} must have train above 0 and add "
            "up to at most 1"
        )
    return rule


def split_clients(
    rows: Sequence[Ints], strata: Ints, shares: Floats, rng: Generator
) -> tuple[Rows, Rows, Rows]:
    """Split every client's rows at random into train, val and test, ascending within each.

    A client's rows are ordered by stratum, at random within one, and each part takes evenly spaced rows
    from a random start (systematic sampling). So a part gets its exact share of every stratum, rounded down or
    up, and the split does not depend on the order of the rows. Part sizes are rounded to the nearest whole number;
    each part whose share is not 0 gets a row if the client has enough, first train, then test, then val.

    Args:
        rows: per client `[samples]` int64 rows.
        strata: `[all samples]` int64 stratum of every row.
        shares: `[3, clients]` shares of train, val and test, adding up to at most 1 for every client; the rest
            is discarded.
        rng: source of randomness.

    Returns:
        train, val, test: each per client int64 rows.
    """
    client_rows = Rows.of(rows)
    sizes = client_rows.sizes
    train, val, test = part_sizes(sizes, shares)
    # Drawn per row number, not per position, so that the order of a client's rows does not matter.
    noise = rng.random(len(strata))
    drawn = []
    remaining = sizes
    for part_counts in (test, val, train):
        empty = Rows.cut(np.empty(int(part_counts.sum()), dtype=np.int64), part_counts)
        drawn.append((part_counts, random_starts(remaining, rng), empty))
        remaining = remaining - part_counts
    for block in _blocks(sizes):
        some = client_rows[block]
        flat, client = some.flat(), some.owners()
        order = ordered(client, strata[flat], noise[flat])
        flat, client = flat[order], client[order]
        for part_counts, start, part in drawn:
            chosen = evenly_spaced(client, part_counts[block], start[block])
            part[block].flat()[:] = _ascending(flat[chosen], client[chosen], len(strata))
            flat, client = flat[~chosen], client[~chosen]
    tested, validated, trained = (part for *_, part in drawn)
    return trained, validated, tested


def _blocks(sizes: Ints) -> Iterator[slice]:
    """Yield slices of consecutive clients with at most `_BLOCK` rows in total, or of one client."""
    ends, first = np.cumsum(sizes), 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + _BLOCK, side="right")))
        yield slice(first, last)
        first = last


def part_sizes(sizes: Ints, shares: Floats) -> Ints:
    """Return `[3, clients]` int64 sizes of train, val and test for clients of `sizes` `[clients]` samples."""
    rounded = np.floor(shares * sizes + 0.5).astype(np.int64)
    train, val, test = np.where(shares > 0, np.maximum(rounded, 1), 0)
    complete = shares.sum(axis=0) > 1.0 - _TOLERANCE
    beside_train = np.maximum(sizes - (shares[0] > 0), 0)
    # One is left for val, unless test would then have none.
    test = np.minimum(test, np.maximum(beside_train - (shares[1] > 0), np.minimum(beside_train, 1)))
    val = np.minimum(val, np.maximum(sizes - test - (shares[0] > 0), 0))
    remaining = sizes - test - val
    return np.stack([np.where(complete, remaining, np.minimum(train, remaining)), val, test])


def random_starts(sizes: Ints, rng: Generator) -> Ints:
    """Return `[clients]` int64, for each client a random offset below its `sizes` samples, for `evenly_spaced`."""
    return rng.integers(0, np.maximum(sizes, 1))


def evenly_spaced(client: Ints, counts: Ints, start: Ints) -> NDArray[np.bool_]:
    """Return `[samples]` bool: `counts[i]` evenly spaced samples of every client i.

    Args:
        client: `[samples]` int64 client of each sample, ascending.
        counts: `[clients]` int64, at most the number of samples of the client.
        start: `[clients]` int64, see `random_starts`.
    """
    sizes = np.bincount(client, minlength=len(counts))
    if not counts.any() or bool((counts == sizes).all()):
        return np.full(len(client), bool(counts.any()))
    position = np.arange(len(client)) - (np.cumsum(sizes) - sizes)[client]
    size, want, begin = sizes[client], counts[client], start[client]
    # Over positions 0..size of a client, the floor of (position * want + begin) / size rises from 0 to `want`.
    quotient = (position * want + begin) // size
    following = np.where(position + 1 < size, np.append(quotient[1:], 0), want)
    chosen: NDArray[np.bool_] = following > quotient
    return chosen


def ordered(client: Ints, strata: Ints, noise: Floats) -> Ints:
    """Return the result of `np.lexsort((noise, strata, client))`, for `noise` in [0, 1), many times faster.

    One number holds all three keys, up to a rounding of the noise that leaves at most a few neighbours undecided.
    """
    cell = client * (int(strata.max(initial=0)) + 1) + strata
    order = np.argsort(cell + noise, kind="stable")
    cell, noise = cell[order], noise[order]
    if bool(((cell[1:] > cell[:-1]) | ((cell[1:] == cell[:-1]) & (noise[1:] >= noise[:-1]))).all()):
        return order
    return order[np.lexsort((order, noise, cell))]


def _ascending(rows: Ints, client: Ints, samples: int) -> Ints:
    """Return rows out of 0..`samples`-1 sorted within each client; `client` is ascending."""
    first = client * samples
    ascending: Ints = np.sort(first + rows) - first
    return ascending


def stream(seed: int, purpose: str) -> Generator:
    """Return the random generator of one purpose, such as "split"."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])


def own_rows(
    client: int, sizes: Sequence[int], strata: Ints, rule: SplitRule, seed: int
) -> tuple[Ints, Ints, Ints]:
    """Return train, val and test rows of one client, int64, ascending, counted from 0 in its own table.

    They are the ones from `tailorfl.data.build.build` in the whole federation, if clients are files of a folder (one
    each, in the order of their names), none is held out and no samples are set apart. A client's split depends on the
    row numbers, sizes and seed of all, but only on its own labels.

    Args:
        client: its number, counted from 0.
        sizes: rows of every client's table, in the order of the clients.
        strata: `[sizes[client]]` int64, of its own rows, numbered in any way that keeps their order: the class among
            its own classes, see `own_strata`.
        rule: of the split, see `tailorfl.partition.splits.read_split`.
        seed: of the data, `DataConfig.seed_of(seed of the run)`.

    Raises:
        DataError: there is no such client, it has not one label per row, a client has no rows, or test samples should
            come from an official test part.
    """
    rows = np.asarray(sizes, dtype=np.int64)
    if not 0 <= client < len(rows) or (rows < 1).any():
        raise DataError(
            f"client must be from 0 to {len(rows) - 1} and every client needs rows, but client is {client} and the "
            f"numbers of rows are {rows.tolist()[:20]}"
        )
    if len(strata) != rows[client]:
        raise DataError(f"client {client} has {rows[client]} rows, but {len(strata)} labels")
    if rule.source != "client":
        raise DataError(
            "an official test part can only be dealt with the rows of all clients; give a share of test rows instead"
        )
    everyone = Rows.cut(np.arange(rows.sum()), rows)
    all_strata = np.zeros(rows.sum(), dtype=np.int64)
    all_strata[everyone[client]] = strata
    rng = stream(seed, "split")
    parts = split_clients(everyone, all_strata, rule.shares(len(rows), rng), rng)
    train, val, test = (part[client] - everyone.starts[client] for part in parts)
    return train, val, test
