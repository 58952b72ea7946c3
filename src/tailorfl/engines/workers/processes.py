"""Worker processes on this machine. Data, states and messages lie in memory that all of them see.

On Linux workers are forked when they are first needed: they inherit data and models as they are, and own nothing but a
stack and what they compute. Elsewhere they are started anew, and what they need is pickled once. When a call needs
something they do not know (another test set, say), they are started again.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing  # registers how tensors are handed to a process that is being started
from tensordict import TensorDict

from tailorfl.engines.memory import keep_freed_memory
from tailorfl.engines.state import StateStore
from tailorfl.engines.workers.answers import Answer, answer, own_log
from tailorfl.engines.workers.shared import Block
from tailorfl.engines.workers.tasks import States, Task
from tailorfl.engines.workers.wire import Known, Outbox, read
from tailorfl.errors import ConfigError, WorkerError

START = "fork" if sys.platform == "linux" else "spawn"
"""How workers are started."""

_ENDS: weakref.WeakSet[Connection] = weakref.WeakSet()
"""This process's ends of the pipes to all its workers; a worker that inherited one would hide that it was closed."""


@dataclass(frozen=True)
class SharedRows:
    """Rows of a store that all processes see."""

    store: StateStore
    capacity: int
    ids: tuple[int, ...]
    old: list[int] | None
    """Where the states are; None asks for the clients' starts."""
    new: list[int]
    """Where the next ones go."""

    def read(self) -> TensorDict:
        """Returns the states, [clients, ...]."""
        if self.old is None:
            return self.store.fresh(self.ids)
        self.store.see(self.capacity)
        return self.store.fetch(self.old, self.ids)

    def write(self, states: TensorDict) -> None:
        """Stages the next ones."""
        self.store.write(self.new, states)


class _Worker:
    """A process and what leads to it. What it answers lies in its two blocks in turn.

    So it may go on with the next chunk while what came out of the last one is still being copied.
    """

    def __init__(self, number: int, inbox: Block, known: Known, lifeline: Connection) -> None:
        context: Any = multiprocessing.get_context(START)
        self.number, self.outboxes, self.turn = number, (Block(), Block()), 0
        self.pipe, theirs = context.Pipe()
        _ENDS.add(self.pipe)
        self.process = context.Process(
            target=_serve,
            args=(theirs, lifeline, inbox, self.outboxes, known.objects),
            name=f"tailorfl worker {number}",
            daemon=True,
        )
        with warnings.catch_warnings():
            # A fork copies this thread alone. What others might hold (locks of the log, threads of torch) is renewed
            # or left alone in the worker.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()


class Processes:
    """A team of worker processes with one thread each.

    Args:
        workers: how many.

    Raises:
        ConfigError: on Windows, where open files cannot be handed to a process as this does it.
    """

    def __init__(self, workers: int) -> None:
        if sys.platform == "win32":
            raise ConfigError("engine.workers needs Linux or macOS; leave it out, or use WSL")
        self.size = workers
        self._known = Known()
        self._inbox = Block()
        self._outbox = Outbox(self._inbox, self._known)
        self._workers: list[_Worker] = []
        self._understood = 0
        self._end: weakref.finalize[Any, Processes] | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that are running."""
        return tuple(worker.process.pid or 0 for worker in self._workers)

    def hold(self, store: StateStore) -> StateStore:
        """Returns `store`, whose states are from now on where workers see them."""
        store.share()
        return store

    def states(self, store: StateStore, chunks: Sequence[Sequence[int]], fresh: bool) -> list[States]:
        """Returns the rows of each chunk's clients; what is written there is staged."""
        store.share()
        new = [[] if fresh else store.reserve(ids) for ids in chunks]
        return [
            SharedRows(store, store.capacity, tuple(ids), None if fresh else store.rows(ids), rows)
            for ids, rows in zip(chunks, new, strict=True)
        ]

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        """Yields (position in `tasks`, what came out) as it is done, starting with the first ones."""
        self._outbox.clear()
        messages = [self._outbox.write(task) for task in tasks]
        if not self._workers or len(self._known) > self._understood:
            self._start()
        waiting, busy = iter(range(len(tasks))), dict[_Worker, int]()
        failed: dict[int, Answer] = {}

        def give(worker: _Worker) -> None:
            k = None if failed else next(waiting, None)
            if k is not None:
                busy[worker] = k
                try:
                    worker.pipe.send_bytes(messages[k])
                except OSError:
                    raise self._lost(worker, tasks[k]) from None

        try:
            for worker in self._workers:
                give(worker)
            while busy:
                ready = wait([worker.pipe for worker in busy])
                for worker in [w for w in busy if w.pipe in ready]:
                    k = busy.pop(worker)
                    said = self._heard(worker, tasks[k])
                    if said.error is not None:
                        failed[k] = said
                    give(worker)
                    if not failed:
                        yield k, said.get()
        except BaseException:
            self.close()  # what the others are doing is wanted no more, and no answer to the next call
            raise
        if failed:  # the error of one process: that of the first chunk that has one
            failed[min(failed)].get()

    def close(self) -> None:
        """Ends the workers at once."""
        if self._end is not None:
            self._end()
        self._workers, self._end = [], None

    def _start(self) -> None:
        self.close()
        theirs, mine = multiprocessing.Pipe(duplex=False)
        _ENDS.add(mine)
        self._understood = len(self._known)
        self._end = weakref.finalize(self, _end_all, os.getpid(), self._workers, mine)
        try:
            for number in range(1, self.size + 1):
                self._workers.append(_Worker(number, self._inbox, self._known, theirs))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            self.close()
            raise WorkerError(
                f"worker processes are started anew on {sys.platform}, and something they need cannot be pickled: "
                f"{error}; make models of functions at the top level of a module, or leave out engine.workers"
            ) from error
        except OSError as error:
            self.close()
            raise WorkerError(f"worker processes cannot be started: {error}; lower engine.workers") from error
        finally:
            theirs.close()

    def _heard(self, worker: _Worker, task: Task) -> Answer:
        try:
            said = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            raise self._lost(worker, task) from None
        block = worker.outboxes[worker.turn]
        worker.turn = 1 - worker.turn
        found: Answer = read(said, block, self._known)
        return found

    def _lost(self, worker: _Worker, task: Task) -> WorkerError:
        worker.process.join(timeout=10)
        code = worker.process.exitcode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        killed = ", as the system does where memory runs out" if code == -signal.SIGKILL else ""
        return WorkerError(
            f"worker {worker.number} of {self.size} (process {worker.process.pid}) {how}{killed}, while "
            f"{task.about()}; nothing of this round was kept. Lower engine.workers or engine.chunk, or set "
            "engine.states=disk; a run with a result folder goes on from its last checkpoint with --resume"
        )


def _end_all(owner: int, workers: list[_Worker], lifeline: Connection) -> None:
    """Ends worker processes; in a worker, which inherits this duty, nothing."""
    if os.getpid() != owner:
        return
    lifeline.close()
    for worker in workers:
        worker.pipe.close()
        worker.process.kill()
    for worker in workers:
        worker.process.join()


def _serve(
    pipe: Connection,
    lifeline: Connection,
    inbox: Block,
    outboxes: tuple[Block, Block],
    objects: list[Any],
) -> None:
    """What a worker process does until the other end of its pipe is closed."""
    for end in list(_ENDS):
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    keep_freed_memory()
    logged = own_log()
    threading.Thread(target=_leave_with_parent, args=(lifeline,), daemon=True).start()
    known = Known(objects)
    boxes = [Outbox(block, known) for block in outboxes]
    turn = 0
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        box, turn = boxes[turn], 1 - turn
        box.clear()
        pipe.send_bytes(box.write(answer(functools.partial(read, message, inbox, known), logged)))


def _leave_with_parent(lifeline: Connection) -> None:
    """Waits until no one holds the other end, which says that the process that started this one is gone."""
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
