"""A pool of processes on this machine. Data, states and messages are in shared memory.

On Linux workers are forked when they are first needed, and inherit data and models. Elsewhere they are spawned, and the
objects they need are pickled once. When a call needs objects that they do not know (another test set, say), they are
restarted.
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
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing  # registers how tensors are sent to a process that is being started
from tensordict import TensorDict
from torch import Tensor

from tailorfl.engines.base import Stored
from tailorfl.engines.memory import Block, aligned, keep_freed_memory
from tailorfl.engines.pool import (
    ChunkStates,
    Known,
    Task,
    TaskResult,
    logged_records,
    pack,
    result_of,
    unpack,
)
from tailorfl.engines.state import StateStore
from tailorfl.errors import ConfigError, WorkerError, first_few

START = "fork" if sys.platform == "linux" else "spawn"
"""The start method of workers."""
AHEAD = 2
"""Chunks in progress for each worker: one in training, and one whose result is being collected."""


@dataclass(frozen=True)
class SharedRows:
    """Rows of a store that all processes share."""

    store: StateStore
    capacity: int
    ids: tuple[int, ...]
    old: list[int] | None
    """Rows of the states; None reads the clients' initial states."""
    new: list[int]
    """Rows of the new states."""

    def read(self) -> TensorDict:
        """Return the states, [clients, ...]."""
        if self.old is None:
            return self.store.fresh(self.ids)
        self.store.see(self.capacity)
        return self.store.fetch(self.old, self.ids)

    def write(self, states: TensorDict) -> None:
        """Stage the new states."""
        self.store.write(self.new, states)


class Outbox:
    """Writes messages whose tensors are in a block, until `clear`; a tensor sent twice is stored once."""

    def __init__(self, block: Block, known: Known) -> None:
        self._block, self._known = block, known
        self.clear()

    def clear(self) -> None:
        """Reuse the space of all messages so far."""
        self._end = 0
        self._placed: dict[int, tuple[Tensor, int]] = {}  # keeping the tensor keeps its id unique

    def write(self, value: Any) -> bytes:
        """Return the message for `value`."""
        message, tensors = pack(value, self._known)
        return pickle.dumps((message, [self._place(tensor) for tensor in tensors]))

    def _place(self, tensor: Tensor) -> int:
        if id(tensor) not in self._placed:
            start = aligned(self._end)
            self._end = start + tensor.numel() * tensor.element_size()
            self._block.reserve(self._end)
            self._block.tensor(tensor.dtype, tensor.shape, start).copy_(tensor)
            self._placed[id(tensor)] = tensor, start
        return self._placed[id(tensor)][1]


def read(message: bytes, block: Block, known: Known) -> Any:
    """Return the value of a message; its tensors are those in the block, not copies."""
    packed, offsets = pickle.loads(message)
    return unpack(packed, lambda n, dtype, shape: block.tensor(dtype, shape, offsets[n]), known)


class ProcessPool:
    """A pool of worker processes with one thread each.

    Args:
        workers: number of processes.

    Raises:
        ConfigError: on Windows, where open files cannot be passed to a process in this way.
    """

    def __init__(self, workers: int) -> None:
        if sys.platform == "win32":
            raise ConfigError("engine.workers needs Linux or macOS; leave it out, or use WSL")
        self.size = workers
        self._known = Known()
        self._inbox = Block()
        self._results = [Block() for _ in range(AHEAD * workers)]
        self._outbox = Outbox(self._inbox, self._known)
        self._executor: ProcessPoolExecutor | None = None
        self._understood = 0
        self._end: weakref.finalize[Any, ProcessPool] | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the running processes."""
        return tuple(process.pid for process in _processes(self._executor) if process.pid is not None)

    def share(self, store: StateStore) -> None:
        """Keep states from now on where workers can access them."""
        store.share()

    def states(self, stored: Stored, chunks: Sequence[Sequence[int]]) -> list[ChunkStates]:
        """Return the rows of each chunk's clients; states written there are staged."""
        store, fresh = stored.store, stored.fresh
        store.share()
        new = [[] if fresh else store.reserve(ids) for ids in chunks]
        return [
            SharedRows(store, store.capacity, tuple(ids), None if fresh else store.rows(ids), rows)
            for ids, rows in zip(chunks, new, strict=True)
        ]

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        """Yield (position in `tasks`, its result) as tasks finish; they start in order."""
        self._outbox.clear()
        messages = [self._outbox.write(task) for task in tasks]
        if self._executor is None or len(self._known) > self._understood:
            self._start()
        assert self._executor is not None
        waiting, free = iter(range(len(tasks))), list(range(len(self._results)))
        running: dict[Future[bytes], tuple[int, int]] = {}
        k: int | None = None
        failed: dict[int, TaskResult] = {}
        try:
            while True:
                while free and not failed and (k := next(waiting, None)) is not None:
                    block = free.pop()
                    running[self._executor.submit(_work, messages[k], block)] = k, block
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    k, block = running.pop(future)
                    result: TaskResult = read(future.result(), self._results[block], self._known)
                    if result.error is not None:
                        failed[k] = result
                    elif not failed:
                        yield k, result.get()
                    free.append(block)
        except BrokenProcessPool as error:
            processes = _processes(self._executor)
            self._executor.shutdown(wait=True)
            self.close()
            under_way = {n for n in (k, *(n for n, _ in running.values())) if n is not None}
            raise _lost(processes, [tasks[n] for n in sorted(under_way)]) from error
        except BaseException:
            self.close()  # other results are not needed any more, and must not be returned to the next call
            raise
        if failed:  # as in one process, raise the error of the first chunk that has one
            failed[min(failed)].get()

    def close(self) -> None:
        """End the workers at once."""
        if self._end is not None:
            self._end()
        self._executor, self._end = None, None

    def _start(self) -> None:
        self.close()
        self._understood = len(self._known)
        context: Any = multiprocessing.get_context(START)
        arguments = (self._inbox, self._results, self._known.objects)
        executor = ProcessPoolExecutor(self.size, context, _begin, arguments)
        self._end = weakref.finalize(self, _end_all, os.getpid(), executor)
        self._executor = executor
        try:
            with warnings.catch_warnings():
                # A fork copies only this thread. State that other threads may hold (locks of the log, torch's threads)
                # is renewed or not used in the worker.
                warnings.simplefilter("ignore", DeprecationWarning)
                executor.submit(os.getpid).result()
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            self.close()
            raise WorkerError(
                f"worker processes on {sys.platform} receive their objects by pickle, and one cannot be pickled: "
                f"{error}; build models with functions at the top level of a module, or leave out engine.workers"
            ) from error
        except BrokenProcessPool as error:
            processes = _processes(executor)
            executor.shutdown(wait=True)
            self.close()
            raise WorkerError(
                f"worker processes ended at their start ({_ends(processes)}); lower engine.workers, or, where they are "
                'not forked (macOS), call tailorfl below `if __name__ == "__main__":` in your script'
            ) from error
        except OSError as error:
            self.close()
            raise WorkerError(f"worker processes cannot be started: {error}; lower engine.workers") from error


def _ends(processes: Sequence[Any]) -> str:
    """Return how some of the processes ended; after the first, the executor ends the others by SIGTERM."""
    ends = []
    for process in processes:
        code = process.exitcode or 0
        if code < 0 and code != -signal.SIGTERM:
            ends.append(f"process {process.pid} was killed by signal {-code} ({signal.Signals(-code).name})")
        elif code > 0:
            ends.append(f"process {process.pid} ended with exit code {code}")
    killed = ", as the system does when it is out of memory" if any("SIGKILL" in end for end in ends) else ""
    return (first_few(ends, 2) or "a process has ended") + killed


def _lost(processes: Sequence[Any], tasks: Sequence[Task]) -> WorkerError:
    """Return the error for a worker that has ended."""
    return WorkerError(
        f"a worker was lost ({_ends(processes)}) while "
        f"{first_few([str(task) for task in tasks], 3)}; nothing of this round was kept. Lower engine.workers or "
        "engine.chunk, or set engine.states=disk; a run with a result folder continues from its last checkpoint with "
        "--resume"
    )


def _processes(executor: ProcessPoolExecutor | None) -> list[Any]:
    # Python 3.14 has `kill_workers`; before, no public function lists or ends the processes of an executor.
    return [] if executor is None else list((executor._processes or {}).values())


def _end_all(owner: int, executor: ProcessPoolExecutor) -> None:
    """End worker processes; do nothing in a worker, which inherits this finalizer."""
    if os.getpid() != owner:
        return
    for process in _processes(executor):
        process.kill()
    executor.shutdown(wait=True, cancel_futures=True)


_work_of: Any = None
"""In a worker: (message, number of the result's block) -> the message of the result."""


def _work(message: bytes, block: int) -> bytes:
    """Run a task in a worker process."""
    done: bytes = _work_of(message, block)
    return done


def _begin(inbox: Block, results: list[Block], objects: list[Any]) -> None:
    """Make this process a worker."""
    global _work_of
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    keep_freed_memory()
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    logged, known = logged_records(), Known(objects)

    def work(message: bytes, block: int) -> bytes:
        outbox = Outbox(results[block], known)
        return outbox.write(result_of(functools.partial(read, message, inbox, known), logged))

    _work_of = work


def _leave_with(parent: Any) -> None:
    """End this process when the one that started it has ended, for whatever reason."""
    parent.join()
    os._exit(1)
