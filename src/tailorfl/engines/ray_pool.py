"""A pool of workers on several machines, as Ray actors.

Data and models are put into Ray's object store once. Private states stay in the process that runs the experiment: those
of a chunk are sent to a worker with its task, and the new ones back, so no state is lost with a worker.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from tailorfl.engines.base import Stored, first_line
from tailorfl.engines.memory import keep_freed_memory
from tailorfl.engines.pool import (
    ChunkStates,
    Known,
    Packing,
    Task,
    TaskResult,
    logged_records,
    pack,
    result_of,
    unpack,
)
from tailorfl.engines.state import StateStore
from tailorfl.errors import WorkerError, needs_extra

log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
Message = tuple[bytes, list[Any]]
"""The result of `pack`, with tensors as bytes or references to bytes in the object store."""

INLINE = 100_000
"""Bytes above which a tensor is sent separately, so that one for many workers is stored once on each machine."""


def to_bytes(tensor: Tensor) -> Bytes:
    """Return the bytes of a tensor in the order of its elements, uint8 [bytes]; not a copy if it is contiguous."""
    flat = tensor.detach().contiguous()
    # A tensor of one element counts as contiguous whatever its stride, which is 0 if it was expanded.
    array: Bytes = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy()
    return array


def from_bytes(array: Bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return the tensor that shares the memory of `array`: read-only if that is in the object store."""
    if not array.size:  # torch cannot view zero bytes as another type
        return torch.empty(tuple(shape), dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about arrays that are read-only
        return torch.from_numpy(array).view(dtype).reshape(tuple(shape))


@functools.cache
def _packer() -> Any:
    from ray import cloudpickle

    return type("Packer", (Packing, cloudpickle.CloudPickler), {})


def _packed(value: Any, known: Known | None) -> Message:
    message, tensors = pack(value, known, _packer())
    return message, [to_bytes(tensor) for tensor in tensors]


def _unpacked(message: Message, known: Known, *, copy: bool = True) -> Any:
    """Return the value of a message; without `copy` its tensors are in the object store."""
    packed, arrays = message

    def load(number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        return from_bytes(arrays[number].copy() if copy else arrays[number], dtype, shape)

    return unpack(packed, load, known)


@dataclass(frozen=True)
class CarriedStates:
    """The private states of a chunk's clients, sent to a worker with its task; the new ones are sent back."""

    stored: Stored | TensorDict
    ids: tuple[int, ...]

    def __reduce__(self) -> Any:
        return CarriedStates, (self.read(), self.ids)

    def read(self) -> TensorDict:
        """Return the states, [clients, ...]."""
        return self.stored if isinstance(self.stored, TensorDict) else self.stored.of(self.ids)

    def write(self, states: TensorDict) -> TensorDict:
        """Return the new states."""
        return states


class RayWorker:
    """A worker: an actor of Ray with one thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self._known, self._learned, self._records = Known(), 0, logged_records()

    def where(self) -> str:
        """Return this worker's machine and process."""
        import ray

        node = ray.get_runtime_context().get_node_id()[:8]
        return f"node {node} at {ray.util.get_node_ip_address()}, process {os.getpid()}"

    def work(self, lessons: Sequence[Any], message: bytes, *arrays: Bytes) -> Message:
        """Return the packed result of a task.

        Args:
            lessons: references to packed lists of known objects, in the order of their numbers.
            message, arrays: the task.
        """

        def received() -> Task:
            import ray

            for lesson in lessons[self._learned :]:
                for lasting in _unpacked(ray.get(lesson), self._known, copy=False):
                    self._known.number(lasting)
                self._learned += 1
            task: Task = _unpacked((message, list(arrays)), self._known)
            return task

        return _packed(result_of(received, self._records), self._known)


class RayPool:
    """A pool of Ray actors.

    A worker that is lost is not replaced, and its chunk goes to another one.

    Args:
        workers: number of workers.
        address: of a running cluster, "auto" for the one this machine belongs to, or "local" for one on this machine
            only, which ends with this process.
        gpus: share of a GPU that each worker reserves.
        start_seconds: how long all workers may take to start.
    """

    def __init__(
        self,
        workers: int,
        address: str,
        gpus: float,
        start_seconds: float,
    ) -> None:
        self.size, self._address, self._gpus, self._seconds = workers, address, gpus, start_seconds
        self._known, self._taught, self._lessons = Known(), 0, list[Any]()
        self._workers: dict[int, Any] = {}
        self.names: list[str] = []
        """Machine and process of each worker."""

    def share(self, store: StateStore) -> None:
        """Do nothing: states are sent with the tasks."""

    def states(self, stored: Stored, chunks: Sequence[Sequence[int]]) -> list[ChunkStates]:
        """Return the states of each chunk's clients, to be sent with its task."""
        return [CarriedStates(stored, tuple(ids)) for ids in chunks]

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        """Yield (position in `tasks`, its result) as tasks finish; they start in order."""
        ray = self._started()
        waiting = list(range(len(tasks)))
        busy, failed = dict[Any, tuple[int, int]](), dict[int, TaskResult]()
        stored: dict[int, tuple[Tensor, Any]] = {}

        def give() -> None:
            for worker in set(self._workers) - {worker for _, worker in busy.values()}:
                if waiting and not failed:
                    k = waiting.pop(0)
                    message, tensors = pack(tasks[k], self._known, _packer())
                    self._teach(ray)
                    arrays = [_reference(ray, tensor, stored) for tensor in tensors]
                    busy[self._workers[worker].work.remote(self._lessons, message, *arrays)] = k, worker

        try:
            give()
            while busy:
                (ref,), _ = ray.wait(list(busy), num_returns=1)
                k, worker = busy.pop(ref)
                try:
                    result: TaskResult = _unpacked(ray.get(ref), self._known)
                except ray.exceptions.RayActorError as error:
                    self._lose(worker, tasks[k], error)
                    waiting.insert(0, k)
                    give()
                    continue
                if result.error is not None:
                    failed[k] = result
                give()
                if not failed:
                    yield k, result.get()
        finally:
            if busy:  # their results are not needed any more
                ray.wait(list(busy), num_returns=len(busy))
        if failed:  # as in one process, raise the error of the first chunk that has one
            failed[min(failed)].get()

    def close(self) -> None:
        """End the workers."""
        if self._workers:
            import ray

            for worker in self._workers.values():
                ray.kill(worker)
        self._workers, self.names = {}, []

    def _started(self) -> Any:
        with needs_extra("ray", "cluster"):
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            if self._address == "local":  # without this, Ray listens on the network even for a local cluster
                os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
            import ray
        if self._workers:
            return ray
        self._connect(ray)
        has = ray.cluster_resources()
        for resource, needed in (("CPU", float(self.size)), ("GPU", self.size * self._gpus)):
            if has.get(resource, 0.0) < needed:
                raise WorkerError(
                    f"{self.size} workers need {needed:g} {resource}s, but the cluster has {has.get(resource, 0.0):g}; "
                    "lower engine.workers" + (" or engine.gpus" if resource == "GPU" else "")
                )
        actor = ray.remote(num_cpus=1, num_gpus=self._gpus, scheduling_strategy="SPREAD")(RayWorker)
        workers = [actor.remote() for _ in range(self.size)]
        try:
            self.names = ray.get([worker.where.remote() for worker in workers], timeout=self._seconds)
        except ray.exceptions.RayError as error:
            for worker in workers:
                ray.kill(worker)
            if isinstance(error, ray.exceptions.GetTimeoutError):
                raise WorkerError(
                    f"not all {self.size} workers started within {self._seconds:g} s. Check that no other program "
                    "keeps the cluster busy, or wait longer (engine.start_seconds)"
                ) from error
            reason = str(error).strip().splitlines()[-1][:200]
            raise WorkerError(
                f"a worker cannot start: {reason}. Check that tailorfl is installed on all machines of the cluster, in "
                "the environment that 'ray start' ran in"
            ) from error
        self._workers = dict(enumerate(workers))
        return ray

    def _connect(self, ray: Any) -> None:
        if ray.is_initialized():
            return
        local = self._address == "local"
        local_options = {"num_cpus": self.size, "_node_ip_address": "127.0.0.1", "include_dashboard": False}
        try:
            ray.init(
                address="local" if local else self._address,
                log_to_driver=False,
                logging_level="WARNING",
                **(local_options if local else {}),
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise WorkerError(
                f"there is no Ray cluster at engine.cluster={self._address} ({first_line(error)}); start one with "
                "'ray start --head', or use engine.cluster=local"
            ) from error

    def _teach(self, ray: Any) -> None:
        """Put objects that workers do not know yet into the object store: one copy per machine."""
        new = self._known.objects[self._taught :]
        if new:
            self._lessons.append(ray.put(_packed(new, None)))
            self._taught = len(self._known)

    def _lose(self, worker: int, task: Task, error: Exception) -> None:
        """Remove a worker that was lost.

        Raises:
            WorkerError: it was the last one.
        """
        lost = f"worker {worker + 1} of {self.size} ({self.names[worker]}) was lost while {task}"
        del self._workers[worker]
        if not self._workers:
            raise WorkerError(
                f"{lost} ({type(error).__name__}), and no other worker is left. A run with a result folder continues "
                "from its last checkpoint with --resume"
            ) from error
        log.warning("%s; continuing with %d of %d workers", lost, len(self._workers), self.size)


def _reference(ray: Any, tensor: Tensor, stored: dict[int, tuple[Tensor, Any]]) -> Any:
    """Return the bytes of a tensor; for a large one, a reference to them, stored once per call."""
    if tensor.numel() * tensor.element_size() < INLINE:
        return to_bytes(tensor)
    if id(tensor) not in stored:  # keeping the tensor keeps its id unique
        stored[id(tensor)] = tensor, ray.put(to_bytes(tensor))
    return stored[id(tensor)][1]
