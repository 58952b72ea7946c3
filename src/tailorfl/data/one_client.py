"""A client that has only its own table: its training, validation and test rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tailorfl.data.build import stream
from tailorfl.data.columns import class_names
from tailorfl.data.constants import Constants
from tailorfl.data.rows import Ints, Rows
from tailorfl.data.source import strata_of
from tailorfl.data.splits import Split, split_clients
from tailorfl.data.summaries import CLASSES, Roles
from tailorfl.errors import DataError

if TYPE_CHECKING:
    import pandas as pd  # at run time only where tables are read: it takes 60 MB


def own_rows(
    client: int, sizes: Sequence[int], strata: Ints, rule: Split, seed: int
) -> tuple[Ints, Ints, Ints]:
    """Train, val and test rows of one client, int64, ascending, counted from 0 in its own table.

    They are those that `tailorfl.data.build.build` gives it in the whole federation, where clients are files of a
    folder (one each, in the order of their names), none is held out and no samples are set apart. A cut depends on the
    row numbers, the sizes and the seed of all, but on nobody's labels but a client's own.

    Args:
        client: its number, counted from 0.
        sizes: rows of every client's table, in the order of the clients.
        strata: `[sizes[client]]` int64, of its own rows, numbered in any way that keeps their order: the class among
            its own classes, see `own_strata`.
        rule: what becomes of samples, see `tailorfl.data.splits.read_split`.
        seed: of the data, `DataConfig.seed_of(seed of the run)`.

    Raises:
        DataError: there is no such client, its labels are not as many as its rows, a client has no rows, or test
            samples are to come from an official test part.
    """
    rows = np.asarray(sizes, dtype=np.int64)
    if not 0 <= client < len(rows) or (rows < 1).any():
        raise DataError(
            f"client {client} of clients with {rows.tolist()[:20]} rows: each has some, and it is one of them"
        )
    if len(strata) != rows[client]:
        raise DataError(f"client {client} has {rows[client]} rows, but labels of {len(strata)}")
    if rule.source != "client":
        raise DataError(
            "an official test part is dealt with all clients' rows at hand; give a share of test rows"
        )
    everyone = Rows.cut(np.arange(rows.sum()), rows)
    known = np.zeros(rows.sum(), dtype=np.int64)
    known[everyone[client]] = strata
    rng = stream(seed, "split")
    parts = split_clients(everyone, known, rule.shares(len(rows), rng), rng)
    train, val, test = (part[client] - everyone.starts[client] for part in parts)
    return train, val, test


def own_strata(frame: pd.DataFrame, roles: Roles, name: str = "table") -> Ints:
    """`[rows]` int64 labels by which a client's rows are balanced, of its own table.

    Raises:
        DataError: the label is missing or not as the task has it; `name` is the client's, for messages.
    """
    classes = class_names(name, frame, roles.label, roles.na_values) if roles.task in CLASSES else ()
    y = Constants(roles=roles, columns={}, classes=classes).targets(frame, name)
    strata: Ints = strata_of(y, roles.task).numpy()
    return strata
