"""A pool of workers: the chunks of a cohort, each run by whichever worker is free, with the numbers of one process.

How a cohort is cut depends on the cohort and the engine alone, never on how many workers there are, so neither their
number nor the order in which they finish changes a bit of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.engines.base import CohortTask, Inference, Stored
from tailorfl.engines.in_process import InProcessEngine
from tailorfl.engines.results import CohortUpdates, Parts, Stacked, finite_clients
from tailorfl.engines.state import StateStore
from tailorfl.privacy.ledger import PrivacyRecord, Uses
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort

WORTH = 2e8
"""Products (samples times scalars of the model) from which on an evaluation is shared: what takes some milliseconds."""


class ChunkStates(Protocol):
    """Where a worker finds the private states of a chunk's clients."""

    def read(self) -> TensorDict:
        """Return them, [clients, ...]."""

    def write(self, states: TensorDict) -> TensorDict | None:
        """Stage the next ones, or return them for the process that keeps the store to stage."""


@dataclass(frozen=True)
class ChunkTask:
    """A chunk of a cohort; with `training`, its new states are staged."""

    engine: InProcessEngine
    task: CohortTask
    states: ChunkStates
    training: bool

    def run(self) -> tuple[Parts, Mapping[int, Uses], TensorDict | None]:
        """Return what the function makes of the clients, what it used of private data, and states yet to be staged.

        In training the first are (replies, metrics, whose update is finite).
        """
        parts = self.engine.map(self.task, self.states.read())
        if not self.training:
            return parts, _uses(self.task), None
        new, replies, metrics = parts
        finite = finite_clients(new, replies)
        parts = replies, metrics, TensorDict({"finite": finite}, batch_size=finite.shape)
        return parts, _uses(self.task), self.states.write(new)

    def __str__(self) -> str:
        ids, number = self.task.cohort.ids, self.task.cohort.round + 1
        first = ", ".join(map(str, ids[:5])) + (", ..." if len(ids) > 5 else "")
        doing = "training" if self.training else "making the models of"
        return f"{doing} client{'s' if len(ids) > 1 else ''} {first} in round {number}"


@dataclass(frozen=True)
class PredictTask:
    """The outputs of several models."""

    engine: InProcessEngine
    inference: Inference

    def run(self) -> list[Tensor]:
        """Return the outputs of each model."""
        return self.engine.predict(self.inference)

    def __str__(self) -> str:
        return "evaluating"


Task = ChunkTask | PredictTask


class WorkerPool(Protocol):
    """Workers on one machine or on several."""

    def share(self, store: StateStore) -> None:
        """Keep states from now on where the workers find them."""

    def states(self, stored: Stored, chunks: Sequence[Sequence[int]]) -> list[ChunkStates]:
        """Return for each chunk of clients where a worker finds their states."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        """Yield (position in `tasks`, its result) in the order in which they finish.

        Tensors of a result are valid until the next one is asked for.

        Raises:
            WorkerError: a worker was lost, and the call cannot go on without it.
            Exception: the error of the first task that failed.
        """

    def close(self) -> None:
        """End the workers; the next `run` starts new ones."""


class PooledEngine:
    """An engine whose chunks of clients run in a pool of workers.

    Args:
        kind: the engine that each of them runs.
        pool: the workers.
    """

    def __init__(self, kind: InProcessEngine, pool: WorkerPool) -> None:
        self._kind, self.pool = kind, pool

    @property
    def name(self) -> str:
        """That of the engine that the workers run: the numbers are the same."""
        return self._kind.name

    @property
    def precision(self) -> str:
        """That of the engine that the workers run."""
        return self._kind.precision

    def hold(self, store: StateStore) -> StateStore:
        """Return `store`, whose states are from now on where the workers find them."""
        self.pool.share(store)
        return store

    def train(self, task: CohortTask, store: StateStore) -> CohortUpdates:
        """Run the function on every client with its state of `store`."""
        where, parts = self._cut(task)
        out = Stacked(len(task.cohort.ids), self._kind.room, task.unlike)
        self._collect(out, where, parts, Stored(store), task, training=True)
        return out.updates()

    def map(self, task: CohortTask, states: TensorDict | Stored) -> Parts:
        """Return what the function makes of every client, stacked.

        States that are given are mapped in this process. Of those that are kept the first chunk runs in this process;
        if the function needed no training there, so do the others.
        """
        if isinstance(states, TensorDict):
            return self._kind.map(task, states)
        where, parts = self._cut(task)
        out = Stacked(len(task.cohort.ids), self._kind.room, task.unlike)
        watched = WatchedFunction(task)
        while parts and not watched.trained:
            here = replace(parts.pop(0), function=watched)
            out.put(where.pop(0), [dict(tree.leaves(part)) for part in self._kind.map(here, states)])
            _note(task.cohort, _uses(here))
        self._collect(out, where, parts, states, task, training=False)
        return out.parts()

    def predict(self, asked: Inference) -> list[Tensor]:
        """Return the outputs of each model on its rows."""
        if asked.samples * (asked.model.scalars + asked.model.held_scalars) <= WORTH:
            return self._kind.predict(asked)
        tasks = [PredictTask(self._kind, share) for share in self._kind.shares(asked)]
        pieces: list[list[Tensor]] = [[] for _ in tasks]
        for k, outputs in self.pool.run(tasks):
            pieces[k] = [t.clone() for t in outputs]
        return asked.joined(pieces)

    def _collect(
        self,
        out: Stacked,
        where: Sequence[Tensor],
        parts: Sequence[CohortTask],
        states: Stored,
        task: CohortTask,
        training: bool,
    ) -> None:
        """Run chunks in the pool and put their results into `out`."""
        if not parts:
            return
        held = self.pool.states(states, [part.cohort.ids for part in parts])
        tasks = [ChunkTask(self._kind, part, rows, training) for part, rows in zip(parts, held, strict=True)]
        whole = len(where[0]) == len(task.cohort.ids)  # `Stacked` keeps these tensors as they are
        for k, (results, uses, new) in self.pool.run(tasks):
            kept = [part.clone() if whole else part for part in results]
            out.put(where[k], [dict(tree.leaves(part)) for part in kept])
            _note(task.cohort, uses)
            if new is not None:
                states.store.stage(parts[k].cohort.ids, new)

    def _cut(self, task: CohortTask) -> tuple[list[Tensor], list[CohortTask]]:
        """Return the positions of each chunk, and the chunks, each with a ledger of its own if the cohort has one."""
        where = list(self._kind.chunks(task.cohort))
        parts = [task.part(positions) for positions in where]
        if task.cohort.record is not None:
            parts = [replace(part, cohort=replace(part.cohort, record=PrivacyRecord())) for part in parts]
        return where, parts


class WatchedFunction:
    """The function of a task, and whether any client that ran it has trained."""

    def __init__(self, task: CohortTask) -> None:
        self._function, self.about, self.trained = task.function, task.about, False

    def __call__(self, client: Client, state: TensorDict, message: TensorDict) -> Parts:
        """Call the function, and note whether the client trained."""
        parts = self._function(client, state, message)
        self.trained = self.trained or bool(client.metrics)
        return parts


def _uses(task: CohortTask) -> Mapping[int, Uses]:
    """Return what the clients of a task used of private data."""
    return {} if task.cohort.record is None else task.cohort.record.uses


def _note(cohort: Cohort, uses: Mapping[int, Uses]) -> None:
    if cohort.record is not None:
        cohort.record.uses.update(uses)
