"""Clients and domains that never train: they show how well a method serves those who come later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator

from tailorfl.data.rows import Ints, Rows
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, DataError, unknown


@dataclass(frozen=True)
class Dealt:
    """Rows of a source dealt to clients, before each client's are split.

    Attributes:
        rows: per client int64 rows out of the training part.
        test: per client int64 rows out of the official test part; None where it is not dealt.
        names: name of every client.
        num_clients: the first so many clients train, the others are held out.
        server: int64 rows that the server keeps.
    """

    rows: Rows
    test: Rows | None
    names: tuple[str, ...]
    num_clients: int
    server: Ints

    def ordered(self, order: Ints, num_clients: int) -> Dealt:
        """The clients `order`, in this order, of which the first `num_clients` train."""
        return replace(
            self,
            rows=self.rows.of_clients(order),
            test=None if self.test is None else self.test.of_clients(order),
            names=tuple(map(self.names.__getitem__, order.tolist())),
            num_clients=num_clients,
        )

    def with_heldout(self, name: str, rows: Ints, test: Ints) -> Dealt:
        """One more held-out client."""
        return replace(
            self,
            rows=self.rows.with_client(rows),
            test=None if self.test is None else self.test.with_client(test),
            names=(*self.names, name),
        )


def set_aside(
    dealt: Dealt, heldout: int | Sequence[str], keep: int | None, natural: bool, rng: Generator
) -> Dealt:
    """`dealt` with the held-out clients last.

    Args:
        dealt: clients, all of them training.
        heldout: how many clients to hold out, or their names.
        keep: number of training clients, drawn at random from those not named; None: all.
        natural: whether clients differ in kind, so that a number of held-out ones must be drawn at random.
            Clients dealt by chance are alike before the deal, and the last ones are taken.
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
            if name not in dealt.names:
                raise unknown("held-out client", name, dealt.names)
        away = [dealt.names.index(name) for name in dict.fromkeys(heldout)]
    if not away and keep is None:
        return dealt
    staying = np.setdiff1d(np.arange(total), away, assume_unique=True)
    if len(staying) < max(1, keep or 1):
        raise ConfigError(
            f"{len(away)} of {total} clients are held out, which leaves {len(staying)} to train, fewer than "
            f"the {keep or 1} needed; hold out fewer"
        )
    if keep is not None:
        staying = np.sort(rng.choice(staying, size=keep, replace=False))
    return dealt.ordered(np.concatenate([staying, np.array(away, dtype=np.int64)]), len(staying))


def domain_rows(source: Source, names: Sequence[str]) -> dict[str, Ints]:
    """For each domain name its int64 rows; looked up in group `domain` first, never in `client`.

    Raises:
        ConfigError: if no group has that name.
        DataError: if the source has no such groups.
    """
    kinds = sorted((kind for kind in source.groups if kind != "client"), key=lambda kind: kind != "domain")
    if names and not kinds:
        raise DataError(f"source '{source.name}' has no domains, so none can be held out")
    found: dict[str, Ints] = {}
    for name in names:
        kind = next((kind for kind in kinds if name in source.group_names[kind]), None)
        if kind is None:
            raise unknown("domain", name, [known for kind in kinds for known in source.group_names[kind]])
        ids = source.groups[kind].numpy()
        found[name] = np.flatnonzero(ids == source.group_names[kind].index(name))
    return found


def to_be_tested(source: Source, rows: Ints) -> Ints:
    """The official test samples among the int64 `rows` of a held-out domain; all of them if there are none.

    Training samples of the domain are what a held-out client adapts on.
    """
    official = rows[:0] if source.test is None else rows[source.test.numpy()[rows]]
    return official if len(official) else rows
