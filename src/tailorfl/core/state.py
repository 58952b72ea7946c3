"""The private states of all clients, kept only for those that have trained (copy-on-write).

A federation of 10,000 clients of which 50 have trained holds 51 states. Rows live in one growing array per
entry, in memory or, with a folder, in memory-mapped files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.errors import TailorflError


class StateStore:
    """Client id -> private state.

    Args:
        start: what a client has that never trained.
        folder: where states are memory-mapped; None keeps them in memory.
        own_start: gives a client's own start where clients begin with different ones, structured as `start`.
        name: tells the files of several stores in one folder apart.
    """

    def __init__(
        self,
        start: TensorDict,
        folder: Path | None = None,
        own_start: Callable[[int], TensorDict] | None = None,
        name: str = "",
    ) -> None:
        self._start = dict(tree.leaves(start))
        self._folder, self._own_start, self._name = folder, own_start, name
        self._row: dict[int, int] = {}
        self._arrays: dict[str, Tensor] = {}
        self._capacity = 0

    def __len__(self) -> int:
        """Number of clients that have a state of their own."""
        return len(self._row)

    @property
    def clients(self) -> tuple[int, ...]:
        """Ids of the clients that have a state of their own."""
        return tuple(sorted(self._row))

    def get(self, ids: Sequence[int]) -> TensorDict:
        """Returns the states of `ids` as copies, [len(ids), ...].

        A client that never trained has its start.
        """
        out = {}
        rows = [self._row.get(i, -1) for i in ids]
        missing = [k for k, row in enumerate(rows) if row < 0]
        starts = self.starts([ids[k] for k in missing])
        for path in self._start:
            if len(missing) == len(rows):
                out[path] = starts[path].clone()
                continue
            value = self._arrays[path].index_select(0, torch.tensor([max(r, 0) for r in rows]))
            if missing:
                value[missing] = starts[path]
            out[path] = value
        return tree.nest(out.items(), [len(rows)])

    def starts(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Returns by path what `ids` have before they ever train, [len(ids), ...] (views where all have the same)."""
        if self._own_start is None or not ids:
            return {p: t.expand(len(ids), *t.shape) for p, t in self._start.items()}
        drawn = [dict(tree.leaves(self._own_start(i))) for i in ids]
        return {p: torch.stack([one[p] for one in drawn]) for p in self._start}

    def put(self, ids: Sequence[int], states: TensorDict) -> None:
        """Stores `states` [len(ids), ...] for `ids`."""
        if not self._start or not ids:
            return
        for i in ids:
            self._row.setdefault(i, len(self._row))
        self._grow(len(self._row))
        rows = torch.tensor([self._row[i] for i in ids])
        new = dict(tree.leaves(states))
        if new.keys() != self._start.keys():
            differing = sorted(new.keys() ^ self._start.keys())
            raise TailorflError(
                f"local() returned a private state with other entries than client_state(): {', '.join(differing[:5])}; "
                "return the same names"
            )
        for path, value in new.items():
            self._arrays[path][rows] = value

    def dump(self) -> dict[str, Tensor]:
        """Returns everything as named tensors: the ids and the used rows of every entry.

        In memory they are copies. With a folder they are views of its files, which need not fit in memory:
        write them out before the next `put`.
        """
        used = len(self._row)
        ids = torch.tensor(list(self._row), dtype=torch.int64)
        rows = {f"state/{p}": a[:used] for p, a in self._arrays.items()}
        if self._folder is None:
            rows = {p: r.clone() for p, r in rows.items()}
        return {"clients": ids, **rows}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `dump` returned."""
        self._row = {int(i): row for row, i in enumerate(tensors["clients"].tolist())}
        self._arrays, self._capacity = {}, 0
        self._grow(len(self._row))
        for path, array in self._arrays.items():
            array[: len(self._row)] = tensors[f"state/{path}"]

    def _grow(self, rows: int) -> None:
        if rows <= self._capacity:
            return
        capacity = max(rows, 2 * self._capacity, 8)
        for path, start in self._start.items():
            new = self._allocate(path, capacity, start)
            if path in self._arrays:
                new[: self._capacity] = self._arrays[path]
            self._arrays[path] = new
        self._capacity = capacity

    def _allocate(self, path: str, rows: int, like: Tensor) -> Tensor:
        shape = (rows, *like.shape)
        if self._folder is None:
            return torch.empty(shape, dtype=like.dtype)
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f".states-{self._name}{path.replace('/', '__')}-{rows}.bin"
        count = int(torch.Size(shape).numel())
        mapped = torch.from_file(str(file), shared=True, size=max(count, 1), dtype=like.dtype)
        # The mapping keeps the file alive without its name, so that not even a crash leaves it behind.
        file.unlink()
        return mapped[:count].reshape(shape)
