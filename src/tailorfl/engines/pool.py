"""A pool of workers: any free worker runs the next chunk of a cohort, with the same results as in one process.

How a cohort is cut depends only on the cohort and the engine, never on the number of workers, so neither their number
nor the order in which they finish changes a bit of the result.

Tasks and results are sent as bytes, and separately their tensors, which each pool moves in its own way. Objects that
stay the same for a whole run (data, models, methods, stores of states) are known to both sides and sent as numbers.
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
"""Samples times scalars of the model above which an evaluation is shared: it then takes some milliseconds."""


class ChunkStates(Protocol):
    """Access of a worker to the private states of a chunk's clients."""

    def read(self) -> TensorDict:
        """Return the states, [clients, ...]."""

    def write(self, states: TensorDict) -> TensorDict | None:
        """Stage the new states, or return them so that the process with the store stages them."""


@dataclass(frozen=True)
class ChunkTask:
    """A chunk of a cohort as a task; with `training`, its new states are staged."""

    engine: InProcessEngine
    task: CohortTask
    states: ChunkStates
    training: bool

    def run(self) -> tuple[Parts, PrivacyRecord | None, TensorDict | None]:
        """Return the function's results for the clients, the privacy record, and states yet to be staged.

        In training the results are (replies, metrics, flags of finite updates).
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
    """The outputs of several models, as a task."""

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
        """Keep states from now on where the workers can access them."""

    def states(self, stored: Stored, chunks: Sequence[Sequence[int]]) -> list[ChunkStates]:
        """Return a worker's access to the states of each chunk's clients."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        """Yield (position in `tasks`, its result) in the order in which they finish.

        Tensors of a result are valid until the next result is requested.

        Raises:
            WorkerError: a worker was lost, and the call cannot continue without it.
            Exception: the error of the first task that failed.
        """

    def close(self) -> None:
        """End the workers; the next `run` starts new ones."""


class PooledEngine:
    """An engine whose chunks of clients run in a pool of workers.

    Args:
        kind: the engine that each worker runs.
        pool: the workers.
    """

    def __init__(self, kind: InProcessEngine, pool: WorkerPool) -> None:
        self._kind, self.pool = kind, pool

    @property
    def name(self) -> str:
        """The name of the engine that the workers run: results are the same."""
        return self._kind.name

    @property
    def precision(self) -> str:
        """The precision of the engine that the workers run."""
        return self._kind.precision

    def hold(self, store: StateStore) -> StateStore:
        """Return `store`, whose states the workers can access from now on."""
        self.pool.share(store)
        return store

    def train(self, task: CohortTask, store: StateStore) -> CohortUpdates:
        """Run the function on every client with its state of `store`."""
        positions, parts = self._cut(task)
        out = Stacked(len(task.cohort.ids), self._kind.room, task.unlike)
        self._collect(out, positions, parts, Stored(store), task, training=True)
        return out.updates()

    def map(self, task: CohortTask, states: TensorDict | Stored) -> Parts:
        """Return the function's results for every client, stacked.

        If `states` are tensors, all clients run in this process. If they are in a store, chunks run in this process
        until one has trained; the pool runs the others.
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
        is_only_chunk = len(positions[0]) == len(task.cohort.ids)  # `Stacked` then makes no copies
        for k, (results, record, new) in self.pool.run(tasks):
            copies = [part.clone() if is_only_chunk else part for part in results]
            out.put(positions[k], copies)
            task.note(record)
            if new is not None:
                states.store.stage(parts[k].cohort.ids, new)

    def _cut(self, task: CohortTask) -> tuple[list[Tensor], list[CohortTask]]:
        """Return the positions of each chunk, and the chunks, each with its own record if the cohort has one."""
        positions = list(self._kind.chunks(task.cohort))
        return positions, [task.chunk(chosen) for chosen in positions]


class WatchedFunction:
    """The function of a task, which records whether any client that ran it has trained."""

    def __init__(self, task: CohortTask) -> None:
        self._function, self.about, self.trained = task.function, task.about, False

    def __call__(self, client: Client, state: TensorDict, message: TensorDict) -> Parts:
        """Call the function and record whether the client trained."""
        parts = self._function(client, state, message)
        self.trained = self.trained or bool(client.metrics)
        return parts


@dataclass(frozen=True)
class TaskResult:
    """A value or an error, and the worker's log records."""

    value: Any = None
    error: Exception | None = None
    records: list[logging.LogRecord] = field(default_factory=list)

    def get(self) -> Any:
        """Return the value.

        Raises:
            the error, with its type in the worker.
        """
        for record in self.records:
            logging.getLogger(record.name).handle(record)
        if self.error is not None:
            raise self.error
        return self.value


def logged_records() -> Callable[[], list[logging.LogRecord]]:
    """Detach this process's log from its handlers, whose locks another thread may have held during the fork.

    Return a function that returns the records since its last call.
    """
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logging.getLogger().handlers = [QueueHandler(records)]
    for name in list(logging.Logger.manager.loggerDict):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
    return lambda: [records.get() for _ in range(records.qsize())]


def result_of(received: Callable[[], Task], logged: Callable[[], list[logging.LogRecord]]) -> TaskResult:
    """Run the task that `received` returns, and return its result, error or not."""
    try:
        with torch.no_grad():
            value = received().run()
        return TaskResult(value, records=logged())
    except Exception as error:
        return TaskResult(error=_portable(error), records=logged())


def _portable(error: Exception) -> Exception:
    """Return an error that can be sent to another process: the error itself or its message, with a traceback note."""
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
    """The objects that both sides know, by number."""

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self.objects: list[Any] = list(objects)
        self._numbers = {id(o): n for n, o in enumerate(self.objects)}

    def __len__(self) -> int:
        return len(self.objects)

    def number(self, value: Any) -> int:
        """Return the number of an object; an unknown object gets a new one."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self._numbers[id(value)]


class Packing:
    """Mixin of pickle.Pickler: takes tensors out of the message, and known objects unless `known` is None."""

    known: Known | None
    tensors: list[Tensor]
    numbers: dict[int, int]

    def persistent_id(self, value: Any) -> Any:
        """Return the placeholder of a tensor or known object in the message; None for values that are pickled."""
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
        """Reduce a TensorDict to its items; leave other values to the base class."""
        if isinstance(value, TensorDict):
            return TensorDict, (dict(value.items()), tuple(value.batch_size))
        inherited = getattr(super(), "reducer_override", None)
        return NotImplemented if inherited is None else inherited(value)


class Packer(Packing, pickle.Pickler):
    """Packs for processes that have the same modules."""


def pack(value: Any, known: Known | None, packer: Any = Packer) -> tuple[bytes, list[Tensor]]:
    """Return the message for `value`, and its tensors by number."""
    buffer = io.BytesIO()
    writer = packer(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    writer.known, writer.tensors, writer.numbers = known, [], {}
    writer.dump(value)
    return buffer.getvalue(), writer.tensors


def unpack(message: bytes, load: Load, known: Known) -> Any:
    """Return the value of a message, with its tensors from `load`."""
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
