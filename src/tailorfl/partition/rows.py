"""Rows of a source per client, all in one array, so that 100,000 clients need three arrays, not 100,000 objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tailorfl.errors import ConfigError, DataError

Ints = NDArray[np.int64]


class Rows(Sequence[Ints]):
    """An int64 array per client; `rows[i]` is a view of client i's, `rows[a:b]` the Rows of some clients.

    Attributes:
        values: int64, the arrays of all clients.
        starts, stops: `[clients]` int64, client i has `values[starts[i] : stops[i]]`. Clients that share an array (a
            global test set) have the same start and stop.
    """

    __slots__ = ("starts", "stops", "values")

    def __init__(self, values: Ints, starts: Ints, stops: Ints) -> None:
        self.values, self.starts, self.stops = values, starts, stops

    @classmethod
    def of(cls, arrays: Sequence[Ints]) -> Rows:
        """Return `arrays`, one per client, as Rows; an array object that several clients share is held once.

        Raises:
            DataError: an array is not a list of whole numbers.
        """
        if isinstance(arrays, Rows):
            return arrays
        listed = list(arrays)
        distinct = {id(array): array for array in listed}
        for array in distinct.values():
            if np.ndim(array) != 1 or (len(array) and np.asarray(array).dtype.kind not in "iu"):
                raise DataError(
                    "the rows of a client must be a list of whole numbers, but the rows of one client have type "
                    f"{np.asarray(array).dtype} and shape {list(np.shape(array))}"
                )
        pool = cls.cut(
            np.concatenate(
                [np.empty(0, dtype=np.int64), *distinct.values()], dtype=np.int64, casting="unsafe"
            ),
            np.array([len(array) for array in distinct.values()], dtype=np.int64),
        )
        position_of = {key: position for position, key in enumerate(distinct)}
        return pool.of_clients(np.array([position_of[id(array)] for array in listed], dtype=np.int64))

    @classmethod
    def cut(cls, values: Ints, sizes: Ints) -> Rows:
        """Return `values` cut into one piece per client, of `sizes` `[clients]`."""
        stops = np.cumsum(sizes, dtype=np.int64)
        return cls(values, stops - sizes, stops)

    @classmethod
    def shared(cls, values: Ints, clients: int) -> Rows:
        """Return Rows in which every client has all `values`."""
        return cls(values, np.zeros(clients, dtype=np.int64), np.full(clients, len(values), dtype=np.int64))

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.starts)

    @overload
    def __getitem__(self, client: int) -> Ints: ...
    @overload
    def __getitem__(self, client: slice) -> Rows: ...
    def __getitem__(self, client: int | slice) -> Ints | Rows:
        if isinstance(client, slice):
            return Rows(self.values, self.starts[client], self.stops[client])
        return self.values[self.starts[client] : self.stops[client]]

    def __iter__(self) -> Iterator[Ints]:
        for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True):
            yield self.values[start:stop]

    @property
    def sizes(self) -> Ints:
        """Number of rows of every client, int64 `[clients]`."""
        return self.stops - self.starts

    def flat(self) -> Ints:
        """Return the rows of all clients, one client after another; a view if they are stored like that."""
        if len(self) and bool((self.starts[1:] == self.stops[:-1]).all()):
            return self.values[self.starts[0] : self.stops[-1]]
        sizes = self.sizes
        begin = np.cumsum(sizes) - sizes
        positions: Ints = np.arange(sizes.sum()) + np.repeat(self.starts - begin, sizes)
        return self.values[positions]

    def owners(self) -> Ints:
        """Return the owner of each row of `flat`, int64 client."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def of_clients(self, clients: Ints) -> Rows:
        """Return the Rows of `clients`, int64, in this order; nothing is copied."""
        return Rows(self.values, self.starts[clients], self.stops[clients])

    def once(self) -> tuple[Rows, Ints]:
        """Return (the distinct arrays, `[clients]` int64 index of each client's array among them)."""
        if bool((self.starts[1:] >= self.stops[:-1]).all()):
            return self, np.arange(len(self))
        keys = self.starts * (len(self.values) + 1) + self.stops
        first, which = np.unique(keys, return_index=True, return_inverse=True)[1:]
        return self.of_clients(first), which.astype(np.int64)

    def named_by(self, names: Ints) -> Rows:
        """Return the Rows that hold `names[row]` instead of every row.

        This turns positions in a part into rows of the whole.
        """
        return Rows(names[self.values], self.starts, self.stops)

    def emptied(self, clients: Ints) -> Rows:
        """Return the Rows in which `clients`, int64, have no rows."""
        stops = self.stops.copy()
        stops[clients] = self.starts[clients]
        return Rows(self.values, self.starts, stops)

    def with_client(self, rows: Ints) -> Rows:
        """Return the Rows with one more client."""
        size = len(self.values)
        return Rows(
            np.concatenate([self.values, rows]),
            np.append(self.starts, size),
            np.append(self.stops, size + len(rows)),
        )


def spread_indices(total: int, count: int | None) -> list[int]:
    """Return `count` ascending, evenly spaced indices out of 0..total-1; all if there are no more or `count` is None.

    Files are often sorted by label, so their first lines would all be of one class.

    Raises:
        ConfigError: if `count` is below 1.
    """
    if count is not None and count < 1:
        raise ConfigError(f"the number of samples must be at least 1, but is {count}")
    if count is None or count >= total:
        return list(range(total))
    return [(2 * k + 1) * total // (2 * count) for k in range(count)]
