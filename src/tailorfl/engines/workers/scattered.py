"""The states of clients whose workers are on several machines: each is with the worker that trained it last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.engines.state import StateStore
from tailorfl.engines.workers.tasks import Map, Task, Train
from tailorfl.training import tree

S = TypeVar("S", bound=StateStore)


class Owner(Protocol):
    """Who reaches the workers that have states."""

    def ask(self, worker: int, what: str, store: StateStore, ids: Sequence[int]) -> Any:
        """Returns what a worker answers about states of a store."""

    def everyone(self, what: str, store: StateStore) -> None:
        """Asks all workers that know a store."""


@dataclass(frozen=True)
class Kept(Generic[S]):
    """States in the worker's own store, which is where the scattered one says that they are."""

    store: S
    ids: tuple[int, ...]
    fresh: bool

    def read(self) -> TensorDict:
        """Returns the states, [clients, ...]."""
        return self.store.fresh(self.ids) if self.fresh else self.store.get(self.ids)

    def write(self, states: TensorDict) -> None:
        """Stages the next ones."""
        self.store.stage(self.ids, states)


class ScatteredStore(StateStore):
    """A store whose states are with the workers of a cluster; those of a checkpoint are here until they are needed."""

    def __init__(self, store: StateStore, owner: Owner) -> None:
        self.__dict__.update(store.__dict__)
        self._owner = owner
        self.home: dict[int, int] = {}
        """Client -> the worker that has its state."""
        self.training: dict[int, int] = {}
        """Client -> the worker that has staged its next state."""

    def __reduce__(self) -> Any:
        """Workers get a store of their own."""
        return StateStore.blank, (tree.nest(self._start.items()), self._own_start)

    def __len__(self) -> int:
        """Number of clients that have a state of their own."""
        return len(self.clients)

    @property
    def clients(self) -> tuple[int, ...]:
        """Ids of the clients that have a state of their own."""
        return tuple(sorted({*self._row, *self.home}))

    def get(self, ids: Sequence[int]) -> TensorDict:
        """Returns the states of `ids`, [len(ids), ...], fetched from their workers."""
        found = super().get(ids)
        for worker in sorted(set(self.home.values())):
            where = [k for k, i in enumerate(ids) if self.home.get(i) == worker]
            if where:
                theirs = dict(tree.leaves(self._owner.ask(worker, "give", self, [ids[k] for k in where])))
                for path, tensor in tree.leaves(found):
                    tensor[where] = theirs[path]
        return found

    def stage(self, ids: Sequence[int], states: TensorDict) -> None:
        """Keeps the next states of clients that were trained in this process."""
        for i in ids:
            self.training.pop(i, None)
        super().stage(ids, states)

    def commit(self, ids: Sequence[int]) -> None:
        """Makes what was staged for `ids` their states, and drops what was staged for others, on all workers."""
        training, self.training = self.training, {}
        if not self._start:
            return
        accepted = set(ids)
        for worker in sorted(set(training.values())):
            mine = [i for i in training if training[i] == worker and i in accepted]
            self._owner.ask(worker, "commit", self, mine)
            self.home.update(dict.fromkeys(mine, worker))
        here = [i for i in ids if i in self._staged]
        super().commit(ids)
        for i in here:
            self.home.pop(i, None)

    def dump(self) -> dict[str, Tensor]:
        """Returns everything as named tensors, gathered from all workers."""
        ids = self.clients
        states = {f"state/{p}": t for p, t in tree.leaves(self.get(ids))} if ids and self._start else {}
        return {"clients": torch.tensor(ids, dtype=torch.int64), **states}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `dump` returned; workers get the states of clients when they train them."""
        self.home, self.training = {}, {}
        self._owner.everyone("clear", self)
        super().load(tensors)

    def leave(self, ids: Sequence[int]) -> TensorDict:
        """Returns the states of `ids` that are here, [clients, ...], which a worker takes over."""
        states = super().get(ids)
        self.forget(ids)
        return states


def note_staged(task: Task, worker: int) -> None:
    """Notes that a worker has staged the next states of a chunk's clients."""
    states = states_of(task)
    if states is not None and isinstance(task, Train):
        states.store.training.update(dict.fromkeys(states.ids, worker))


def held(task: Task, worker: int) -> int:
    """How many of a chunk's states a worker has, less those that others have."""
    states = states_of(task)
    if states is None:
        return 0
    owners = Counter(states.store.home.get(i) for i in states.ids)
    del owners[None]
    return 2 * owners[worker] - owners.total()


def states_of(task: Task) -> Kept[ScatteredStore] | None:
    """Returns where the states of a chunk are that a worker has; None where a task needs none."""
    found = task.states if isinstance(task, Train | Map) else None
    return found if isinstance(found, Kept) and not found.fresh else None
