"""Which rows of a source are in use, and how they are dealt to training and held-out clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from tailorfl.data.heldout import Dealt, set_aside
from tailorfl.data.partition import partition, recipe_named
from tailorfl.data.rows import Ints, Rows
from tailorfl.data.source import Source
from tailorfl.data.splits import evenly_spaced, random_starts
from tailorfl.errors import ConfigError, DataError
from tailorfl.printable import shown

DEFAULT_CLIENTS = 20
DEFAULT_BINS = 10
"""Of equally many samples, into which numbers to be predicted are put for partitions that deal classes."""


def official_part(source: Source) -> NDArray[np.bool_]:
    """`[samples]` bool, True in the official test part; all False where there is none."""
    if source.test is None:
        return np.zeros(len(source), dtype=bool)
    mask: NDArray[np.bool_] = source.test.numpy()
    return mask


def capped(source: Source, samples: int | None, rng: Generator) -> Ints:
    """Ascending rows in use: all, or `samples` of them, evenly over test part, natural clients and strata.

    Raises:
        ConfigError: if `samples` is below 1.
    """
    if samples is None or samples >= len(source):
        return np.arange(len(source))
    if samples < 1:
        raise ConfigError(f"samples must be at least 1, but is {samples}")
    natural = source.groups.get("client", torch.zeros(len(source))).numpy()
    noise = rng.random(len(source))
    order = np.lexsort((noise, source.strata.numpy(), natural, official_part(source)))
    start = random_starts(np.array([len(source)]), rng)
    chosen = evenly_spaced(np.zeros(len(source), dtype=np.int64), np.array([samples]), start)
    return np.sort(order[chosen])


def fitting_partition(source: Source) -> str:
    """The name of the partition that suits a source: along its own clients or domains, else "dirichlet"."""
    if "client" in source.groups:
        return "natural"
    return "domain" if "domain" in source.groups else "dirichlet"


def deal_rows(
    source: Source,
    rows: Ints,
    recipe: str,
    options: Mapping[str, Any],
    *,
    clients: int | None,
    heldout: int | Sequence[str],
    deal_test: bool,
    streams: tuple[Generator, Generator],
) -> Dealt:
    """Rows dealt by a partition, held-out clients last.

    Args:
        source: the samples.
        rows: int64 rows in use.
        recipe: name of the partition.
        options: its options, `group` for partitions along groups, and for a regression `bins` for those of classes.
        clients: number of training clients; None: every group, or 20 for partitions without groups.
        heldout: how many more clients never train, or the names of those.
        deal_test: whether the official test part is dealt too, by the same recipe.
        streams: randomness of the partition and of who is held out.

    Raises:
        ConfigError: for unknown settings.
        DataError: if the source lacks the groups, or cannot be dealt as asked.
    """
    extra = _heldout_count(heldout)
    labels, names, options = _labels(source, recipe, options)
    if names is None and clients is None:
        clients = DEFAULT_CLIENTS
    draw_later = recipe == "natural" and not isinstance(
        heldout, int
    )  # the named must not be lost in the draw
    official = official_part(source)[rows]
    train_rows, test_rows = rows[~official], rows[official]
    deal = partition(
        recipe,
        labels[train_rows],
        None if clients is None or draw_later else clients + extra,
        streams[0],
        test=labels[test_rows] if deal_test else None,
        options=options,
    )
    mine = deal.train.named_by(train_rows)
    dealt = Dealt(
        rows=mine,
        test=None if deal.test is None else deal.test.named_by(test_rows),
        names=_numbered(len(mine)) if names is None else _group_names(mine, labels, names),
        num_clients=len(mine),
        server=train_rows[deal.server],
    )
    return set_aside(dealt, heldout, clients if draw_later else None, names is not None, streams[1])


def _heldout_count(heldout: int | Sequence[str]) -> int:
    if isinstance(heldout, (bool, str)) or (isinstance(heldout, int) and heldout < 0):
        raise ConfigError(
            f"heldout_clients must be a number of at least 0 or a list of client names, but is {shown(heldout)}"
        )
    return heldout if isinstance(heldout, int) else len(set(heldout))


def _labels(
    source: Source, recipe: str, options: Mapping[str, Any]
) -> tuple[Ints, tuple[str, ...] | None, dict[str, Any]]:
    """What the recipe looks at, the names of groups if it goes along groups, and the recipe's own options."""
    left = dict(options)
    kind = recipe_named(recipe).group
    if kind is None:
        if recipe_named(recipe).classes and source.task in ("regression", "counts"):
            return _binned(source, left.pop("bins", DEFAULT_BINS)), None, left
        return source.strata.numpy(), None, left
    kind = left.pop("group", kind)
    if kind not in source.groups:
        have = ", ".join(f"'{known}'" for known in source.groups) or "none"
        raise DataError(
            f"partition '{recipe}' needs groups of kind '{kind}', but source '{source.name}' has {have}; use "
            "another partition such as 'dirichlet', or name a kind it has in partition_options.group"
        )
    return source.groups[kind].numpy(), source.group_names[kind], left


def _binned(source: Source, bins: Any) -> Ints:
    """`[samples]` int64 bin of the first target, equally many samples in each as far as equal targets allow."""
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 2:
        raise ConfigError(
            f"partition option 'bins' must be a whole number of at least 2, but is {shown(bins)}"
        )
    target = source.y[:, 0].double().numpy()
    edges = np.unique(np.quantile(target, np.arange(1, bins) / bins))
    return np.searchsorted(edges, target, side="right").astype(np.int64)


def _numbered(clients: int) -> tuple[str, ...]:
    width = len(str(clients - 1))
    return tuple(f"client-{client:0{width}d}" for client in range(clients))


def _group_names(rows: Rows, groups: Ints, names: Sequence[str]) -> tuple[str, ...]:
    """The name of each client's group, numbered where several clients share a group."""
    ids = groups[rows.values[rows.starts]].tolist()
    if len(set(ids)) == len(ids):
        return tuple(map(names.__getitem__, ids))
    seen: dict[int, int] = {}
    found = []
    for group in ids:
        seen[group] = seen.get(group, -1) + 1
        found.append(f"{names[group]}-{seen[group]}")
    return tuple(found)
