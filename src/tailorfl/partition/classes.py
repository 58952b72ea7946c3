"""Partitions that promise how many classes a client holds."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tailorfl.errors import DataError, check_known
from tailorfl.partition.deal import (
    NOBODY,
    Deal,
    Floats,
    assign,
    compress,
    require_number,
    require_whole,
    share_out,
)
from tailorfl.partition.rows import Ints

CUTS = ("none", "drawn", "sorted")


def labels_per_client(
    strata: Ints, clients: int, rng: Generator, *, test: Ints | None = None, classes: int = 2
) -> Deal:
    """Every client holds exactly `classes` distinct classes, every class equally shared by its owners.

    A class has `clients * classes / number of classes` owners; if that is not a whole number, random classes
    have one more. Train and test part are cut alike, so a client is tested on exactly its classes. PLGU (Qu
    et al. 2023) gives the number of labels and not the construction; this one is ours. Every set of classes
    is possible.

    Args:
        strata: `[samples]` int64 class of each sample.
        clients: number of clients.
        rng: source of randomness.
        test: `[test samples]` int64 class of each sample of the official test part.
        classes: distinct classes per client. With fewer slots than classes, the classes that nobody owns are
            left out.

    Raises:
        DataError: if there are fewer classes than that, or a class has fewer samples than owners.
    """
    pool = _Pool("labels_per_client", strata, test, classes)
    owners = _distinct_classes(pool.count, clients, classes, rng)
    return pool.deal(owners.astype(np.float64), owners.sum(axis=1), rng)


def class_groups(
    strata: Ints, clients: int, rng: Generator, *, test: Ints | None = None, groups: int = 4, classes: int = 3
) -> Deal:
    """Clients in groups: those of one hold the same `classes` distinct classes, equally shared by all who hold them.

    Clients are put at random into groups whose sizes differ by at most one. Groups get classes as clients do in
    `labels_per_client`, so groups overlap if `groups * classes` exceeds the number of classes. Train and test part are
    cut alike.

    Args:
        strata: `[samples]` int64 class of each sample.
        clients: number of clients.
        rng: source of randomness.
        test: `[test samples]` int64 class of each sample of the official test part.
        groups: number of groups, at most that of clients.
        classes: distinct classes per group. With fewer slots than classes, the classes that no group has are left out.

    Raises:
        DataError: if there are more groups than clients, fewer classes than that, or fewer samples of a class than
            owners.
    """
    require_whole("groups", groups, 1)
    if groups > clients:
        raise DataError(
            f"partition 'class_groups' cannot put {clients} clients into {groups} groups of at least one; use fewer "
            "groups or more clients"
        )
    pool = _Pool("class_groups", strata, test, classes)
    owners = _distinct_classes(pool.count, groups, classes, rng)[:, rng.permutation(clients) % groups]
    return pool.deal(owners.astype(np.float64), owners.sum(axis=1), rng)


def shards(strata: Ints, clients: int, rng: Generator, *, test: Ints | None = None, classes: int = 2) -> Deal:
    """Every class is cut into equal shards and every client gets `classes` random shards (FedRep, LG-FedAvg).

    There are `clients * classes` shards in all. As in the released codes a client may draw two shards of one
    class, so it holds at most `classes` classes. The test part is cut and dealt the same way.

    Args:
        strata: `[samples]` int64 class of each sample.
        clients: number of clients.
        rng: source of randomness.
        test: `[test samples]` int64 class of each sample of the official test part.
        classes: shards per client. With fewer shards than classes, the classes without a shard are left out.

    Raises:
        DataError: if there are fewer classes than that, or a class has fewer samples than shards.
    """
    pool = _Pool("shards", strata, test, classes)
    per_class = _even_slots(pool.count, clients * classes, rng)
    dealt = rng.permutation(np.repeat(np.arange(pool.count), per_class)).reshape(clients, classes)
    weights = np.zeros((pool.count, clients))
    np.add.at(weights, (dealt, np.arange(clients)[:, None]), 1.0)
    return pool.deal(weights, per_class, rng)


def classes_prob(
    strata: Ints, clients: int, rng: Generator, *, test: Ints | None = None, classes: int = 2
) -> Deal:
    """`classes` distinct classes per client, each class shared by its owners in proportions U(0.4, 0.6).

    The recipe of pFedHN (Shamsian et al. 2021) for 2 classes of CIFAR-10 and 10 of CIFAR-100. The test part
    uses the same proportions.

    Args:
        strata: `[samples]` int64 class of each sample.
        clients: number of clients.
        rng: source of randomness.
        test: `[test samples]` int64 class of each sample of the official test part.
        classes: distinct classes per client.

    Raises:
        DataError: if there are fewer classes than that, or a class is too small for its owners.
    """
    pool = _Pool("classes_prob", strata, test, classes)
    owners = _distinct_classes(pool.count, clients, classes, rng)
    weights = np.where(owners, rng.uniform(0.4, 0.6, owners.shape), 0.0)
    return pool.deal(weights, owners.sum(axis=1), rng)


def fedclup_classes(
    strata: Ints,
    clients: int,
    rng: Generator,
    *,
    test: Ints | None = None,
    classes: int = 2,
    virtual: int = 300,
    cut: str = "none",
    cut_share: float = 0.1,
) -> Deal:
    """FedCLUP's partition: `clients` of `virtual` clients that hold equally much of `classes` classes each.

    One after another, virtual clients take `samples // (virtual * classes)` samples of each of their random
    distinct classes; a client that finds a class used up is dropped. The samples of clients that are not drawn
    are left out. Classes are shuffled first. An official test part is dealt in the train part's proportions.

    The released code uses the last tenth of a client's samples for tests without shuffling them. They are ordered by
    class, so its training part lacks most or all of one class: `cut` leaves them out here.

    Args:
        strata: `[samples]` int64 class of each sample.
        clients: number of clients.
        rng: source of randomness.
        test: `[test samples]` int64 class of each sample of the official test part.
        classes: distinct classes per client.
        virtual: number of clients that the data are laid out for.
        cut: "none", or the samples that each client loses: the last ones with classes in the order in which it
            drew them ("drawn") or by number ("sorted").
        cut_share: share of its samples that a client then loses.

    Raises:
        DataError: if there are too few samples for the layout, or fewer clients than requested survive it.
        ConfigError: for an unknown cut, or a cut_share that is no share.
    """
    require_whole("virtual", virtual, 1)
    check_known("cut of partition 'fedclup_classes'", cut, CUTS)
    require_number("cut_share", cut_share, 0.0, 1.0)
    pool = _Pool("fedclup_classes", strata, test, classes)
    per_virtual = len(strata) // (virtual * classes)
    if per_virtual == 0:
        raise DataError(
            f"partition 'fedclup_classes' lays out {virtual} virtual clients of {classes} classes, but "
            f"{len(strata)} samples are fewer than one per class and virtual client; use a smaller virtual"
        )
    holders = np.zeros((pool.count, virtual), dtype=bool)
    remaining, ranks = pool.sizes.copy(), np.zeros((pool.count, virtual), dtype=np.int64)
    for client in range(virtual):
        chosen = rng.permutation(pool.count)[:classes]
        ranks[chosen, client] = np.arange(classes)
        if (remaining[chosen] >= per_virtual).all():
            remaining[chosen] -= per_virtual
            holders[chosen, client] = True
    survivors = np.flatnonzero(holders.any(axis=0))
    if len(survivors) < clients:
        raise DataError(
            f"partition 'fedclup_classes': only {len(survivors)} of {virtual} virtual clients got enough samples, but "
            f"{clients} clients are needed; use fewer clients or a larger virtual"
        )
    survivors_drawn = rng.choice(survivors, size=clients, replace=False)
    drawn = holders[:, survivors_drawn]
    train = assign(pool.strata, per_virtual * drawn, rng)
    if cut != "none":
        order = (
            ranks[:, survivors_drawn] if cut == "drawn" else np.tile(np.arange(pool.count)[:, None], clients)
        )
        _cut_off(train, pool.strata, order, cut_share)
    test_owner = None
    if pool.test is not None:
        each_test = pool.test_sizes * per_virtual // np.maximum(pool.sizes, 1)
        test_owner = assign(pool.test, each_test[:, None] * drawn, rng)
    return Deal.of(train, test_owner, clients)


def _cut_off(owner: Ints, strata: Ints, order: Ints, share: float) -> None:
    """Take from every client the last `share` of its samples, by the `order` `[classes, clients]` of its classes."""
    for client in range(order.shape[1]):
        rows = np.flatnonzero(owner == client)
        rows = rows[np.argsort(order[strata[rows], client], kind="stable")]
        owner[rows[len(rows) - round(share * len(rows)) :]] = NOBODY


class _Pool:
    """The samples to deal, classes renumbered to those that occur in the training part."""

    def __init__(self, partition: str, strata: Ints, test: Ints | None, classes: int) -> None:
        require_whole("classes", classes, 1)
        self.partition = partition
        self.labels = np.unique(strata)
        self.count = len(self.labels)
        if classes > self.count:
            raise DataError(
                f"partition '{partition}' cannot give every client {classes} classes: the data have "
                f"{self.count}; use a smaller 'classes'"
            )
        if test is not None and len(extra := np.setdiff1d(test, self.labels)):
            raise DataError(
                f"partition '{partition}': classes {', '.join(map(str, extra[:5]))} occur in the official test part "
                "but not in the training part; drop them or split the training part instead"
            )
        self.strata, self.test, _ = compress(strata, test)
        self.sizes = np.bincount(self.strata, minlength=self.count)
        self.test_sizes = np.bincount([] if self.test is None else self.test, minlength=self.count)

    def deal(self, weights: Floats, slots: Ints, rng: Generator) -> Deal:
        """Cut every class by `weights` `[classes, clients]`, both parts alike.

        `slots` `[classes]` is the number of pieces of a class, at most as many as it may have samples.
        """
        clients = weights.shape[1]
        train, test = self._owners("training", self.strata, self.sizes, weights, slots, rng), None
        if self.test is not None:
            test = self._owners("official test", self.test, self.test_sizes, weights, slots, rng)
        return Deal.of(train, test, clients)

    def _owners(
        self, part: str, strata: Ints, sizes: Ints, weights: Floats, slots: Ints, rng: Generator
    ) -> Ints:
        counts = share_out(sizes, weights, rng)
        short = (sizes < slots) | ((counts == 0) & (weights > 0)).any(axis=1)
        if short.any():
            k = int(np.flatnonzero(short)[0])
            raise DataError(
                f"partition '{self.partition}': class {self.labels[k]} has {sizes[k]} samples in the {part} "
                f"part, too few for the {slots[k]} pieces it must be cut into; use fewer clients, fewer "
                "classes per client or more samples"
            )
        return assign(strata, counts, rng)


def _even_slots(count: int, slots: int, rng: Generator) -> Ints:
    """Return `[count]` int64 numbers that add up to `slots` and differ by at most one, in random order."""
    numbers = np.full(count, slots // count, dtype=np.int64)
    numbers[rng.permutation(count)[: slots % count]] += 1
    return numbers


def _distinct_classes(count: int, clients: int, classes: int, rng: Generator) -> NDArray[np.bool_]:
    """Return `[count, clients]` bool, True where a client holds a class: `classes` per client, classes evenly used.

    Each client in turn draws classes without replacement, with weights equal to the owners that a class still
    lacks. A class that lacks as many owners as clients are left must be taken by every one of them. Since no
    class ever lacks more owners than clients are left, this cannot run into a dead end, unlike shuffling
    until nothing collides.
    """
    lacking = _even_slots(count, clients * classes, rng)
    chosen = np.empty((clients, classes), dtype=np.int64)
    with np.errstate(divide="ignore"):  # a class with all its owners has logarithm -inf and is never drawn
        for done in range(clients):
            # The largest of log(weight) + Gumbel noise: a weighted draw without replacement.
            score = np.log(lacking) + rng.gumbel(size=count)
            score[lacking == clients - done] = np.inf
            chosen[done] = np.argsort(score)[-classes:]
            lacking[chosen[done]] -= 1
    owners = np.zeros((count, clients), dtype=bool)
    # The last clients had fewer choices than the first, so the clients are shuffled.
    owners[chosen, rng.permutation(clients)[:, None]] = True
    return owners
