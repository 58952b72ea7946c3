"""The automatic engine: measures both ways on the real model and data, and keeps the faster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.engines.base import Engine, Inference, Stored, Visit
from tailorfl.engines.failures import first_line, unsupported
from tailorfl.engines.in_process import InProcess
from tailorfl.engines.results import Parts, Updates
from tailorfl.engines.sequential import Sequential
from tailorfl.engines.state import StateStore
from tailorfl.engines.vectorized import Vectorized
from tailorfl.engines.workers.team import Team, Workers

log = logging.getLogger(__name__)

T = TypeVar("T")

PROBE_STEPS = 8
"""At most so many training steps of each local training are measured."""
DEVICE_CLIENTS = 32
"""So many clients are measured on a GPU, where the size of a chunk is not known before the first one."""
PROBE_REPEATS, PROBE_SECONDS = 7, 2.0
"""The measurement is repeated so often, as long as it takes no longer than this."""


class Auto:
    """Vectorized where that is faster and possible, else sequential; one log line says which and why.

    Args:
        sequential, vectorized: the engines it chooses from; both are measured in this process.
        team: workers in which the one that was chosen runs; None runs it in this process.
        choice: the name of one of them, which is then not measured.
    """

    def __init__(
        self,
        sequential: InProcess | None = None,
        vectorized: InProcess | None = None,
        *,
        team: Team | None = None,
        choice: str | None = None,
    ) -> None:
        self._sequential = Sequential() if sequential is None else sequential
        self._vectorized = Vectorized() if vectorized is None else vectorized
        self.team = team
        self._chosen: InProcess | None = None
        if choice is not None:
            self.choose(choice)

    @property
    def name(self) -> str:
        """`auto` until it has chosen, then the engine it chose."""
        return "auto" if self._chosen is None else self._chosen.name

    @property
    def current(self) -> InProcess:
        """The engine that was chosen; the sequential one until then."""
        return self._chosen or self._sequential

    @property
    def _running(self) -> Engine:
        """What runs it."""
        return self.current if self.team is None else Workers(self.current, self.team)

    def choose(self, name: str) -> None:
        """Fixes the choice."""
        self._chosen = self._sequential if name == "sequential" else self._vectorized

    def hold(self, store: StateStore) -> StateStore:
        """Returns the store that keeps what `store` keeps where the engines want the states."""
        return self._running.hold(store)

    def train(self, visit: Visit, store: StateStore) -> Updates:
        """Runs the function on every client with its state of `store`."""
        self._settle(visit, Stored(store).of)
        return self._attempt(visit, lambda engine: engine.train(visit, store))

    def map(self, visit: Visit, states: TensorDict | Stored) -> Parts:
        """Returns what the function makes of every client, stacked."""
        self._settle(visit, states.of if isinstance(states, Stored) else lambda ids: states[: len(ids)])
        return self._attempt(visit, lambda engine: engine.map(visit, states))

    def predict(self, asked: Inference) -> list[Tensor]:
        """Returns the outputs of each model on its rows."""
        return self._running.predict(asked)

    def _attempt(self, visit: Visit, run: Callable[[Engine], T]) -> T:
        """Returns what `run` makes of the engine that was chosen, or of the loop where that cannot run the model."""
        try:
            return run(self._running)
        except Exception as error:
            # Chosen on another architecture: the first one could run vectorized.
            if self._chosen is not self._vectorized or not unsupported(error):
                raise
            self._give_up(error)
            if visit.cohort.record is not None:
                visit.cohort.record.forget()
            return run(self._running)

    def _settle(self, visit: Visit, states: Callable[[Sequence[int]], TensorDict]) -> None:
        """Measures and chooses, if that was not done before; `states` gives those of the first clients."""
        if self._chosen is None:
            self._measure(visit, states)

    def _measure(self, visit: Visit, states: Callable[[Sequence[int]], TensorDict]) -> None:
        on_host = self._vectorized.place.is_host
        everyone = visit.cohort.ids
        clients = min(len(everyone), self._vectorized.chunk_of(visit.cohort) if on_host else DEVICE_CLIENTS)
        probe = visit.part(range(clients))
        # What is measured is thrown away, so the ledger must not see it.
        probe = replace(probe, cohort=replace(probe.cohort, limit=PROBE_STEPS, record=None))
        given = states(everyone[:clients])
        looped = _seconds(self._sequential, probe, given)  # the first run of each also warms it up
        if not probe.cohort.plans:
            return  # nothing was trained (untrained models were looked at): nothing to learn about training
        if clients < 2:
            self._chosen = self._sequential
            return
        try:
            batched = _seconds(self._vectorized, probe, given)
        except Exception as error:
            if not unsupported(error):
                raise
            self._give_up(error)
            return
        if batched + looped < PROBE_SECONDS:
            took = max(batched + looped, PROBE_SECONDS / PROBE_REPEATS)  # 0 by a clock with coarse ticks
            rounds = min(PROBE_REPEATS, 1 + int(PROBE_SECONDS / took))
            # In alternation, so that a slow moment of the machine hits both.
            both = (self._vectorized, self._sequential)
            pairs = [[_seconds(engine, probe, given) for engine in both] for _ in range(rounds)]
            batched, looped = min(b for b, _ in pairs), min(s for _, s in pairs)
        self._chosen = self._vectorized if batched <= looped else self._sequential
        log.info(
            "engine: %s (%.3g s against %.3g s for %d clients)",
            self._chosen.name,
            min(batched, looped),
            max(batched, looped),
            clients,
        )

    def _give_up(self, error: Exception) -> None:
        log.warning(
            "the vectorized engine cannot run this model (%s); using the sequential one",
            first_line(error),
            extra={"once": first_line(error)},
        )
        self._chosen = self._sequential


def keep_choice(engine: Engine, name: str) -> None:
    """Has an automatic engine go on as the one that a run's records call `name`; others have no choice."""
    if isinstance(engine, Auto) and name != "auto":
        engine.choose(name)


def _seconds(engine: InProcess, visit: Visit, states: TensorDict) -> float:
    """Seconds of one run: of the process where torch has one thread, which other processes do not disturb.

    Results are in host memory at the end of a run, so that a GPU has finished, too.
    """
    alone = torch.get_num_threads() == 1 and engine.place.is_host
    clock = time.process_time if alone else time.perf_counter
    begin = clock()
    engine.map(visit, states)
    return clock() - begin
