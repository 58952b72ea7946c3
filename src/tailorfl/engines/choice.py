"""The choice of an engine: by name, or automatically, by measuring both kinds on the real model and data."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, get_args

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.engines.base import (
    CohortTask,
    CohortUpdates,
    Engine,
    Inference,
    Parts,
    Stored,
    first_line,
    unsupported,
)
from tailorfl.engines.devices import available, check_precision, chosen, device_of
from tailorfl.engines.in_process import InProcessEngine, Sequential, Vectorized
from tailorfl.engines.pool import PooledEngine, WatchedFunction, WorkerPool
from tailorfl.engines.process_pool import ProcessPool
from tailorfl.engines.ray_pool import RayPool
from tailorfl.engines.state import StateStore
from tailorfl.errors import ConfigError, unknown
from tailorfl.settings.execution import EngineName
from tailorfl.settings.experiment import DEFAULT

log = logging.getLogger(__name__)

T = TypeVar("T")
Way = tuple[InProcessEngine, str]
"""An engine, and the precision of its networks."""

PROBE_STEPS = 8
"""Largest number of steps of each local training that are measured."""
DEVICE_CLIENTS = 32
"""Number of clients measured on a GPU, where the chunk size is not known before the first chunk."""
PROBE_REPEATS, PROBE_SECONDS = 7, 2.0
"""Largest number of measurements, and of seconds that they take together."""


class Auto:
    """Vectorized if that is faster and possible, else sequential; one log line gives the choice and the reason.

    With several `precisions` it also takes one lower than float32 if that is faster by a factor of `devices.WORTH`.

    Args:
        sequential, vectorized: the engines it chooses from; both are measured in this process.
        pool: workers in which the chosen engine runs; None runs it in this process.
        choice: the name of an engine in a run's records; it is then chosen without measuring.
        kind: the only kind that it may choose, or auto.
        precisions: those that it may choose, using the first until then; empty: that of its engines.
    """

    def __init__(
        self,
        sequential: InProcessEngine | None = None,
        vectorized: InProcessEngine | None = None,
        *,
        pool: WorkerPool | None = None,
        choice: str | None = None,
        kind: str = "auto",
        precisions: Sequence[str] = (),
    ) -> None:
        self._sequential = Sequential() if sequential is None else sequential
        self._vectorized = Vectorized() if vectorized is None else vectorized
        both = (self._sequential, self._vectorized)
        self._kinds = both if kind == "auto" else tuple(engine for engine in both if engine.kind == kind)
        self._precisions = tuple(precisions) or (self._sequential.precision,)
        self.pool = pool
        self._chosen: InProcessEngine | None = None
        if choice is not None:
            self.choose(choice)

    @property
    def name(self) -> str:
        """`auto` until it has chosen, then the name of the chosen engine."""
        return "auto" if self._chosen is None else self._chosen.name

    @property
    def precision(self) -> str:
        """The precision of the chosen engine; until then that of the first."""
        return self.current.precision

    @property
    def current(self) -> InProcessEngine:
        """The chosen engine; until then the first that it may choose."""
        return self._chosen or self._kinds[0]

    @property
    def _running(self) -> Engine:
        """The engine that runs, including its workers."""
        return self.current if self.pool is None else PooledEngine(self.current, self.pool)

    def choose(self, name: str) -> None:
        """Fix the choice to an engine's name in a run's records.

        Raises:
            ConfigError: the machine does not support its precision.
        """
        kind, _, precision = name.partition(", ")
        self._take(self._sequential if kind == "sequential" else self._vectorized, precision or "float32")

    def _take(self, engine: InProcessEngine, precision: str) -> None:
        check_precision(precision, engine.place.device)
        self._chosen = engine
        for other_engine in (self._sequential, self._vectorized):  # either may have to replace the other
            other_engine.place.precision = precision

    def hold(self, store: StateStore) -> StateStore:
        """Return a store with the states of `store`, in the place that the engines need."""
        return self._running.hold(store)

    def train(self, task: CohortTask, store: StateStore) -> CohortUpdates:
        """Run the function on every client with its state of `store`."""
        self._measure(task, Stored(store).of)
        return self._attempt(task, lambda engine: engine.train(task, store))

    def map(self, task: CohortTask, states: TensorDict | Stored) -> Parts:
        """Return the function's results for every client, stacked."""
        self._measure(task, states.of if isinstance(states, Stored) else lambda ids: states[: len(ids)])
        return self._attempt(task, lambda engine: engine.map(task, states))

    def predict(self, task: Inference) -> list[Tensor]:
        """Return the outputs of each model on its rows."""
        return self._running.predict(task)

    def _attempt(self, task: CohortTask, run: Callable[[Engine], T]) -> T:
        """Return `run` of the chosen engine, or of the sequential one if the chosen one cannot run the model."""
        try:
            return run(self._running)
        except Exception as error:
            # The choice was made on another architecture, which could run vectorized.
            if self._chosen is not self._vectorized or not unsupported(error):
                raise
            self._give_up(error)
            if task.cohort.record is not None:
                task.cohort.record.forget()
            return run(self._running)

    def _measure(self, task: CohortTask, states: Callable[[Sequence[int]], TensorDict]) -> None:
        """Measure and choose, unless that was done before; `states` returns the states of clients by id."""
        if self._chosen is not None:
            return
        on_host = self._vectorized.place.is_host
        everyone = task.cohort.ids
        clients = min(len(everyone), self._vectorized.chunk_of(task.cohort) if on_host else DEVICE_CLIENTS)
        probe = task.part(range(clients))
        watched = WatchedFunction(probe)
        # Results of measurements are discarded, so they must not enter the ledger.
        probe = replace(probe, function=watched, cohort=replace(probe.cohort, limit=PROBE_STEPS, record=None))
        first_states = states(everyone[:clients])
        kinds = self._kinds[:1] if clients < 2 else self._kinds
        candidates = [(kind, precision) for precision in self._precisions for kind in kinds]
        seconds: dict[Way, float] = {}
        for candidate in candidates:  # the first run of each also warms it up
            if candidate[0] is self._vectorized and self._chosen is not None:
                continue  # it cannot run the model
            try:
                seconds[candidate] = _seconds_of(candidate, probe, first_states)
            except Exception as error:
                if (
                    candidate[1] != self._precisions[0]
                ):  # a model that fails in this precision keeps the first
                    log.warning("%s cannot run in %s (%s)", task.about, candidate[1], first_line(error))
                elif len(kinds) < 2 or candidate[0] is not self._vectorized or not unsupported(error):
                    raise
                else:
                    self._give_up(error)
                continue
            if not watched.trained:
                return  # nothing was trained (untrained models were evaluated), so training was not measured
        if len(seconds) > 1:
            seconds = _repeated(seconds, probe, first_states, more=len(self._precisions) > 1)
        self._decide(seconds, clients)

    def _decide(self, seconds: Mapping[Way, float], clients: int) -> None:
        """Take the fastest engine in the precision that pays off, and log the choice."""
        of = {
            precision: {k: s for (k, p), s in seconds.items() if p == precision} for _, precision in seconds
        }
        several = len(self._precisions) > 1
        least = {name: min(by_engine.values()) for name, by_engine in of.items()}
        precision, reason = chosen(least) if several else (self._precisions[0], "")
        by_engine = of[precision]
        # Ties go to the vectorized engine.
        engine = min(reversed(list(by_engine)), key=lambda kind: by_engine[kind])
        self._take(engine, precision)
        if len(by_engine) > 1:
            log.info(
                "engine: %s (%.3g s against %.3g s for %d clients)",
                engine.name,
                min(by_engine.values()),
                max(by_engine.values()),
                clients,
            )
        if several:
            log.warning(
                "engine.precision=auto chose %s: %s",
                precision,
                reason,
                extra={"once": ("precision", precision)},
            )

    def _give_up(self, error: Exception) -> None:
        log.warning(
            "the vectorized engine cannot run this model (%s); using the sequential one",
            first_line(error),
            extra={"once": first_line(error)},
        )
        self._chosen = self._sequential


def keep_choice(engine: Engine, name: str) -> None:
    """Fix the choice of an automatic engine to `name` from a run's records; do nothing for other engines."""
    if isinstance(engine, Auto) and name != "auto":
        engine.choose(name)


def _repeated(
    seconds: Mapping[Way, float], task: CohortTask, states: TensorDict, more: bool
) -> dict[Way, float]:
    """Return the least of several runs of each candidate, or the first if runs take long; `more` forces another."""
    total = sum(seconds.values())
    if total >= PROBE_SECONDS and not more:
        return dict(seconds)
    took = max(total, PROBE_SECONDS / PROBE_REPEATS)  # a coarse clock may measure 0
    rounds = min(PROBE_REPEATS, 1 + int(PROBE_SECONDS / took))
    # In alternation, so that a slow moment of the machine affects all.
    runs = [
        {candidate: _seconds_of(candidate, task, states) for candidate in reversed(list(seconds))}
        for _ in range(rounds)
    ]
    return {candidate: min(run[candidate] for run in runs) for candidate in seconds}


def _seconds_of(candidate: Way, task: CohortTask, states: TensorDict) -> float:
    """Return the seconds of one run of an engine in a precision."""
    engine, precision = candidate
    engine.place.precision = precision
    return _seconds(engine, task, states)


def _seconds(engine: InProcessEngine, task: CohortTask, states: TensorDict) -> float:
    """Return the seconds of one run: process time if torch has one thread, which other processes do not disturb.

    Results are in host memory at the end of a run, so a GPU has finished too.
    """
    is_single_threaded = torch.get_num_threads() == 1 and engine.place.is_host
    clock = time.process_time if is_single_threaded else time.perf_counter
    begin = clock()
    engine.map(task, states)
    return clock() - begin


def make_engine(
    name: str = DEFAULT.engine.name,
    chunk: int | None = DEFAULT.engine.chunk,
    workers: int = DEFAULT.engine.workers,
    cluster: str | None = DEFAULT.engine.cluster,
    gpus: float = DEFAULT.engine.gpus,
    start_seconds: float = DEFAULT.engine.start_seconds,
    device: str = DEFAULT.engine.device,
    precision: str = DEFAULT.engine.precision,
) -> Engine:
    """Return an engine by name.

    With two `workers` or more it runs in that many processes, with the same results.

    Args:
        name: sequential, vectorized or auto.
        chunk: number of clients that run together; by default as many as fit.
        workers: number of processes that run clients.
        cluster: address of a Ray cluster for the workers, "auto", or "local" for one on this machine.
        gpus: GPUs that each worker of a cluster reserves.
        start_seconds: how long the workers of a cluster may take to start.
        device: where clients compute: cpu, cuda, cuda:N, or auto (cuda if there is a GPU).
        precision: of products in networks: float32, tf32, bfloat16, or auto (one lower than float32 if a measurement
            shows that it pays off).

    Raises:
        ConfigError: unknown name, a number out of its range, a missing device, a precision that it does not support,
            worker processes with a GPU or on Windows, or incompatible settings of a cluster.
    """
    if name not in get_args(EngineName):
        raise unknown("engine", name, get_args(EngineName))
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk should be at least 1, or None for as many clients as fit, but is {chunk}")
    if workers < 0:
        raise ConfigError(f"workers should be at least 0, but is {workers}")
    target = device_of(device)
    check_precision(precision, target)
    if workers > 1 and cluster is None and target.type != "cpu":
        raise ConfigError(
            f"engine.workers={workers}: workers compute on the CPU, but engine.device={device} is {target}, and a GPU "
            "trains many clients at once without workers; leave out one of the two"
        )
    if cluster is not None:
        if workers < 1:
            raise ConfigError(f"engine.cluster={cluster} needs engine.workers, the number of workers to use")
    elif gpus:
        raise ConfigError("engine.gpus is for the workers of a cluster; set engine.cluster, or leave it out")
    pool: WorkerPool | None = RayPool(workers, cluster, gpus, start_seconds) if cluster is not None else None
    if pool is None and workers > 1:
        pool = ProcessPool(workers)
    first = "float32" if precision == "auto" else precision
    one_by_one, together = Sequential(target, first), Vectorized(chunk, target, first)
    if name == "auto" or precision == "auto":
        tried = available(target) if precision == "auto" else (first,)
        return Auto(one_by_one, together, pool=pool, kind=name, precisions=tried)
    kind = together if name == "vectorized" else one_by_one
    return kind if pool is None else PooledEngine(kind, pool)
