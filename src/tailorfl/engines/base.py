"""The interface of engines, which apply one client's function to a cohort, and their tasks and results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.messages import PerClient, table_of
from tailorfl.data.source import Source
from tailorfl.engines.memory import Room
from tailorfl.engines.state import StateStore
from tailorfl.errors import ClientError
from tailorfl.models.functional import Model
from tailorfl.privacy import PrivacyRecord
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort

Parts = tuple[TensorDict, ...]


@dataclass(frozen=True)
class CohortUpdates:
    """The result of training a cohort, without the new states, which are staged in their store."""

    replies: TensorDict
    """[clients, ...]"""
    metrics: TensorDict
    """[clients]"""
    finite: Tensor
    """Clients whose new state and reply hold only finite numbers, bool [clients]."""


class Stacked:
    """Collects the results of clients or chunks of clients into tensors [clients, ...] in host memory.

    `unlike(position, first, difference)` returns the error for a client whose results differ from the first in
    structure.
    """

    def __init__(self, clients: int, room: Room, unlike: Callable[[int, int, str], Exception]) -> None:
        self.clients, self._room, self._unlike = clients, room, unlike
        self._parts: list[dict[str, Tensor]] = []
        self._shapes: list[tree.Shapes] = []
        self._first = 0

    def put(self, rows: int | Tensor, parts: Sequence[TensorDict | Mapping[str, Tensor]]) -> None:
        """Write the tensors of one client (`rows` its position) or of several, [len(rows), ...]."""
        results: list[Mapping[str, Tensor]]
        results = [dict(tree.leaves(part)) if isinstance(part, TensorDict) else part for part in parts]
        is_single = isinstance(rows, int)
        at = int(rows if is_single else rows[0])  # type: ignore[index]
        if isinstance(rows, Tensor) and torch.equal(rows, torch.arange(self.clients)):
            # Everything at once and in order: nothing to copy within host memory.
            self._parts = [{p: t.cpu() for p, t in part.items()} for part in results]
            return
        shapes = [tree.shapes(part.items(), axes=0 if is_single else 1) for part in results]
        if not self._parts:
            self._first, self._shapes = at, shapes
            self._parts = [
                {
                    p: self._room.empty((self.clients, *(t.shape if is_single else t.shape[1:])), t.dtype)
                    for p, t in part.items()
                }
                for part in results
            ]
        for shape, expected in zip(shapes, self._shapes, strict=True):
            if shape != expected:
                raise self._unlike(at, self._first, tree.unlike(shape, expected))
        for stacked, part in zip(self._parts, results, strict=True):
            for path, tensor in part.items():
                stacked[path][rows] = tensor.cpu()  # index assignment needs values on the same device

    def updates(self) -> CohortUpdates:
        """Return the collected results of training."""
        replies, metrics, flags = self.parts()
        return CohortUpdates(replies, metrics, flags["finite"])

    def parts(self) -> Parts:
        """Return the collected TensorDicts."""
        return tuple(tree.nest(part.items(), [self.clients]) for part in self._parts)


def all_finite(*parts: Mapping[str, Tensor]) -> Tensor:
    """Return whether one client has only finite numbers in all `parts`, bool 0-d."""
    sums = (float(t.sum()) for part in parts for t in part.values() if t.is_floating_point())
    return torch.tensor(all(map(math.isfinite, sums)))


def finite_clients(*parts: TensorDict) -> Tensor:
    """Return which clients have only finite numbers in all `parts` ([clients, ...] each), bool [clients]."""
    clients = parts[0].batch_size[0]
    ok = torch.ones(clients, dtype=torch.bool)
    for part in parts:
        for _, tensor in tree.leaves(part):
            if tensor.is_floating_point():
                ok &= torch.isfinite(tensor.reshape(clients, -1).sum(1))
    return ok


ClientFunction = Callable[[Client, TensorDict, TensorDict], Parts]
"""(client, its state, what it received) -> any number of TensorDicts."""


@dataclass(frozen=True)
class CohortTask:
    """A task of an engine: clients, the function that each of them runs, and the message that it receives."""

    function: ClientFunction
    cohort: Cohort
    received: TensorDict
    """One message for all; with `index`, a table of which each client receives the rows that `index` names."""
    index: Tensor | None = None
    """int64 [clients] or [clients, M]."""

    @classmethod
    def of(cls, function: ClientFunction, cohort: Cohort, message: TensorDict | PerClient) -> CohortTask:
        """Return the task of clients that receive a message."""
        return cls(function, cohort, *table_of(message))

    def part(self, positions: Sequence[int] | Tensor) -> CohortTask:
        """Return the task of the clients at `positions`."""
        rows = torch.as_tensor(positions, dtype=torch.int64)
        index = None if self.index is None else self.index[rows]
        return replace(self, cohort=self.cohort.part(rows.tolist()), index=index)

    def chunk(self, positions: Sequence[int] | Tensor) -> CohortTask:
        """Return the task of the clients at `positions`, with its own privacy record if the cohort has one."""
        part = self.part(positions)
        record = None if self.cohort.record is None else PrivacyRecord()
        return replace(part, cohort=replace(part.cohort, record=record))

    def note(self, record: PrivacyRecord | None) -> None:
        """Add a chunk's record of private data."""
        if self.cohort.record is not None and record is not None:
            self.cohort.record.merge(record)

    @property
    def about(self) -> str:
        """The name of the clients' function in messages: its `about` if it has one."""
        return str(getattr(self.function, "about", "client code"))

    def unlike(self, position: int, first: int, difference: str) -> ClientError:
        """Return the error for a client whose result differs in structure from another client's."""
        ids, number = self.cohort.ids, self.cohort.round + 1
        return ClientError(
            f"{self.about} of client {ids[position]}, round {number}: its result {difference}, unlike that of client "
            f"{ids[first]}; all clients of a round must return the same names, shapes and dtypes; pad shorter tensors, "
            "and return their real length in addition"
        )


@dataclass(frozen=True)
class Stored:
    """The private states in a store, or with `fresh` the initial states of its clients."""

    store: StateStore
    fresh: bool = False

    def of(self, ids: Sequence[int]) -> TensorDict:
        """Return the states of clients, [clients, ...]."""
        return self.store.fresh(ids) if self.fresh else self.store.get(ids)


@dataclass(frozen=True)
class Inference:
    """A task of computing models' outputs on samples."""

    model: Model
    states: TensorDict
    """[models, ...]"""
    source: Source
    rows: Tensor | Sequence[Tensor]
    """Rows of the source, int64 [rows]: the same for all models, or one tensor for each."""

    @property
    def models(self) -> int:
        """Number of models."""
        return int(self.states.batch_size[0])

    @property
    def samples(self) -> int:
        """Number of samples that go through a model, summed over models."""
        return self.models * len(self.rows) if isinstance(self.rows, Tensor) else sum(map(len, self.rows))

    def of_models(self, step: int) -> list[Inference]:
        """Return the task in pieces of `step` models each."""
        pieces = []
        for start in range(0, self.models, step):
            rows = self.rows if isinstance(self.rows, Tensor) else self.rows[start : start + step]
            pieces.append(replace(self, states=self.states[start : start + step], rows=rows))
        return pieces

    def of_rows(self, step: int) -> list[Inference]:
        """Return the task in pieces of `step` samples for each model."""
        if isinstance(self.rows, Tensor):
            return [replace(self, rows=rows) for rows in torch.split(self.rows, step)]
        starts = range(0, max(map(len, self.rows), default=0), step)
        return [replace(self, rows=[r[s : s + step] for r in self.rows]) for s in starts]

    def joined(self, pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the outputs of each model from those of the pieces, which have some models or some rows each."""
        if sum(map(len, pieces)) == self.models:
            return [outputs for piece in pieces for outputs in piece]
        return [torch.cat([piece[i] for piece in pieces]) for i in range(self.models)]


class Engine(Protocol):
    """Applies client functions to cohorts; every engine returns the same numbers up to float rounding."""

    @property
    def name(self) -> str:
        """The engine's name in a run's records."""

    @property
    def precision(self) -> str:
        """The precision of products: float32, tf32 or bfloat16; the server's own networks use it as well."""

    def hold(self, store: StateStore) -> StateStore:
        """Return a store with the states of `store`, in the place that this engine needs."""

    def train(self, task: CohortTask, store: StateStore) -> CohortUpdates:
        """Run a function that returns (new state, reply, metrics) on every client with its state of `store`.

        New states are staged: they take effect when the caller commits them.
        """

    def map(self, task: CohortTask, states: TensorDict | Stored) -> Parts:
        """Return the function's results for every client, stacked: [clients, ...] in the order of the cohort's ids.

        `states` are [clients, ...], or a reference to their store; nothing is stored.
        """

    def predict(self, task: Inference) -> list[Tensor]:
        """Return the outputs of each model on its rows, [rows, outputs]."""


def unsupported(error: BaseException) -> bool:
    """Return whether an error means that `vmap` lacks a rule for the model, rather than that the model is wrong.

    In bfloat16 a layer that is mapped without a rule of its own gets factors of two types, since autocast does not see
    it.
    """
    marks = ("vmap", "Batching rule", "batching rule", "functorch", "BFloat16")
    return any(mark in str(error) for mark in marks)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, for a log, or its type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
