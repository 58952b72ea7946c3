"""A pool of workers: the chunks of a cohort, each run by whichever worker is free, with the numbers of one process.

How a cohort is cut depends on the cohort and the engine alone, never on how many workers there are, so neither their
number nor the order in which they finish changes a bit of the result.

Tasks and results travel as bytes, and beside them the tensors, which each pool moves in its own way. What stays the
same for a whole run (data, models, methods, stores of states) is known to both sides and travels as a number.
Everything else is pickled, between processes of one program that trust each other.
"""

from __future__ import annotations

import io
import logging
import pickle
import queue
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from logging.handlers import QueueHandler
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.method import Method
from tailorfl.data.source import Source
from tailorfl.engines.base import CohortTask, CohortUpdates, Inference, Parts, Stacked, Stored, finite_clients
from tailorfl.engines.in_process import InProcessEngine
from tailorfl.engines.state import StateStore
from tailorfl.errors import ClientError
from tailorfl.models.functional import Model
from tailorfl.models.split import Split
from tailorfl.privacy import PrivacyRecord

WORTH = 2e8
"""Products (samples times scalars of the model) from which on an evaluation is shared: what takes some milliseconds."""


class ChunkStates(Protocol):
    """The private states of a chunk's clients, as a worker finds them."""

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

    def run(self) -> tuple[Parts, PrivacyRecord | None, TensorDict | None]:
        """Return what the function makes of the clients, its uses of private data, and states yet to be staged.

        In training the first are (replies, metrics, whose update is finite).
        """
        parts = self.engine.map(self.task, self.states.read())
        if not self.training:
            return parts, self.task.cohort.record, None
        new, replies, metrics = parts
        finite = finite_clients(new, replies)
        parts = replies, metrics, TensorDict({"finite": finite}, batch_size=finite.shape)
        return parts, self.task.cohort.record, self.states.write(new)

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
        positions, parts = self._cut(task)
        out = Stacked(len(task.cohort.ids), self._kind.room, task.unlike)
        self._collect(out, positions, parts, Stored(store), task, training=True)
        return out.updates()

    def map(self, task: CohortTask, states: TensorDict | Stored) -> Parts:
        """Return what the function makes of every client, stacked.

        States that are given are mapped in this process. Of those that are kept the first chunk runs in this process;
        if the function needed no training there, so do the others.
        """
        if isinstance(states, TensorDict):
            return self._kind.map(task, states)
        positions, parts = self._cut(task)
        out = Stacked(len(task.cohort.ids), self._kind.room, task.unlike)
        watched = WatchedFunction(task)
        while parts and not watched.trained:
            local_part = replace(parts.pop(0), function=watched)
            out.put(positions.pop(0), self._kind.map(local_part, states))
            task.note(local_part.cohort.record)
        self._collect(out, positions, parts, states, task, training=False)
        return out.parts()

    def predict(self, task: Inference) -> list[Tensor]:
        """Return the outputs of each model on its rows."""
        if task.samples * (task.model.scalars + task.model.held_scalars) <= WORTH:
            return self._kind.predict(task)
        tasks = [PredictTask(self._kind, share) for share in self._kind.shares(task)]
        pieces: list[list[Tensor]] = [[] for _ in tasks]
        for k, outputs in self.pool.run(tasks):
            pieces[k] = [t.clone() for t in outputs]
        return task.joined(pieces)

    def _collect(
        self,
        out: Stacked,
        positions: Sequence[Tensor],
        parts: Sequence[CohortTask],
        states: Stored,
        task: CohortTask,
        training: bool,
    ) -> None:
        """Run chunks in the pool and put their results into `out`."""
        if not parts:
            return
        chunk_states = self.pool.states(states, [part.cohort.ids for part in parts])
        tasks = [
            ChunkTask(self._kind, part, rows, training)
            for part, rows in zip(parts, chunk_states, strict=True)
        ]
        is_only_chunk = len(positions[0]) == len(task.cohort.ids)  # `Stacked` keeps these tensors as they are
        for k, (results, record, new) in self.pool.run(tasks):
            copies = [part.clone() if is_only_chunk else part for part in results]
            out.put(positions[k], copies)
            task.note(record)
            if new is not None:
                states.store.stage(parts[k].cohort.ids, new)

    def _cut(self, task: CohortTask) -> tuple[list[Tensor], list[CohortTask]]:
        """Return the positions of each chunk, and the chunks, each with a ledger of its own if the cohort has one."""
        positions = list(self._kind.chunks(task.cohort))
        return positions, [task.chunk(chosen) for chosen in positions]


class WatchedFunction:
    """The function of a task, and whether any client that ran it has trained."""

    def __init__(self, task: CohortTask) -> None:
        self._function, self.about, self.trained = task.function, task.about, False

    def __call__(self, client: Client, state: TensorDict, message: TensorDict) -> Parts:
        """Call the function, and note whether the client trained."""
        parts = self._function(client, state, message)
        self.trained = self.trained or bool(client.metrics)
        return parts


@dataclass(frozen=True)
class TaskResult:
    """A value or an error, and what the worker would have written to the log."""

    value: Any = None
    error: Exception | None = None
    records: list[logging.LogRecord] = field(default_factory=list)

    def get(self) -> Any:
        """Return the value.

        Raises:
            the error, of the type that it had in the worker.
        """
        for record in self.records:
            logging.getLogger(record.name).handle(record)
        if self.error is not None:
            raise self.error
        return self.value


def logged_records() -> Callable[[], list[logging.LogRecord]]:
    """Take this process's log away from its handlers, whose locks another thread may have held when it was forked.

    Return a function that gives what was logged since it was last asked.
    """
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logging.getLogger().handlers = [QueueHandler(records)]
    for name in list(logging.Logger.manager.loggerDict):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
    return lambda: [records.get() for _ in range(records.qsize())]


def result_of(received: Callable[[], Task], logged: Callable[[], list[logging.LogRecord]]) -> TaskResult:
    """Run the task that `received` gives, and return its result, error or not."""
    try:
        with torch.no_grad():
            value = received().run()
        return TaskResult(value, records=logged())
    except Exception as error:
        return TaskResult(error=_portable(error), records=logged())


def _portable(error: Exception) -> Exception:
    """Return an error that another process can be sent: itself with its traceback as a note, or its words."""
    note = f"In a worker process:\n{''.join(traceback.format_exception(error))}"
    try:
        sent: Exception = pickle.loads(pickle.dumps(error))
    except Exception:  # many errors of libraries cannot be pickled
        sent = ClientError(f"{type(error).__name__}: {error}")
    sent.add_note(note)
    return sent


LASTING = (Source, Model, Split, Method, StateStore)
"""Types of objects that are sent once; so are functions without a name to import them by."""

Load = Callable[[int, torch.dtype, tuple[int, ...]], Tensor]
"""(number of a tensor in its message, dtype, shape) -> the tensor."""


class Known:
    """The objects that both sides have, by number."""

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self.objects: list[Any] = list(objects)
        self._numbers = {id(o): n for n, o in enumerate(self.objects)}

    def __len__(self) -> int:
        return len(self.objects)

    def number(self, value: Any) -> int:
        """Return the number of an object, a new one if it was not known."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self._numbers[id(value)]


class Packing:
    """Mixin of pickle.Pickler: takes tensors out of the message, and known objects too unless `known` is None."""

    known: Known | None
    tensors: list[Tensor]
    numbers: dict[int, int]

    def persistent_id(self, value: Any) -> Any:
        """Return what stands in the message for a tensor or a known object; None for what is pickled."""
        if type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided:
            number = self.numbers.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
            return "tensor", number, value.dtype, tuple(value.shape)
        if self.known is None:
            return None
        nameless = isinstance(value, types.FunctionType) and "<" in value.__qualname__
        return ("known", self.known.number(value)) if nameless or isinstance(value, LASTING) else None

    def reducer_override(self, value: Any) -> Any:
        """Take a TensorDict apart by its own items; leave the rest to the base class."""
        if isinstance(value, TensorDict):
            return TensorDict, (dict(value.items()), tuple(value.batch_size))
        inherited = getattr(super(), "reducer_override", None)
        return NotImplemented if inherited is None else inherited(value)


class Packer(Packing, pickle.Pickler):
    """Packs for processes that have the same modules."""


def pack(value: Any, known: Known | None, packer: Any = Packer) -> tuple[bytes, list[Tensor]]:
    """Return the message that says `value`, and its tensors by number."""
    buffer = io.BytesIO()
    writer = packer(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    writer.known, writer.tensors, writer.numbers = known, [], {}
    writer.dump(value)
    return buffer.getvalue(), writer.tensors


def unpack(message: bytes, load: Load, known: Known) -> Any:
    """Return what a message says, with its tensors from `load`."""
    return _Unpacker(io.BytesIO(message), load, known).load()


class _Unpacker(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, load: Load, known: Known) -> None:
        super().__init__(buffer)
        self._load, self._known = load, known
        self._loaded: dict[int, Tensor] = {}

    def persistent_load(self, mark: Any) -> Any:
        if mark[0] == "known":
            return self._known.objects[mark[1]]
        _, number, dtype, shape = mark
        if number not in self._loaded:
            self._loaded[number] = self._load(number, dtype, shape)
        return self._loaded[number]
