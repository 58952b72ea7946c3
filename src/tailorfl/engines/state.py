"""The private states of all clients, kept only for those that have trained (copy-on-write).

A federation of 10,000 clients of which 50 have trained holds 51 states. Rows are in one growing array per entry, in
memory. If worker processes share them, or with a folder, all entries are side by side in one memory-mapped block: a
process may only open about a thousand files, and a deep network has more tensors than that.

New states of a round go to separate rows and take effect by `commit`, so a round that fails or is interrupted changes
nothing; the clients' old rows are then free for the next round.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.engines.memory import Block, aligned
from tailorfl.errors import TailorflError
from tailorfl.training import tree

NO_ROW = -1
"""Stands for the row of a client that never trained."""
RESIDENT_BYTES = 64 * 2**20
"""Bytes of states on disk that are accessed before their memory is released."""


class StateStore:
    """Client id -> private state.

    Args:
        start: the state of clients that never trained.
        folder: where states are memory-mapped; None keeps them in memory.
        own_start: returns a client's own start, with the structure of `start`, if clients start differently.
    """

    def __init__(
        self,
        start: TensorDict,
        folder: Path | None = None,
        own_start: Callable[[int], TensorDict] | None = None,
    ) -> None:
        self._start = dict(tree.leaves(start))
        self._folder, self._own_start = folder, own_start
        self._row: dict[int, int] = {}
        self._staged: dict[int, int] = {}
        self._free: list[int] = []
        self._used = 0
        self._arrays: dict[str, Tensor] = {}
        self._block = None if folder is None else Block(folder)
        self.capacity = 0
        """Number of rows that fit."""
        self._bytes = sum(t.numel() * t.element_size() for t in self._start.values())
        self._places: dict[str, int] = {}  # where each entry begins in the bytes of a client
        self._stride = 0
        for path, tensor in self._start.items():
            self._places[path] = self._stride
            self._stride = aligned(self._stride + tensor.numel() * tensor.element_size())
        self._seen = 0

    def __len__(self) -> int:
        """Return the number of clients that have their own state."""
        return len(self._row)

    @property
    def clients(self) -> tuple[int, ...]:
        """Ids of the clients that have their own state."""
        return tuple(sorted(self._row))

    @property
    def on_disk(self) -> bool:
        """Whether states are memory-mapped."""
        return self._folder is not None

    # -- reading --------------------------------------------------------------------------------------------

    def get(self, ids: Sequence[int]) -> TensorDict:
        """Return the states of `ids` as copies, [len(ids), ...].

        A client that never trained has its start.
        """
        return self.fetch(self.rows(ids), ids)

    def rows(self, ids: Sequence[int]) -> list[int]:
        """Return the rows of the states of `ids`; `NO_ROW` for clients that have their start."""
        return [self._row.get(i, NO_ROW) for i in ids]

    def fetch(self, rows: Sequence[int], ids: Sequence[int]) -> TensorDict:
        """Return the states in `rows`, which belong to `ids`, as copies, [len(ids), ...]."""
        out = {}
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
        self._saw(len(rows) - len(missing))
        return tree.nest(out.items(), [len(rows)])

    def starts(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return the initial states of `ids` by path, [len(ids), ...] (views if all are the same)."""
        if self._own_start is None or not ids:
            return {p: t.expand(len(ids), *t.shape) for p, t in self._start.items()}
        drawn = [dict(tree.leaves(self._own_start(i))) for i in ids]
        return {p: torch.stack([start[p] for start in drawn]) for p in self._start}

    def fresh(self, ids: Sequence[int]) -> TensorDict:
        """Return the initial states of `ids`, [len(ids), ...]."""
        return tree.nest(self.starts(ids).items(), [len(ids)])

    # -- writing --------------------------------------------------------------------------------------------

    def stage(self, ids: Sequence[int], states: TensorDict) -> None:
        """Keep `states` [len(ids), ...] as the next ones of `ids`; until `commit`, `get` returns the old ones."""
        self.write(self.reserve(ids), states)

    def reserve(self, ids: Sequence[int]) -> list[int]:
        """Return for each of `ids` a row for its next state, reserved until `commit` or `rollback`."""
        if not self._start:
            return []
        for i in ids:
            if i not in self._staged:
                self._staged[i] = heapq.heappop(self._free) if self._free else self._used
                self._used = max(self._used, self._staged[i] + 1)
        self._grow(self._used)
        return [self._staged[i] for i in ids]

    def write(self, rows: Sequence[int], states: TensorDict) -> None:
        """Write `states` [clients, ...] into reserved rows, [clients], or no rows if states have no entries."""
        if not states.batch_size[0]:
            return
        new = dict(tree.leaves(states))
        if new.keys() != self._start.keys():
            differing = sorted(new.keys() ^ self._start.keys())
            raise TailorflError(
                "local() returned a private state whose entries differ from those of client_state(): "
                f"{', '.join(differing[:5])}; return the same names"
            )
        targets = torch.tensor(rows, dtype=torch.int64)
        for path, value in new.items():
            self._arrays[path][targets] = value
        self._saw(len(rows))

    def commit(self, ids: Sequence[int]) -> None:
        """Make the staged states of `ids` current, and drop those staged for others."""
        staged, self._staged = self._staged, {}
        for i in ids:
            if i not in staged:
                continue
            if i in self._row:
                heapq.heappush(self._free, self._row[i])
            self._row[i] = staged.pop(i)
        for row in staged.values():
            heapq.heappush(self._free, row)

    def rollback(self) -> None:
        """Drop all staged states."""
        self.commit(())

    def put(self, ids: Sequence[int], states: TensorDict) -> None:
        """Store `states` [len(ids), ...] for `ids` at once."""
        self.stage(ids, states)
        self.commit(ids)

    def forget(self, ids: Sequence[int]) -> None:
        """Give `ids` their start again."""
        for i in ids:
            heapq.heappush(self._free, self._row.pop(i))

    # -- checkpoints ----------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Tensor]:
        """Return all states as named tensors: the ids and the used rows of every entry.

        In memory they are copies. With a folder they are views of its file, which need not fit in memory: write them
        out before anything is stored.
        """
        if self._folder is not None:
            self._compact()
        used = len(self._row)
        ids = torch.tensor(list(self._row), dtype=torch.int64)
        if self._folder is not None:
            return {"clients": ids, **{f"state/{p}": a[:used] for p, a in self._arrays.items()}}
        rows = torch.tensor(list(self._row.values()), dtype=torch.int64)
        return {"clients": ids, **{f"state/{p}": a.index_select(0, rows) for p, a in self._arrays.items()}}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the states from what `dump` returned."""
        self._row = {int(i): row for row, i in enumerate(tensors["clients"].tolist())}
        self._staged, self._free, self._used = {}, [], len(self._row)
        self._grow(self._used)
        for path, array in self._arrays.items():
            if self._row:
                array[: len(self._row)] = tensors[f"state/{path}"]

    def _compact(self) -> None:
        """Move states into the first rows, row by row, so that no rows between them are unused."""
        used = len(self._row)
        holes = iter(sorted(set(range(used)) - set(self._row.values())))
        for i, row in self._row.items():
            if row >= used:
                self._row[i] = next(holes)
                for array in self._arrays.values():
                    array[self._row[i]] = array[row]
        self._row = dict(sorted(self._row.items(), key=lambda pair: pair[1]))
        self._free, self._used = [], used

    # -- memory ---------------------------------------------------------------------------------------------

    def share(self) -> None:
        """Keep the states from now on in memory that processes started later can access."""
        if self._block is not None:
            return
        arrays, capacity = self._arrays, self.capacity
        self._block, self._arrays, self.capacity = Block(), {}, 0
        self._grow(capacity)
        for path, array in arrays.items():
            self._arrays[path].copy_(array)

    def see(self, capacity: int) -> None:
        """Make rows accessible that the storing process has added since this one was started."""
        assert self._block is not None
        if capacity > self.capacity:
            self._arrays = {
                p: self._block.rows(t.dtype, (capacity, *t.shape), self._places[p], self._stride)
                for p, t in self._start.items()
            }
            self.capacity = capacity

    def __getstate__(self) -> dict[str, Any]:
        """Return the store without its states, for a process that is being started."""
        emptied = {"_arrays": {}, "_row": {}, "_staged": {}, "_free": [], "capacity": 0}
        return {**self.__dict__, **emptied}

    def _saw(self, rows: int) -> None:
        """Count rows that were read or written, and release the memory of states on disk from time to time."""
        self._seen += rows * self._bytes
        if self._folder is not None and self._block is not None and self._seen > RESIDENT_BYTES:
            self._seen = 0
            self._block.release()

    def _grow(self, rows: int) -> None:
        if rows <= self.capacity:
            return
        # A file grows in place and its bytes are allocated at once; memory is copied, so it grows by more.
        capacity = max(rows, self.capacity + self.capacity // 8 if self.on_disk else 2 * self.capacity, 8)
        if self._block is not None:
            self._block.reserve(capacity * self._stride)
            self.see(capacity)
            return
        for path, start in self._start.items():
            new = torch.empty((capacity, *start.shape), dtype=start.dtype)
            if path in self._arrays:
                new[: self.capacity] = self._arrays[path]
            self._arrays[path] = new
        self.capacity = capacity
