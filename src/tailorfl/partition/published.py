"""Published partitions: NIID-Bench and sorted shards, drawn as in their released code, and those of Flower Datasets."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.random import Generator

from tailorfl.errors import ConfigError, DataError, check_known, needs_extra
from tailorfl.partition.deal import (
    NOBODY,
    Deal,
    assign_alike,
    compress,
    positions_of,
    require_alpha,
    require_enough,
    require_whole,
)
from tailorfl.partition.rows import Ints

KINDS = ("iid", "dirichlet", "labels")
_DRAWS = 1000


def sorted_shards(
    strata: Ints, clients: int, rng: Generator, *, test: Ints | None = None, shards: int = 2
) -> Deal:
    """Sort the samples by class, cut them into equal shards and give every client `shards` of them.

    The rule of McMahan et al. (2017). A shard may hold two classes, so a client may hold more classes than shards.
    The test part is sorted and cut alike, and a client gets the shards of the same numbers.

    Args:
        strata: `[samples]` int64 class of each sample.
        clients: number of clients.
        rng: source of randomness.
        test: `[test samples]` int64 class of each sample of the official test part.
        shards: shards per client.

    Raises:
        DataError: if there are fewer samples than shards.
    """
    require_whole("shards", shards, 1)
    require_enough(len(strata), clients, shards, "shards")
    client_of_shard = np.empty(clients * shards, dtype=np.int64)
    client_of_shard[rng.permutation(clients * shards)] = np.repeat(np.arange(clients), shards)
    test_owner = None if test is None else _by_shard(test, client_of_shard)
    return Deal.of(_by_shard(strata, client_of_shard), test_owner, clients)


def niid_bench(
    strata: Ints,
    clients: int,
    rng: Generator,
    *,
    test: Ints | None = None,
    kind: str = "labels",
    classes: int = 2,
    alpha: float = 0.5,
    min_size: int = 10,
    seed: int | None = None,
) -> Deal:
    """Deal samples as Flower's baseline niid_bench does (Li et al., ICDE 2022), in its order of random draws.

    - "iid": all samples in random order, cut into nearly equal parts.
    - "dirichlet": class by class in Dirichlet(`alpha`) shares among the clients that hold fewer than samples / clients;
      redrawn until every client has `min_size` samples. PFLlib does likewise with 1 (Zhang et al., JMLR 2025).
    - "labels": client i holds class i and `classes` - 1 others drawn at random; the clients that hold a class share it
      in nearly equal parts.

    The test part is dealt in the proportions of the training part.

    Args:
        strata: `[samples]` int64 class of each sample.
        clients: number of clients.
        rng: source of randomness if there is no `seed`, and for dealing a test part.
        test: `[test samples]` int64 class of each sample of the official test part.
        kind: "iid", "dirichlet" or "labels".
        classes: for "labels": distinct classes per client. Classes that nobody holds are left out.
        alpha: for "dirichlet": concentration.
        min_size: smallest number of training samples of a client.
        seed: seed of NumPy's default generator for the training part, 42 in the baseline.

    Raises:
        ConfigError: for an unknown kind.
        DataError: if there are fewer classes than that, too few samples, or no draw gives everybody enough.
    """
    check_known("kind of partition 'niid_bench'", str(kind), KINDS)
    if seed is not None:
        require_whole("seed", seed, 0)
    require_whole("min_size", min_size, 1)
    require_enough(len(strata), clients, min_size)
    draws = rng if seed is None else np.random.default_rng(seed)
    ids, test_ids, count = compress(strata, test)
    if kind == "iid":
        owner = np.empty(len(ids), dtype=np.int64)
        order = draws.choice(len(ids), len(ids), replace=False)
        owner[order] = _parts(len(ids), np.arange(clients))
    elif kind == "dirichlet":
        owner = _dirichlet(ids, clients, alpha, min_size, draws)
    else:
        owner = _labels(ids, clients, classes, draws)
    if np.bincount(owner[owner != NOBODY], minlength=clients).min() < min_size:
        raise DataError(
            f"partition 'niid_bench' found no division that gives each of {clients} clients min_size={min_size} "
            "samples; use fewer clients, a larger alpha or a smaller min_size"
        )
    return Deal.of(owner, assign_alike(test_ids, owner, ids, count, clients, rng), clients)


def _by_shard(labels: Ints, client_of_shard: Ints) -> Ints:
    owner = np.empty(len(labels), dtype=np.int64)
    owner[np.argsort(labels, kind="stable")] = _parts(len(labels), client_of_shard)
    return owner


def _parts(samples: int, owners: Ints) -> Ints:
    """Return `[samples]` owners of consecutive nearly equal parts, the larger ones first."""
    smaller, larger = divmod(samples, len(owners))
    return np.repeat(owners, np.where(np.arange(len(owners)) < larger, smaller + 1, smaller))


def _dirichlet(ids: Ints, clients: int, alpha: float, min_size: int, draws: Generator) -> Ints:
    """Return the owners of the first draw that gives everybody enough; if there is none, client 0 for all samples."""
    require_alpha(alpha)
    owner = np.empty(len(ids), dtype=np.int64)
    for _ in range(_DRAWS):
        sizes = np.zeros(clients, dtype=np.int64)
        for label in range(int(ids.max()) + 1):
            positions = np.flatnonzero(ids == label)
            draws.shuffle(positions)
            shares = draws.dirichlet(np.full(clients, alpha)) * (sizes < len(ids) / clients)
            if not shares.sum() > 0:  # all of the class would go to clients that have enough
                break
            cuts = (np.cumsum(shares / shares.sum()) * len(positions)).astype(np.int64)[:-1]
            counts = np.diff(cuts, prepend=0, append=len(positions))
            owner[positions] = np.repeat(np.arange(clients), counts)
            sizes += counts
        else:
            if sizes.min() >= min_size:
                return owner
    return np.zeros(len(ids), dtype=np.int64)


def _labels(ids: Ints, clients: int, classes: int, draws: Generator) -> Ints:
    require_whole("classes", classes, 1)
    count = int(ids.max()) + 1
    if classes > count:
        raise DataError(
            f"partition 'niid_bench' cannot give every client {classes} classes: the data have {count}; use a smaller "
            "'classes'"
        )
    holders = np.zeros((count, clients), dtype=bool)
    for client in range(clients):
        holders[client % count, client] = True
        while holders[:, client].sum() < classes:
            holders[draws.choice(count, 1)[0], client] = True
    owner = np.full(len(ids), NOBODY, dtype=np.int64)
    for label in range(count):
        positions = np.flatnonzero(ids == label)
        draws.shuffle(positions)
        if holders[label].any():
            owner[positions] = _parts(len(positions), np.flatnonzero(holders[label]))
    return owner


COLUMN = "label"
"""The name of the column of classes for partitioners."""
_NOT_OURS = ("Partitioner", "IdToSizeFncPartitioner")


def flwr(
    strata: Ints,
    clients: int,
    rng: Generator,
    *,
    test: Ints | None = None,
    partitioner: str = "DirichletPartitioner",
    options: Mapping[str, Any] = {},
) -> Deal:
    """Deal samples with a partitioner of Flower Datasets.

    `data.partition: {flwr: DirichletPartitioner, alpha: 0.3}` is the short form. The partitioner gets the classes as
    column "label", the number of clients, and a seed drawn from that of the data, each only if it takes it and
    `options` do not set it. It deals only the training part.

    Args:
        strata: `[samples]` int64 class of each sample.
        clients: number of clients; partitioners with given sizes have as many clients as sizes.
        rng: source of the seed.
        test: refused.
        partitioner: name of a partitioner class of Flower Datasets.
        options: arguments of the partitioner.

    Raises:
        ConfigError: no such partitioner, or one that splits columns, or unknown arguments.
        DataError: samples that the partitioner does not accept, a client without samples or with those of another
            client, or an official test part that would have to be dealt too.
        MissingExtraError: if `flwr-datasets` is not installed.
    """
    if test is not None:
        raise DataError(
            "a partitioner of Flower Datasets divides only one part, but the source also has an official test part; "
            "test on all of it (data.split={test: global}) or on a share of the training part (data.split={test: 0.2})"
        )
    flower_partitioner = make_partitioner(partitioner, clients, int(rng.integers(2**31)), options)
    import datasets

    rows = datasets.Dataset.from_dict({COLUMN: strata, "row": np.arange(len(strata))})
    owner = np.full(len(strata), NOBODY, dtype=np.int64)
    try:
        flower_partitioner.dataset = rows
        number = flower_partitioner.num_partitions
        for client in range(number):
            client_rows = np.asarray(flower_partitioner.load_partition(client)["row"][:], dtype=np.int64)
            if len(client_rows) == 0 or (owner[client_rows] != NOBODY).any():
                problem = "no samples" if len(client_rows) == 0 else "samples of another client"
                raise DataError(f"partitioner '{partitioner}' gives client {client} {problem}")
            owner[client_rows] = client
    except (ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise DataError(f"partitioner '{partitioner}' cannot deal these samples: {error}") from error
    return Deal(positions_of(owner, number))


def make_partitioner(name: str, clients: int, seed: int, options: Mapping[str, Any]) -> Any:
    """Return the partitioner `name` with `options` and the arguments that it takes from `flwr`.

    Raises ConfigError and MissingExtraError as `flwr`.
    """
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # the package would report its use to its makers
    with needs_extra("flwr-datasets", "flwr-data"):
        from flwr_datasets import partitioner as theirs
    known_names = [
        each for each in theirs.__all__ if each not in _NOT_OURS and not each.startswith("Vertical")
    ]
    check_known("partitioner of Flower Datasets", name, known_names)
    function = getattr(theirs, name)
    takes = [option for option in inspect.signature(function.__init__).parameters if option != "self"]
    for option in options:
        check_known(f"option of partitioner '{name}'", option, takes)
    if options.get("partition_by", COLUMN) != COLUMN:
        raise ConfigError(
            f"partitioner '{name}' divides by the classes (column '{COLUMN}'), so partition_by cannot be "
            f"{options['partition_by']!r}; for one client per value of a column, set data.partition=natural"
        )
    ours = {"num_partitions": clients, "partition_by": COLUMN, "seed": seed}
    arguments = {key: value for key, value in ours.items() if key in takes} | dict(options)
    try:
        if "distribution_array" in arguments:
            arguments["distribution_array"] = np.asarray(arguments["distribution_array"])
        return function(**arguments)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"partitioner '{name}' does not take {dict(options)}: {error}") from error
