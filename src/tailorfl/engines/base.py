"""What an engine is: a way to apply one client's function to a cohort."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.client import Client
from tailorfl.core.cohort import Cohort
from tailorfl.core.state import StateStore
from tailorfl.data.source import Source
from tailorfl.engines.memory import Room

T = TypeVar("T")
Parts = tuple[TensorDict, ...]
ClientFunction = Callable[[Client, TensorDict, TensorDict], Parts]
"""(client, its state, what it received) -> any number of TensorDicts."""


@dataclass(frozen=True)
class Updates:
    """What comes out of the training of a cohort, beside the new states, which are staged in their store."""

    replies: TensorDict
    """[clients, ...]"""
    metrics: TensorDict
    """[clients]"""
    finite: Tensor
    """Whose new state and reply hold only finite numbers, bool [clients]."""


class Engine(Protocol):
    """Applies client functions to cohorts; every engine returns the same numbers up to float rounding.

    `received` is one message for all, or with `index` ([clients] or [clients, M]) a table of which each client gets the
    rows that `index` names.
    """

    @property
    def name(self) -> str:
        """What the run's records call it."""

    def resume(self, name: str) -> None:
        """Goes on as the engine that a run's records call `name`, where this one has a choice."""

    def hold(self, store: StateStore) -> StateStore:
        """Returns the store that keeps what `store` keeps where this engine wants the states."""

    def train(
        self,
        function: ClientFunction,
        cohort: Cohort,
        store: StateStore,
        received: TensorDict,
        index: Tensor | None = None,
    ) -> Updates:
        """Runs `function`, which returns (new state, reply, metrics), on every client with its state of `store`.

        New states are staged: they take effect when the caller commits them.
        """

    def deploy(
        self,
        function: ClientFunction,
        cohort: Cohort,
        store: StateStore,
        received: TensorDict,
        index: Tensor | None = None,
        *,
        fresh: bool = False,
    ) -> TensorDict:
        """Returns the model that `function` makes of every client's state, or with `fresh` of its start.

        [clients, ...]; `function` returns (model,), and nothing is stored.
        """

    def map(
        self,
        function: ClientFunction,
        cohort: Cohort,
        states: TensorDict,
        received: TensorDict,
        index: Tensor | None = None,
    ) -> Parts:
        """Returns `function` of every client, stacked: [clients, ...] in the order of `cohort.ids`.

        `states` [clients, ...].
        """

    def predict(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of client i's model on its rows, [rows, outputs]; `models` [clients, ...]."""

    def predict_all(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> Tensor:
        """Returns the outputs of every client's model on the same `rows`, [clients, rows, outputs]."""


class InProcess(ABC):
    """What engines have in common that run clients in this process, a chunk of the cohort after another."""

    def __init__(self) -> None:
        self.room = Room()

    @property
    @abstractmethod
    def name(self) -> str:
        """What the run's records call it."""

    def resume(self, name: str) -> None:
        """Nothing: there is no choice."""
        return

    def settle(
        self,
        function: ClientFunction,
        cohort: Cohort,
        states: Callable[[int], TensorDict],
        received: TensorDict,
        index: Tensor | None,
    ) -> None:
        """Nothing: there is no choice to make before a cohort is run; `states(n)` are those of its first n clients."""
        return

    def attempt(self, cohort: Cohort, run: Callable[[InProcess], T]) -> T:
        """Returns what `run` makes of the engine that runs this cohort."""
        return run(self)

    @property
    def current(self) -> InProcess:
        """The engine that runs cohorts for now."""
        return self

    def hold(self, store: StateStore) -> StateStore:
        """Returns `store` itself."""
        return store

    @abstractmethod
    def chunk_of(self, cohort: Cohort) -> int:
        """Returns how many clients make up a chunk."""

    @abstractmethod
    def map(
        self,
        function: ClientFunction,
        cohort: Cohort,
        states: TensorDict,
        received: TensorDict,
        index: Tensor | None = None,
    ) -> Parts:
        """Returns `function` of every client, stacked."""

    @abstractmethod
    def predict(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of client i's model on its rows."""

    @abstractmethod
    def predict_all(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> Tensor:
        """Returns the outputs of every client's model on the same rows."""

    def train(
        self,
        function: ClientFunction,
        cohort: Cohort,
        store: StateStore,
        received: TensorDict,
        index: Tensor | None = None,
    ) -> Updates:
        """Runs `function` on every client; only one chunk has its states taken out of the store at a time."""
        out = Stacked(len(cohort.ids), self.room)
        for positions in self.chunks(cohort):
            part = cohort.part(positions.tolist())
            mine = None if index is None else index[positions]
            new, replies, metrics = self.map(function, part, store.get(part.ids), received, mine)
            store.stage(part.ids, new)
            out.put_updates(positions, replies, metrics, finite_clients(new, replies))
        return out.updates()

    def deploy(
        self,
        function: ClientFunction,
        cohort: Cohort,
        store: StateStore,
        received: TensorDict,
        index: Tensor | None = None,
        *,
        fresh: bool = False,
    ) -> TensorDict:
        """Returns the model of every client."""
        states = store.fresh(cohort.ids) if fresh else store.get(cohort.ids)
        return self.map(function, cohort, states, received, index)[0]

    def chunks(self, cohort: Cohort) -> Iterator[Tensor]:
        """Yields the positions of each chunk's clients, int64 [clients]: those with most samples first.

        The size is asked for again each time: what fits into memory may have shown in the chunk before.
        """
        left = largest_first(cohort)
        while len(left):
            chunk = self.next_chunk(cohort, left)
            yield chunk
            left = left[len(chunk) :]

    def next_chunk(self, cohort: Cohort, left: Tensor) -> Tensor:
        """Returns the first of the positions that are `left`, as many as make up the next chunk."""
        return left[: evenly(len(left), self.chunk_of(cohort))]


def largest_first(cohort: Cohort) -> Tensor:
    """Returns the positions of a cohort's clients, int64 [clients], those with most samples first."""
    return torch.from_numpy(np.argsort(-cohort.sizes, kind="stable"))


def evenly(clients: int, most: int) -> int:
    """Returns the size of the next chunk where `clients` are left: as few chunks as can be, and those alike."""
    return -(-clients // -(-clients // most))


class Stacked:
    """Collects the results of clients or chunks of clients into tensors of [clients, ...] in host memory."""

    def __init__(self, clients: int, room: Room) -> None:
        self.clients, self._room = clients, room
        self._parts: list[dict[str, Tensor]] = []

    def put(self, where: int | Tensor, results: Sequence[Mapping[str, Tensor]]) -> None:
        """Writes the tensors of one client (`where` its position) or of several, [len(where), ...]."""
        one = isinstance(where, int)
        if isinstance(where, Tensor) and torch.equal(where, torch.arange(self.clients)):
            # Everything at once and in order: nothing to copy within host memory.
            self._parts = [{p: t.cpu() for p, t in part.items()} for part in results]
            return
        if not self._parts:
            self._parts = [
                {
                    p: self._room.empty((self.clients, *(t.shape if one else t.shape[1:])), t.dtype)
                    for p, t in part.items()
                }
                for part in results
            ]
        for held, part in zip(self._parts, results, strict=True):
            for path, tensor in part.items():
                held[path][where] = tensor

    def put_updates(self, where: Tensor, replies: TensorDict, metrics: TensorDict, finite: Tensor) -> None:
        """Writes what came out of the training of some clients."""
        self.put(where, [dict(tree.leaves(replies)), dict(tree.leaves(metrics)), {"finite": finite}])

    def updates(self) -> Updates:
        """Returns what came out of the training of all."""
        replies, metrics, rest = self.parts()
        return Updates(replies, metrics, rest["finite"])

    def parts(self) -> Parts:
        """Returns the collected TensorDicts."""
        return tuple(tree.nest(part.items(), [self.clients]) for part in self._parts)


def finite_clients(*parts: TensorDict) -> Tensor:
    """Returns which clients have only finite numbers in all `parts` ([clients, ...] each), bool [clients]."""
    clients = parts[0].batch_size[0]
    ok = torch.ones(clients, dtype=torch.bool)
    for part in parts:
        for _, tensor in tree.leaves(part):
            if tensor.is_floating_point():
                ok &= torch.isfinite(tensor.reshape(clients, -1).sum(1))
    return ok
