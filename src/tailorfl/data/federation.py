"""Clients as rows of one data set: what every method, engine and evaluation is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from tailorfl.data.source import Source, clean_names
from tailorfl.errors import ConfigError, DataError, check_known
from tailorfl.partition.rows import Ints, Rows

Part = Literal["train", "val", "test"]
PARTS: tuple[Part, ...] = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class Federation:
    """A data set dealt to clients. Samples stay in `source`; a client is three lists of rows.

    Attributes:
        source: the samples.
        train, val, test: per client int64 rows of `source`, held as `Rows` whatever sequence is given. Clients
            0..num_clients-1 train; the others are held out and must never contribute to anything shared.
        names: name of every client.
        num_clients: number of training clients.
        server: int64 rows that the server holds for validation (`dirichlet_perada`), no client's.
        public: unlabelled samples that the server and every client may use (its labels are blanked), or None.
        shifted: by name, sources of which every row is test data: corrupted images, a held-out domain.

    Raises:
        DataError: if the lists do not fit together.
    """

    source: Source
    train: Sequence[Ints]
    val: Sequence[Ints]
    test: Sequence[Ints]
    names: tuple[str, ...]
    num_clients: int
    server: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    public: Source | None = None
    shifted: Mapping[str, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", clean_names(self.names))
        for part in PARTS:
            object.__setattr__(self, part, Rows.of(getattr(self, part)))
        counts = {len(self.train), len(self.val), len(self.test), len(self.names)}
        if len(counts) > 1 or not 1 <= self.num_clients <= len(self.train):
            raise DataError(
                "a federation needs one train, val and test list and one name per client and 1 <= "
                f"num_clients, but got {len(self.train)}, {len(self.val)}, {len(self.test)} lists, "
                f"{len(self.names)} names and num_clients={self.num_clients}"
            )

    def __len__(self) -> int:
        """Return the number of clients, held-out ones included."""
        return len(self.train)

    def part(self, part: Part) -> Rows:
        """Per client the rows of one part: "train", "val" or "test"."""
        return Rows.of({"train": self.train, "val": self.val, "test": self.test}[part])

    def places(self, client: int) -> tuple[Ints, dict[Part, Ints]]:
        """Return all rows of a client, int64, ascending, and the places of each part's among them."""
        parts = {part: self.part(part)[client] for part in PARTS}
        rows = np.unique(np.concatenate(list(parts.values())))
        return rows, {part: np.searchsorted(rows, part_rows) for part, part_rows in parts.items()}

    def of_clients(self, order: Ints) -> Federation:
        """Return the federation of these clients alone, int64, in this order; all of them train."""
        train, val, test = (Rows.of(rows).of_clients(order) for rows in (self.train, self.val, self.test))
        names = tuple(self.names[i] for i in order.tolist())
        return replace(self, train=train, val=val, test=test, names=names, num_clients=len(order))

    @property
    def members(self) -> tuple[int, ...]:
        """The training clients that have samples: all but those that were left out by `without`."""
        return tuple(np.flatnonzero(self.sizes()[: self.num_clients]).tolist())

    def number(self, client: str) -> int:
        """Return the number of a client that is named by its name, or by its number where no name is like that.

        Raises:
            ConfigError: there is none, or it was left out.
        """
        numbers = (*self.members, *range(self.num_clients, len(self)))
        by_name = {self.names[i]: i for i in numbers}
        if client not in self.names and client.isdecimal() and int(client) in numbers:
            return int(client)
        check_known("client of the run", client, by_name)
        number: int = by_name[client]
        return number

    def without(self, names: Sequence[str]) -> Federation:
        """Return the federation in which the places of these training clients are empty; the others keep theirs.

        Raises:
            ConfigError: one of them is no training client, or nobody is left.
        """
        training = self.names[: self.num_clients]
        for name in names:
            check_known("training client", name, training)
        if names and set(names) >= {training[i] for i in self.members}:
            raise ConfigError(
                f"no client is left to train without {', '.join(names)}; exclude fewer (data.excluded_clients)"
            )
        places = np.array([training.index(name) for name in names], dtype=np.int64)
        train, val, test = (self.part(part).emptied(places) for part in PARTS)
        return replace(self, train=train, val=val, test=test)

    def sizes(self, part: Part = "train") -> Ints:
        """`[clients]` int64 number of samples of every client in one part, held-out clients included."""
        return self.part(part).sizes

    def global_test(self, clients: Sequence[int] | None = None) -> Ints:
        """Sorted int64 union of the test rows of the training clients, or of `clients`."""
        chosen = np.arange(self.num_clients) if clients is None else np.asarray(clients, dtype=np.int64)
        distinct, _ = self.part("test").of_clients(chosen).once()
        is_tested = np.zeros(len(self.source), dtype=np.bool_)
        is_tested[distinct.flat()] = True
        return np.flatnonzero(is_tested)

    def describe(self, part: Part = "train") -> Ints:
        """`[clients, strata]` int64 number of samples of every stratum (class) at every client."""
        strata = self.source.strata.numpy()
        width = int(strata.max()) + 1 if len(strata) else 0
        distinct, which = self.part(part).once()
        cells = distinct.owners() * width + strata[distinct.flat()]
        return np.bincount(cells, minlength=len(distinct) * width).reshape(len(distinct), width)[which]

    def summary(self) -> list[dict[str, Any]]:
        """One row per client, for a table: name, role, sizes, number of classes, largest share of a class."""
        table = self.describe("train")
        classes, largest = (table > 0).sum(axis=1), table.max(axis=1, initial=0)
        train, val, test = self.sizes("train"), self.sizes("val"), self.sizes("test")
        return [
            {
                "client": client,
                "name": self.names[client],
                "role": "train" if client < self.num_clients else "held out",
                "train": int(train[client]),
                "val": int(val[client]),
                "test": int(test[client]),
                "classes": int(classes[client]),
                "largest_class": float(largest[client] / max(1, train[client])),
            }
            for client in range(len(self))
        ]
