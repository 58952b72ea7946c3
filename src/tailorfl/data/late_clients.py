"""Clients of a deployment that joined one after another: their numbers, and the split that each made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tailorfl.data.dealing import Dealt
from tailorfl.data.federation import Federation
from tailorfl.data.rows import Ints, Rows
from tailorfl.data.scaling import PRIVATE_SCALING
from tailorfl.data.source import Source
from tailorfl.data.splits import SplitRule, own_rows
from tailorfl.errors import ConfigError, unknown


def client_number(names: Sequence[str], name: str) -> int:
    """Return the number of the client that calls itself `name`: by its name in the data, or by its number there.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name in names:
        return list(names).index(name)
    if name.isdecimal() and int(name) < len(names):
        return int(name)
    raise unknown("client", name, list(names))


def in_turn(joined: Sequence[Sequence[str]], names: Sequence[str], all_of_them: bool) -> Ints:
    """Return the numbers of clients in the order in which they joined a deployment.

    Args:
        joined: their names, in groups that joined at once.
        names: of the clients in the data.
        all_of_them: whether the data must be of nobody else.

    Returns:
        int64; nothing where all were there from the start, so that they have the order of the data.

    Raises:
        ConfigError: the data lack a client, or are of another one too.
    """
    listed = [name for group in joined for name in group]
    if len(joined) < 2 and len(listed) in (0, len(names)):
        return np.empty(0, dtype=np.int64)
    order = np.array([client_number(names, name) for name in listed], dtype=np.int64)
    others = [name for number, name in enumerate(names) if number not in order]
    if all_of_them and others:
        raise ConfigError(
            f"the trace is of {len(order)} clients, but the data are of {', '.join(others[:10])} too; move the files "
            "of those who took no part elsewhere"
        )
    return order


def split_in_turn(
    source: Source, dealt: Dealt, joined: Sequence[Sequence[str]], rule: SplitRule, seed: int
) -> Federation:
    """Return a federation of clients with files of their own, split as each did that knew only those before it.

    Args:
        source: the samples of all, in which images are scaled by those of the first group.
        dealt: the rows of all, in the order in which they joined.
        joined: their names, in groups that joined at once.
        rule: see `tailorfl.data.splits.read_split`.
        seed: of the data.
    """
    sizes, strata = dealt.rows.sizes.tolist(), source.strata.numpy()
    groups = [len(group) for group in joined]
    known = np.repeat(np.cumsum(groups), groups).tolist()
    cut = [
        own_rows(client, sizes[: known[client]], strata[rows], rule, seed)
        for client, rows in enumerate(dealt.rows)
    ]
    train, val, test = (
        Rows.of([rows[parts[k]] for rows, parts in zip(dealt.rows, cut, strict=True)]) for k in range(3)
    )
    if source.mean is not None and PRIVATE_SCALING in source.info:
        from tailorfl.data.folder import channel_statistics

        mean, std = channel_statistics(source.x[dealt.rows[: groups[0]].flat()])
        source = replace(source, mean=mean, std=std)
    return Federation(source, train, val, test, dealt.names, dealt.num_clients)
