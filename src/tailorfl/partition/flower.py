"""The partitioners of Flower Datasets (`flwr-datasets`), by their own names and options."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.random import Generator

from tailorfl.errors import ConfigError, DataError, MissingExtraError, check_known
from tailorfl.partition.deal import NOBODY, Deal, positions_of
from tailorfl.partition.rows import Ints

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

    `data.partition: {flwr: DirichletPartitioner, alpha: 0.3}` is the short form. It is given the classes as the
    column "label", the number of clients, and a seed drawn from that of the data, each only where it takes it and
    `options` have none. It deals the training part alone.

    Args:
        strata: `[samples]` int64 class of each sample.
        clients: number of clients; partitioners that are given sizes have as many as there are sizes.
        rng: source of the seed.
        test: refused.
        partitioner: name of a partitioner class of Flower Datasets.
        options: arguments of the partitioner.

    Raises:
        ConfigError: no such partitioner, or one that splits columns, or unknown arguments.
        DataError: what the partitioner does not accept, a client without samples, or an official test part that
            would have to be dealt too.
        MissingExtraError: if `flwr-datasets` is not installed.
    """
    if test is not None:
        raise DataError(
            "a partitioner of Flower Datasets deals one part, and the source has an official test part too; test on "
            "all of it (data.split={test: global}) or on a share of the training part (data.split={test: 0.2})"
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
    """Return the partitioner `name` with these arguments, and those that it takes beside them.

    Raises as `flwr`.
    """
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # the package would tell its makers of its use
    try:
        from flwr_datasets import partitioner as theirs
    except ImportError as missing:
        raise MissingExtraError("flwr-datasets", "flwr-data") from missing
    known_names = [
        option_name
        for option_name in theirs.__all__
        if option_name not in _NOT_OURS and not option_name.startswith("Vertical")
    ]
    check_known("partitioner of Flower Datasets", name, known_names)
    function = getattr(theirs, name)
    takes = [
        option_name
        for option_name in inspect.signature(function.__init__).parameters
        if option_name != "self"
    ]
    for option in options:
        check_known(f"option of partitioner '{name}'", option, takes)
    if options.get("partition_by", COLUMN) != COLUMN:
        raise ConfigError(
            f"partitioner '{name}' is given classes as the column '{COLUMN}', so partition_by cannot be "
            f"{options['partition_by']!r}; clients of a column are data.partition=natural"
        )
    ours = {"num_partitions": clients, "partition_by": COLUMN, "seed": seed}
    arguments = {key: value for key, value in ours.items() if key in takes} | dict(options)
    try:
        return function(**{key: _array(key, value) for key, value in arguments.items()})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"partitioner '{name}' does not take {dict(options)}: {error}") from error


def _array(key: str, value: Any) -> Any:
    return np.asarray(value) if key in ("distribution_array",) else value
