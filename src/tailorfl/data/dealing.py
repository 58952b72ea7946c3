"""Select the rows of a source that are used, and deal them to training and held-out clients and domains.

Clients that joined a deployment one after another are numbered in that order, and each made its own split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from tailorfl.data.federation import Federation, client_number
from tailorfl.data.folder import channel_statistics
from tailorfl.data.preparation import GIVEN, given_digest
from tailorfl.data.scaling import PRIVATE_SCALING
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, DataError, check_known, unknown
from tailorfl.partition import partition, recipe_named
from tailorfl.partition.rows import Ints, Rows
from tailorfl.partition.splits import SplitRule, evenly_spaced, own_rows, random_starts
from tailorfl.printable import shown


@dataclass(frozen=True)
class Dealt:
    """Rows of a source dealt to clients, before each client's rows are split.

    Attributes:
        rows: per client int64 rows of the training part.
        test: per client int64 rows of the official test part; None if it is not dealt.
        names: name of every client.
        num_clients: number of training clients, which come first; the others are held out.
        server: int64 rows that the server keeps.
    """

    rows: Rows
    test: Rows | None
    names: tuple[str, ...]
    num_clients: int
    server: Ints

    def ordered(self, order: Ints, num_clients: int) -> Dealt:
        """Return the clients in the order `order`; the first `num_clients` of them train."""
        return replace(
            self,
            rows=self.rows.of_clients(order),
            test=None if self.test is None else self.test.of_clients(order),
            names=tuple(map(self.names.__getitem__, order.tolist())),
            num_clients=num_clients,
        )

    def with_heldout(self, name: str, rows: Ints, test: Ints) -> Dealt:
        """Return the deal with one more held-out client."""
        return replace(
            self,
            rows=self.rows.with_client(rows),
            test=None if self.test is None else self.test.with_client(test),
            names=(*self.names, name),
        )


def set_aside(
    dealt: Dealt, heldout: int | Sequence[str], keep: int | None, natural: bool, rng: Generator
) -> Dealt:
    """Return `dealt` with the held-out clients last.

    Args:
        dealt: clients, all of them training.
        heldout: how many clients to hold out, or their names.
        keep: number of training clients, drawn at random from those not named; None: all.
        natural: whether clients differ in kind; if so, a number of held-out clients is drawn at random. Clients dealt
            at random do not differ before the deal, so the last ones are taken.
        rng: source of randomness.

    Raises:
        ConfigError: if a name is unknown or nobody is left to train.
    """
    total = len(dealt.names)
    if isinstance(heldout, int):
        chosen = np.arange(total - heldout, total)
        if natural:
            chosen = np.sort(rng.choice(total, size=min(heldout, total), replace=False))
        away = [int(i) for i in chosen]
    else:
        for name in heldout:
            check_known("held-out client", name, dealt.names)
        away = [dealt.names.index(name) for name in dict.fromkeys(heldout)]
    if not away and keep is None:
        return dealt
    staying = np.setdiff1d(np.arange(total), away, assume_unique=True)
    if len(staying) < (keep or 1):
        raise ConfigError(
            f"{len(away)} of {total} clients are held out, which leaves {len(staying)} to train, fewer than "
            f"the {keep or 1} needed; hold out fewer"
        )
    if keep is not None:
        staying = np.sort(rng.choice(staying, size=keep, replace=False))
    return dealt.ordered(np.concatenate([staying, np.array(away, dtype=np.int64)]), len(staying))


def domain_rows(source: Source, names: Sequence[str]) -> dict[str, Ints]:
    """Return the int64 rows of each named domain; looked up in group `domain` first, never in `client`.

    Raises:
        ConfigError: if no group has that name.
        DataError: if the source has no such groups.
    """
    kinds = sorted((kind for kind in source.groups if kind != "client"), key=lambda kind: kind != "domain")
    if names and not kinds:
        raise DataError(f"source '{source.name}' has no domains, so none can be held out")
    rows_of: dict[str, Ints] = {}
    for name in names:
        kind = next((kind for kind in kinds if name in source.group_names[kind]), None)
        if kind is None:
            raise unknown(
                "domain", name, [known_name for kind in kinds for known_name in source.group_names[kind]]
            )
        ids = source.groups[kind].numpy()
        rows_of[name] = np.flatnonzero(ids == source.group_names[kind].index(name))
    return rows_of


def to_be_tested(source: Source, rows: Ints) -> Ints:
    """Return the official test samples among the int64 `rows` of a held-out domain; all of them if there are none.

    A held-out client adapts on the training samples of the domain.
    """
    official = rows[official_part(source)[rows]]
    return official if len(official) else rows


DEFAULT_CLIENTS = 20
DEFAULT_BINS = 10
"""Number of bins, equal in samples, into which numeric targets are put for partitions that deal classes."""


def official_part(source: Source) -> NDArray[np.bool_]:
    """Return `[samples]` bool, True in the official test part; all False if there is none."""
    if source.test is None:
        return np.zeros(len(source), dtype=bool)
    mask: NDArray[np.bool_] = source.test.numpy()
    return mask


def capped(source: Source, samples: int | None, rng: Generator) -> Ints:
    """Return the rows in use, ascending: all, or `samples`, evenly over test part, natural clients and strata."""
    if samples is None or samples >= len(source):
        return np.arange(len(source))
    natural = source.groups.get("client", torch.zeros(len(source))).numpy()
    noise = rng.random(len(source))
    order = np.lexsort((noise, source.strata.numpy(), natural, official_part(source)))
    start = random_starts(np.array([len(source)]), rng)
    chosen = evenly_spaced(np.zeros(len(source), dtype=np.int64), np.array([samples]), start)
    return np.sort(order[chosen])


def fitting_partition(source: Source) -> str:
    """Return the name of the partition that suits a source: along its own clients or domains, else "dirichlet"."""
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
    """Deal rows by a partition, held-out clients last.

    Args:
        source: the samples.
        rows: int64 rows in use.
        recipe: name of the partition.
        options: its options, `group` for partitions along groups, and for a regression `bins` for those of classes.
        clients: number of training clients; None: every group, or 20 for partitions without groups.
        heldout: number of further clients that never train, or their names.
        deal_test: whether the official test part is dealt too, by the same recipe.
        streams: randomness of the partition and of the choice of held-out clients.

    Raises:
        ConfigError: for unknown settings.
        DataError: if the source lacks the groups, or cannot be dealt as requested.
    """
    extra = heldout if isinstance(heldout, int) else len(set(heldout))
    labels, names, options = _labels(source, recipe, options)
    if names is None and clients is None:
        clients = DEFAULT_CLIENTS
    draw_later = recipe == "natural" and not isinstance(heldout, int)  # named clients must survive the draw
    official = official_part(source)[rows]
    train_rows, test_rows = rows[~official], rows[official]
    if len(test_rows) and not len(train_rows):
        raise DataError(
            f"source '{source.name}' has only test samples; add training samples (of instructions, files that do not "
            "end in _test)"
        )
    deal = partition(
        recipe,
        labels[train_rows],
        None if clients is None or draw_later else clients + extra,
        streams[0],
        test=labels[test_rows] if deal_test else None,
        options=options,
    )
    client_rows = deal.train.named_by(train_rows)
    dealt = Dealt(
        rows=client_rows,
        test=None if deal.test is None else deal.test.named_by(test_rows),
        names=_numbered(len(client_rows)) if names is None else _group_names(client_rows, labels, names),
        num_clients=len(client_rows),
        server=train_rows[deal.server],
    )
    return set_aside(dealt, heldout, clients if draw_later else None, names is not None, streams[1])


def _labels(
    source: Source, recipe: str, options: Mapping[str, Any]
) -> tuple[Ints, tuple[str, ...] | None, dict[str, Any]]:
    """Return the strata, bins or groups that the recipe deals by, the names if groups, and the recipe's own options."""
    recipe_options = dict(options)
    kind = recipe_named(recipe).group
    if kind is None:
        if recipe_named(recipe).classes and source.task in ("regression", "counts"):
            return _binned(source, recipe_options.pop("bins", DEFAULT_BINS)), None, recipe_options
        return source.strata.numpy(), None, recipe_options
    kind = recipe_options.pop("group", kind)
    if kind not in source.groups:
        have = ", ".join(f"'{group_kind}'" for group_kind in source.groups) or "none"
        raise DataError(
            f"partition '{recipe}' needs groups of kind '{kind}', but source '{source.name}' has {have}; use another "
            "partition such as 'dirichlet', or set partition_options.group to a kind that it has"
        )
    return source.groups[kind].numpy(), source.group_names[kind], recipe_options


def _binned(source: Source, bins: Any) -> Ints:
    """Return `[samples]` int64 bin of the first target, equally many samples in each as far as equal targets allow."""
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
    """Return the name of each client's group, numbered where several clients share a group."""
    ids = groups[rows.values[rows.starts]].tolist()
    if len(set(ids)) == len(ids):
        return tuple(map(names.__getitem__, ids))
    last_number: dict[int, int] = {}
    client_names = []
    for group in ids:
        last_number[group] = last_number.get(group, -1) + 1
        client_names.append(f"{names[group]}-{last_number[group]}")
    return tuple(client_names)


def in_turn(joined: Sequence[Sequence[str]], names: Sequence[str], all_of_them: bool) -> Ints:
    """Return the numbers of clients in the order in which they joined a deployment.

    Args:
        joined: their names, in groups that joined at once.
        names: of the clients in the data.
        all_of_them: whether the data may hold no other clients.

    Returns:
        int64; empty if all were there from the start, so that they have the order of the data.

    Raises:
        ConfigError: the data lack a client, or hold others although they may not.
    """
    listed = [name for group in joined for name in group]
    if len(joined) < 2 and len(listed) in (0, len(names)):
        return np.empty(0, dtype=np.int64)
    order = np.array([client_number(names, name) for name in listed], dtype=np.int64)
    absent = [name for number, name in enumerate(names) if number not in order]
    if all_of_them and absent:
        raise ConfigError(
            f"the trace has {len(order)} clients, but the data also have {', '.join(absent[:10])}; move the files of "
            "clients that took no part to another folder"
        )
    return order


def without_clients(
    federation: Federation, names: Sequence[str], dealt: Dealt, founders: Sequence[str] | None
) -> Federation:
    """Return the federation without these clients, leaving their and held-out images out of the channel statistics.

    Args:
        federation: of all clients.
        names: of the clients to leave out, or their numbers if no client has such a name.
        dealt: the rows of each client, before they were split.
        founders: clients whose images give the channel statistics; None: all training images of the source.

    Raises:
        ConfigError: one of them is not a training client, or nobody is left.
    """
    names = [federation.names[client_number(federation.names, name)] for name in names]
    remaining, source = federation.without(names), federation.source
    if source.mean is None or PRIVATE_SCALING not in source.info:
        return remaining
    rows = {name: dealt.rows[dealt.names.index(name)] for name in (*names, *(founders or ()))}
    unused = np.concatenate([dealt.rows[dealt.num_clients :].flat(), *(rows[name] for name in names)])
    if not len(unused):
        return remaining
    fitted = np.flatnonzero(~official_part(source))
    if founders is not None:
        fitted = np.concatenate([rows[name] for name in founders])
    mean, std = channel_statistics(source.x[torch.from_numpy(np.setdiff1d(fitted, unused))])
    # of the given data: held-out clients, and so the statistics, differ by seed
    info = {**source.info, GIVEN: given_digest(source)}
    return replace(remaining, source=replace(source, mean=mean, std=std, info=info))


def split_in_turn(
    source: Source, dealt: Dealt, joined: Sequence[Sequence[str]], rule: SplitRule, seed: int
) -> Federation:
    """Return a federation of clients with their own files, each split knowing only the clients joined by then.

    Args:
        source: the samples of all; images are scaled by the statistics of the first group.
        dealt: the rows of all, in the order in which they joined.
        joined: their names, in groups that joined at once.
        rule: see `tailorfl.partition.splits.read_split`.
        seed: of the data.
    """
    sizes, strata = dealt.rows.sizes.tolist(), source.strata.numpy()
    groups = [len(group) for group in joined]
    joined_by_then = np.repeat(np.cumsum(groups), groups).tolist()
    cut = [
        own_rows(client, sizes[: joined_by_then[client]], strata[rows], rule, seed)
        for client, rows in enumerate(dealt.rows)
    ]
    train, val, test = (
        Rows.of([rows[parts[k]] for rows, parts in zip(dealt.rows, cut, strict=True)]) for k in range(3)
    )
    if source.mean is not None and PRIVATE_SCALING in source.info:
        mean, std = channel_statistics(source.x[dealt.rows[: groups[0]].flat()])
        source = replace(source, mean=mean, std=std)
    return Federation(source, train, val, test, dealt.names, dealt.num_clients)
