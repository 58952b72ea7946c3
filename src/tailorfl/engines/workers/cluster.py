"""Workers on several machines, as Ray actors.

Data and models go once into Ray's object store. A client's private state stays with the worker that trained it last;
only messages travel. Where a chunk holds clients of several workers, as it may when every round samples other clients,
it goes to the worker that has most of their states, and the others are handed on from worker to worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tailorfl.engines.failures import first_line
from tailorfl.engines.state import StateStore
from tailorfl.engines.workers.answers import Answer, answer, own_log
from tailorfl.engines.workers.parcels import Parcel, opened, parcels
from tailorfl.engines.workers.scattered import Kept, ScatteredStore, held, note_staged, states_of
from tailorfl.engines.workers.tasks import States, Task
from tailorfl.engines.workers.wire import Known
from tailorfl.errors import ConfigError, MissingExtraError, TailorflError, WorkerError
from tailorfl.settings.experiment import DEFAULT

PATIENCE = 120.0
"""Seconds within which all workers must have started."""


class _Site:
    """A worker: an actor of Ray."""

    def __init__(self) -> None:
        from tailorfl.engines.memory import keep_freed_memory

        torch.set_num_threads(1)
        keep_freed_memory()
        self._known, self._logged = Known(), own_log()

    def where(self) -> str:
        """Returns the machine and process this is."""
        import ray

        node = ray.get_runtime_context().get_node_id()[:8]
        return f"node {node} at {ray.util.get_node_ip_address()}, process {os.getpid()}"

    def learn(self, parcel: Parcel, *shared: Any) -> None:
        """Adds objects that messages only name; their tensors stay in Ray's object store."""
        for thing in opened(parcel, shared, self._known, copy=False):
            self._known.number(thing)

    def work(self, parcel: Parcel, *shared: Any) -> Parcel:
        """Returns what came out of some task."""
        done = answer(lambda: opened(parcel, shared, self._known), self._logged)
        return parcels([done], self._known)[0]

    def give(self, store: int, ids: Sequence[int]) -> Parcel:
        """Returns the states of clients."""
        return parcels([self._store(store).get(ids)], self._known)[0]

    def take(self, store: int, ids: Sequence[int], parcel: Parcel) -> None:
        """Keeps the states of clients that another worker had."""
        self._store(store).put(ids, opened(parcel, (), self._known))

    def forget(self, store: int, ids: Sequence[int]) -> None:
        """Drops the states of clients that another worker has taken."""
        self._store(store).forget(ids)

    def commit(self, store: int, ids: Sequence[int]) -> None:
        """Makes staged states those of `ids`."""
        self._store(store).commit(ids)

    def clear(self, store: int) -> None:
        """Drops all states."""
        held = self._store(store)
        held.rollback()
        held.forget(held.clients)

    def _store(self, number: int) -> StateStore:
        found: StateStore = self._known.objects[number]
        return found


class Cluster:
    """A team of Ray actors with one thread each.

    Args:
        workers: how many.
        address: of a running cluster, "auto" for the one this machine belongs to, or "local" for one of this machine
            alone, which ends with this process.
        gpus: share of a GPU that each worker reserves.
    """

    def __init__(self, workers: int, address: str = "local", gpus: float = DEFAULT.engine.gpus) -> None:
        self.size, self._address, self._gpus = workers, address, gpus
        self._known, self._told = Known(), 0
        self._sites: list[Any] = []
        self.names: list[str] = []
        """Machine and process of each worker."""

    # -- what an engine asks --------------------------------------------------------------------------------

    def hold(self, store: StateStore) -> StateStore:
        """Returns a store whose states are with the workers.

        Raises:
            ConfigError: states are to lie on this machine's disk.
        """
        if store.on_disk:
            raise ConfigError(
                "engine.states=disk keeps states on this machine, but those of a cluster are with its "
                "workers; leave out engine.states or engine.cluster"
            )
        return ScatteredStore(store, self)

    def states(self, store: StateStore, chunks: Sequence[Sequence[int]], fresh: bool) -> list[States]:
        """Returns for each chunk of clients that its worker has their states."""
        assert isinstance(store, ScatteredStore)
        return [Kept(store, tuple(ids), fresh) for ids in chunks]

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        """Yields (position in `tasks`, what came out) as it is done."""
        ray = self._started()
        sent = parcels(tasks, self._known)
        self._teach()
        places: dict[int, Any] = {}
        waiting, busy = list(range(len(tasks))), dict[Any, tuple[int, int]]()
        failed: dict[int, Answer] = {}

        def give(worker: int) -> None:
            if not waiting:
                return
            k = max(waiting, key=lambda k: (held(tasks[k], worker), -k))
            waiting.remove(k)
            self._bring(tasks[k], worker)
            for n, tensor in sent[k].shared.items():
                if n not in places:
                    places[n] = ray.put(tensor)
            refs = [places[n] for n in sent[k].shared]
            busy[self._sites[worker].work.remote(sent[k].without_shared(), *refs)] = k, worker

        try:
            for worker in range(self.size):
                give(worker)
            while busy:
                (done,), _ = ray.wait(list(busy), num_returns=1)
                k, worker = busy.pop(done)
                said: Answer = opened(self._got(done, worker, tasks[k].about()), (), self._known)
                if said.error is not None:
                    failed[k] = said
                    waiting.clear()
                give(worker)
                note_staged(tasks[k], worker)
                if not failed:
                    yield k, said.get()
        finally:
            if busy:  # not wanted any more, but it writes states, which are to be dropped after that
                ray.wait(list(busy), num_returns=len(busy))
                for k, worker in busy.values():
                    note_staged(tasks[k], worker)
        if failed:  # the error of one process: that of the first chunk that has one
            failed[min(failed)].get()

    def close(self) -> None:
        """Ends the workers, and what states they have."""
        if self._sites:
            import ray

            for site in self._sites:
                ray.kill(site)
        self._sites, self.names, self._told = [], [], 0

    # -- what a scattered store asks ------------------------------------------------------------------------

    def ask(self, worker: int, what: str, store: StateStore, ids: Sequence[int]) -> Any:
        """Returns what a worker answers about states of a store."""
        ref = getattr(self._sites[worker], what).remote(self._known.number(store), list(ids))
        found = self._got(ref, worker, f"asked to {what} states")
        return opened(found, (), self._known) if isinstance(found, Parcel) else found

    def everyone(self, what: str, store: StateStore) -> None:
        """Asks all workers that know a store."""
        number = self._known.number(store)
        if number < self._told:
            for worker, site in enumerate(self._sites):
                self._got(getattr(site, what).remote(number), worker, f"asked to {what} states")

    # -- inside ---------------------------------------------------------------------------------------------

    def _bring(self, task: Task, worker: int) -> None:
        """Brings the states of a chunk's clients to the worker that will need them."""
        states = states_of(task)
        if states is None:
            return
        store, number = states.store, self._known.number(states.store)
        here = [i for i in states.ids if i in store.local]
        if here:
            parcel = parcels([store.leave(here)], self._known)[0]
            self._sites[worker].take.remote(number, here, parcel)
        for other in sorted({store.home[i] for i in states.ids if i in store.home} - {worker}):
            there = [i for i in states.ids if store.home.get(i) == other]
            moved = self._sites[other].give.remote(number, there)  # goes from node to node, not through here
            self._sites[worker].take.remote(number, there, moved)
            self._sites[other].forget.remote(number, there)
            here += there
        store.home.update(dict.fromkeys(here, worker))

    def _started(self) -> Any:
        try:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            if self._address == "local":  # else Ray listens to the network even then
                os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
            import ray
        except ImportError as error:
            raise MissingExtraError("ray", "cluster") from error
        if self._sites:
            return ray
        self._connect(ray)
        has = ray.cluster_resources()
        for what, wanted in (("CPU", float(self.size)), ("GPU", self.size * self._gpus)):
            if has.get(what, 0.0) < wanted:
                raise WorkerError(
                    f"{self.size} workers need {wanted:g} {what}s, but the cluster has {has.get(what, 0.0):g}; "
                    "lower engine.workers" + (" or engine.gpus" if what == "GPU" else "")
                )
        actor = ray.remote(num_cpus=1, num_gpus=self._gpus, scheduling_strategy="SPREAD")(_Site)
        sites = [actor.remote() for _ in range(self.size)]
        try:
            self.names = ray.get([site.where.remote() for site in sites], timeout=PATIENCE)
        except ray.exceptions.RayError as error:
            raise WorkerError(
                f"not all {self.size} workers started within {PATIENCE:g} s ({first_line(error)}); look whether other "
                "programs keep the cluster busy, and whether tailorfl is installed on all its machines"
            ) from error
        self._sites = sites
        return ray

    def _connect(self, ray: Any) -> None:
        if ray.is_initialized():
            return
        local = self._address == "local"
        own = {"num_cpus": self.size, "_node_ip_address": "127.0.0.1", "include_dashboard": False}
        try:
            ray.init(
                address="local" if local else self._address,
                log_to_driver=False,
                logging_level="WARNING",
                **(own if local else {}),
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise WorkerError(
                f"there is no Ray cluster at engine.cluster={self._address} ({first_line(error)}); start one with "
                "'ray start --head', or use engine.cluster=local"
            ) from error

    def _teach(self) -> None:
        """Sends what workers do not know yet; of what is equal on all of them there is one copy a machine."""
        import ray

        new = self._known.objects[self._told :]
        if not new:
            return
        (parcel,) = parcels([new], Known(), share_all=True)
        refs = [ray.put(tensor) for tensor in parcel.shared.values()]
        message = ray.put(parcel.without_shared())
        told = [site.learn.remote(message, *refs) for site in self._sites]
        for worker, ref in enumerate(told):
            self._got(ref, worker, "receiving data and models")
        self._told = len(self._known)

    def _got(self, ref: Any, worker: int, about: str) -> Any:
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, TailorflError):
                raise error.cause from error
            raise
        except ray.exceptions.RayError as error:
            raise WorkerError(
                f"worker {worker + 1} of {self.size} ({self.names[worker]}) was lost while {about} "
                f"({type(error).__name__}), and with it the private states it kept. A run with a result folder goes on "
                "from its last checkpoint with --resume"
            ) from error
