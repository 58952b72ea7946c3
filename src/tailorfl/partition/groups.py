"""Partitions along groups that the data already have: natural clients (writers, hospitals) and domains."""

from __future__ import annotations

import logging

import numpy as np
from numpy.random import Generator

from tailorfl.errors import DataError
from tailorfl.partition.deal import NOBODY, Deal, assign, require_whole, share_out
from tailorfl.partition.rows import Ints

log = logging.getLogger(__name__)


def natural(
    strata: Ints, clients: int | None, rng: Generator, *, test: Ints | None = None, min_size: int = 1
) -> Deal:
    """One client per group, in ascending order of group ids.

    Args:
        strata: `[samples]` int64 group of each sample.
        clients: number of random groups that become clients, the others are left out; None: all.
        rng: source of randomness.
        test: `[test samples]` int64 group of each sample of the official test part.
        min_size: groups with fewer training samples are left out.

    Raises:
        DataError: if fewer than `clients` groups are large enough.
    """
    require_whole("min_size", min_size, 1)
    groups, sizes = np.unique(strata, return_counts=True)
    everyone = len(groups) if test is None else len(np.union1d(strata, test))
    groups = groups[sizes >= min_size]
    if 0 < len(groups) < everyone:
        log.warning(
            "partition 'natural': %d of %d groups have fewer than %d training samples and are left out",
            everyone - len(groups),
            everyone,
            min_size,
            extra={"once": ("natural", everyone - len(groups), everyone, min_size)},
        )
    if len(groups) < (1 if clients is None else clients):
        raise DataError(
            f"partition 'natural': {clients or 'some'} clients were requested, but only {len(groups)} groups have "
            f"min_size={min_size} training samples; use fewer clients or a smaller min_size"
        )
    if clients is not None:
        groups = np.sort(rng.choice(groups, size=clients, replace=False))
    test_owner = None if test is None else _place_in(groups, test)
    return Deal.of(_place_in(groups, strata), test_owner, len(groups))


def domain(strata: Ints, clients: int | None, rng: Generator, *, test: Ints | None = None) -> Deal:
    """One client per domain, or equally many clients in every domain, which share it evenly at random.

    Clients of one domain are consecutive, domains in ascending order of their ids.

    Args:
        strata: `[samples]` int64 domain of each sample.
        clients: a multiple of the number of domains; None: one client per domain.
        rng: source of randomness.
        test: `[test samples]` int64 domain of each sample of the official test part.

    Raises:
        DataError: if `clients` is not a multiple of the number of domains, or a domain has fewer samples than
            clients.
    """
    domains, sizes = np.unique(strata, return_counts=True)
    total = len(domains) if clients is None else clients
    per_domain = total // len(domains)
    if per_domain == 0 or total % len(domains):
        raise DataError(
            f"partition 'domain' needs a number of clients that is a multiple of the {len(domains)} domains, but got "
            f"{clients}; use one client per domain (leave 'clients' out) or partition 'natural' to draw some of them"
        )
    if sizes.min() < per_domain:
        raise DataError(
            f"partition 'domain': the smallest domain has {sizes.min()} samples, too few for {per_domain} clients; use "
            "fewer clients"
        )
    train = _shared(_place_in(domains, strata), len(domains), per_domain, rng)
    shared_test = None if test is None else _shared(_place_in(domains, test), len(domains), per_domain, rng)
    return Deal.of(train, shared_test, total)


def _place_in(groups: Ints, ids: Ints) -> Ints:
    """Return the index of every id in the sorted `groups`, NOBODY for ids that are not in it."""
    position = np.minimum(np.searchsorted(groups, ids), len(groups) - 1)
    return np.where(groups[position] == ids, position, NOBODY).astype(np.int64)


def _shared(position: Ints, domains: int, per_domain: int, rng: Generator) -> Ints:
    """Return owners that share every domain evenly among `per_domain` clients; NOBODY owns samples of no domain."""
    owner = np.full(len(position), NOBODY, dtype=np.int64)
    in_domain = np.flatnonzero(position >= 0)
    weights = np.repeat(np.eye(domains), per_domain, axis=1)
    sizes = np.bincount(position[in_domain], minlength=domains)
    owner[in_domain] = assign(position[in_domain], share_out(sizes, weights, rng), rng)
    return owner
