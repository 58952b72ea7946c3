"""Partitions with random skew: Dirichlet over labels, unequal sizes, and no skew (iid)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.random import Generator

from tailorfl.errors import ConfigError, DataError
from tailorfl.partition.deal import (
    Deal,
    Floats,
    assign,
    assign_alike,
    compress,
    cut,
    log_dirichlet,
    proportions,
    raise_to_minimum,
    require_alpha,
    require_enough,
    require_number,
    require_whole,
    share_out,
)
from tailorfl.partition.rows import Ints

_DRAWS = 100
_WORK = 20_000_000  # gamma draws that all re-draws together may cost, about half a second


def iid(strata: Ints, clients: int, rng: Generator, *, test: Ints | None = None) -> Deal:
    """Return samples dealt at random, sizes differing by at most one.

    Args:
        strata: `[samples]` int64 label of each sample; only their number is used.
        clients: number of clients.
        rng: source of randomness.
        test: `[test samples]` int64, the official test part, dealt the same way.
    """
    even = np.ones(clients)
    owner = _by_size(len(strata), even, rng)
    test_owner = None if test is None else _by_size(len(test), even, rng)
    return Deal.of(owner, test_owner, clients)


def quantity(
    strata: Ints,
    clients: int,
    rng: Generator,
    *,
    test: Ints | None = None,
    alpha: float | None = None,
    sigma: float | None = None,
    min_size: int = 3,
) -> Deal:
    """Unequal sizes with equal label distributions.

    Shares of the samples are Dirichlet(`alpha`) or, by default, proportional to exp(`sigma` z) with z
    standard normal (sigma 1). The test part is dealt in the resulting shares.

    Args:
        strata: `[samples]` int64 label of each sample.
        clients: number of clients.
        rng: source of randomness.
        test: `[test samples]` int64, the official test part.
        alpha: concentration of Dirichlet shares; small is unequal.
        sigma: standard deviation of the logarithm of log-normal shares; large is unequal.
        min_size: smallest number of training samples of a client; 3 fill train, validation and test part.

    Raises:
        ConfigError: if both `alpha` and `sigma` are given.
        DataError: if there are fewer samples than `clients * min_size`.
    """
    require_whole("min_size", min_size, 0)
    require_enough(len(strata), clients, min_size)
    if alpha is not None and sigma is not None:
        raise ConfigError(
            "partition 'quantity' takes alpha (Dirichlet sizes) or sigma (log-normal sizes), not both"
        )
    if alpha is not None:
        require_alpha(alpha)
        shares = proportions(log_dirichlet(alpha, (clients,), rng))
    else:
        spread = 1.0 if sigma is None else sigma
        require_number("sigma", spread, 0.0, 100.0)
        shares = proportions(spread * rng.standard_normal(clients))
    owner = raise_to_minimum(_by_size(len(strata), shares, rng), strata, clients, min_size, rng)
    sizes = np.bincount(owner, minlength=clients).astype(np.float64)
    return Deal.of(owner, None if test is None else _by_size(len(test), sizes, rng), clients)


def dirichlet(
    strata: Ints,
    clients: int,
    rng: Generator,
    *,
    test: Ints | None = None,
    alpha: float = 0.3,
    min_size: int = 10,
) -> Deal:
    """Label skew: each class goes to the clients in Dirichlet(alpha) proportions, cut by cumulative floor.

    The whole draw is repeated until every client has `min_size` training samples (Hsu et al. 2019, and
    PerFed-CKT with alpha 0.01). That may never happen, so after at most 100 draws the one that lacks the
    fewest samples is repaired by moving samples from the largest clients. The test part is dealt in the
    resulting proportions, so no client is tested on a class that it did not get.

    Args:
        strata: `[samples]` int64 class of each sample.
        clients: number of clients.
        rng: source of randomness.
        test: `[test samples]` int64 class of each sample of the official test part; classes without training
            samples are left out.
        alpha: concentration; 0.01 leaves most clients with one class, 100 is close to iid.
        min_size: smallest number of training samples of a client.

    Raises:
        DataError: if there are fewer samples than `clients * min_size`.
    """
    require_alpha(alpha)
    require_whole("min_size", min_size, 0)
    require_enough(len(strata), clients, min_size)
    ids, test_ids, classes = compress(strata, test)
    sizes = np.bincount(ids, minlength=classes)
    counts = _best_draw(sizes, clients, alpha, min_size, rng)
    owner = raise_to_minimum(assign(ids, counts, rng), ids, clients, min_size, rng)
    return Deal.of(owner, assign_alike(test_ids, owner, ids, classes, clients, rng), clients)


def dirichlet_perada(
    strata: Ints,
    clients: int,
    rng: Generator,
    *,
    test: Ints | None = None,
    alpha: float = 0.1,
    reserve: int = 2,
    server: float = 0.1,
) -> Deal:
    """PerAda's partition: a Dirichlet label skew with roughly even sizes (Xie et al. 2024, released code).

    `reserve` samples of every class are put aside for every client. A share `server` of all samples, drawn
    from the rest, stays with the server. Then class after class is cut in Dirichlet(alpha) proportions
    among the clients that hold fewer than samples/clients. The test part uses the same proportions of each
    class among clients with fewer than test samples/clients, with no reserve and no server part.

    Args:
        strata: `[samples]` int64 class of each sample.
        clients: number of clients.
        rng: source of randomness.
        test: `[test samples]` int64 class of each sample of the official test part.
        alpha: concentration.
        reserve: samples of every class that every client gets in any case.
        server: share of all samples that the server keeps for validation, `Deal.server`.

    Raises:
        DataError: if a class is too small for the reserve, or too little is left for the server.
    """
    require_alpha(alpha)
    require_whole("reserve", reserve, 0)
    require_number("server", server, 0.0, 0.9)
    ids, test_ids, classes = compress(strata, test)
    owner = _reserved(ids, np.unique(strata), clients, reserve, rng)
    server_mask = _server_part(owner, round(server * len(ids)), rng)
    log_shares = log_dirichlet(alpha, (classes, clients), rng)
    open_positions = np.setdiff1d(np.flatnonzero(owner < 0), server_mask)
    counts = _balanced_counts(ids[open_positions], log_shares, len(ids) / clients)
    owner[open_positions] = assign(ids[open_positions], counts, rng)
    test_owner = None
    if test_ids is not None:
        test_counts = _balanced_counts(test_ids, log_shares, len(test_ids) / clients)
        test_owner = assign(test_ids, test_counts, rng)
    return replace(Deal.of(owner, test_owner, clients), server=server_mask)


def _by_size(samples: int, shares: Floats, rng: Generator) -> Ints:
    """Return random owners of `samples` samples of one stratum, in numbers proportional to `shares`."""
    counts = share_out(np.array([samples]), shares[None, :], rng)
    return assign(np.zeros(samples, dtype=np.int64), counts, rng)


def _best_draw(sizes: Ints, clients: int, alpha: float, min_size: int, rng: Generator) -> Ints:
    """Return counts `[classes, clients]` of the first draw that satisfies `min_size`, else of the nearest one."""
    best, least = np.zeros((len(sizes), clients), dtype=np.int64), None
    for _ in range(max(5, min(_DRAWS, _WORK // (len(sizes) * clients)))):
        counts = cut(sizes, proportions(log_dirichlet(alpha, (len(sizes), clients), rng)))
        missing = int(np.maximum(min_size - counts.sum(axis=0), 0).sum())
        if least is None or missing < least:
            best, least = counts, missing
        if missing == 0:
            break
    return best


def _reserved(ids: Ints, labels: Ints, clients: int, reserve: int, rng: Generator) -> Ints:
    """Return owners that give every client `reserve` random samples of every class; NOBODY owns the others."""
    sizes = np.bincount(ids)
    present = np.flatnonzero(sizes)
    for label, k in zip(labels, present, strict=True):
        if sizes[k] < reserve * clients:
            raise DataError(
                f"partition 'dirichlet_perada' reserves {reserve} samples of every class for each of "
                f"{clients} clients, but class {label} has only {sizes[k]}; use fewer clients or a smaller "
                "reserve"
            )
    return assign(ids, np.tile(reserve * (sizes[:, None] > 0), clients), rng)


def _server_part(owner: Ints, count: int, rng: Generator) -> Ints:
    """Return `count` random positions that nobody owns, ascending."""
    free = np.flatnonzero(owner < 0)
    if count > len(free):
        raise DataError(
            f"partition 'dirichlet_perada' keeps {count} samples at the server, but after the reserve only "
            f"{len(free)} are left; use a smaller reserve, a smaller server share or fewer clients"
        )
    return np.sort(rng.choice(free, size=count, replace=False))


def _balanced_counts(ids: Ints, log_shares: Floats, limit: float) -> Ints:
    """Return counts `[classes, clients]`, class after class, with none for clients that hold `limit` samples."""
    sizes = np.bincount(ids, minlength=len(log_shares))
    counts = np.zeros(log_shares.shape, dtype=np.int64)
    client_totals = np.zeros(log_shares.shape[1], dtype=np.int64)
    for k in np.flatnonzero(sizes):
        # Not all clients can be closed: they would hold all samples, and those of class k are still to come.
        logs = np.where(client_totals < limit, log_shares[k], -np.inf)
        counts[k] = cut(sizes[k : k + 1], proportions(logs)[None, :])[0]
        client_totals += counts[k]
    return counts
