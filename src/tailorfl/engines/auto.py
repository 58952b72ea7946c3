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

from tailorfl.core.cohort import Cohort
from tailorfl.core.state import StateStore
from tailorfl.data.source import Source
from tailorfl.engines.base import ClientFunction, InProcess, Parts, Updates
from tailorfl.engines.devices import HOST
from tailorfl.engines.sequential import Sequential
from tailorfl.engines.vectorized import Vectorized

log = logging.getLogger(__name__)

T = TypeVar("T")

PROBE_STEPS = 8
"""At most so many training steps of each local training are measured."""
DEVICE_CLIENTS = 32
"""So many clients are measured on a GPU, where the size of a chunk is not known before the first one."""
PROBE_REPEATS, PROBE_SECONDS = 7, 2.0
"""The measurement is repeated so often, as long as it takes no longer than this."""


class Auto(InProcess):
    """Vectorized where that is faster and possible, else sequential; one log line says which and why."""

    def __init__(
        self, chunk: int | None = None, choice: str | None = None, device: torch.device = HOST
    ) -> None:
        super().__init__()
        self._sequential, self._vectorized = Sequential(device), Vectorized(chunk, device)
        self._chosen: Sequential | Vectorized | None = None
        if choice is not None:
            self.choose(choice)

    @property
    def name(self) -> str:
        """`auto` until it has chosen, then the engine it chose."""
        return "auto" if self._chosen is None else self._chosen.name

    @property
    def current(self) -> Sequential | Vectorized:
        """The engine that was chosen; the sequential one until then."""
        return self._chosen or self._sequential

    def choose(self, name: str) -> None:
        """Fixes the choice."""
        self._chosen = self._sequential if name == "sequential" else self._vectorized

    def resume(self, name: str) -> None:
        """Goes on with the choice of a run whose records call its engine `name`, if it had made one."""
        if name != "auto":
            self.choose(name)

    def chunk_of(self, cohort: Cohort) -> int:
        """Returns how many clients make up a chunk of the engine that was chosen."""
        return self.current.chunk_of(cohort)

    def map(
        self,
        function: ClientFunction,
        cohort: Cohort,
        states: TensorDict,
        received: TensorDict,
        index: Tensor | None = None,
    ) -> Parts:
        """Returns `function` of every client, stacked."""
        self.settle(function, cohort, lambda clients: states[:clients], received, index)
        return self.attempt(cohort, lambda engine: engine.map(function, cohort, states, received, index))

    def train(
        self,
        function: ClientFunction,
        cohort: Cohort,
        store: StateStore,
        received: TensorDict,
        index: Tensor | None = None,
    ) -> Updates:
        """Runs `function` on every client with its state of `store`."""
        self.settle(function, cohort, lambda clients: store.get(cohort.ids[:clients]), received, index)
        return self.attempt(cohort, lambda engine: engine.train(function, cohort, store, received, index))

    def predict(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of client i's model on its rows."""
        return self.current.predict(cohort, models, rows)

    def predict_all(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> Tensor:
        """Returns the outputs of every client's model on the same rows."""
        return self.current.predict_all(cohort, models, source, rows)

    def attempt(self, cohort: Cohort, run: Callable[[InProcess], T]) -> T:
        """Returns what `run` makes of the engine that was chosen, or of the loop where that cannot run the model."""
        try:
            return run(self.current)
        except Exception as error:
            # Chosen on another architecture: the first one could run vectorized.
            if self._chosen is not self._vectorized or not unsupported(error):
                raise
            self._give_up(error)
            if cohort.record is not None:
                cohort.record.forget()
            return run(self._sequential)

    def settle(
        self,
        function: ClientFunction,
        cohort: Cohort,
        states: Callable[[int], TensorDict],
        received: TensorDict,
        index: Tensor | None,
    ) -> None:
        """Measures and chooses, if that was not done before; `states(n)` are those of the first n clients."""
        if self._chosen is None:
            self._measure(function, cohort, states, received, index)

    def _measure(
        self,
        function: ClientFunction,
        cohort: Cohort,
        states: Callable[[int], TensorDict],
        received: TensorDict,
        index: Tensor | None,
    ) -> None:
        on_host = self._vectorized.place.is_host
        clients = min(len(cohort.ids), self._vectorized.chunk_of(cohort) if on_host else DEVICE_CLIENTS)
        # What is measured is thrown away, so the ledger must not see it.
        probe = replace(cohort.part(range(clients)), limit=PROBE_STEPS, record=None)
        part = (function, probe, states(clients), received, None if index is None else index[:clients])
        looped = _seconds(self._sequential, part)  # the first run of each also warms it up
        if not probe.plans:
            return  # nothing was trained (untrained models were looked at): nothing to learn about training
        if clients < 2:
            self._chosen = self._sequential
            return
        try:
            batched = _seconds(self._vectorized, part)
        except Exception as error:
            if not unsupported(error):
                raise
            self._give_up(error)
            return
        if batched + looped < PROBE_SECONDS:
            took = max(batched + looped, PROBE_SECONDS / PROBE_REPEATS)  # 0 by a clock with coarse ticks
            rounds = min(PROBE_REPEATS, 1 + int(PROBE_SECONDS / took))
            # In alternation, so that a slow moment of the machine hits both.
            pairs = [
                (_seconds(self._vectorized, part), _seconds(self._sequential, part)) for _ in range(rounds)
            ]
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
            _first_line(error),
            extra={"once": _first_line(error)},
        )
        self._chosen = self._sequential


def unsupported(error: BaseException) -> bool:
    """Whether an error says that `vmap` lacks a rule for the model, rather than that the model is wrong."""
    text = f"{error} {error.__cause__ or ''}"
    return any(mark in text for mark in ("vmap", "Batching rule", "batching rule", "functorch"))


def _seconds(
    engine: Sequential | Vectorized,
    part: tuple[ClientFunction, Cohort, TensorDict, TensorDict, Tensor | None],
) -> float:
    """Seconds of one run: of the process where torch has one thread, which other processes do not disturb.

    Results are in host memory at the end of a run, so that a GPU has finished, too.
    """
    alone = torch.get_num_threads() == 1 and engine.place.is_host
    clock = time.process_time if alone else time.perf_counter
    begin = clock()
    engine.map(*part)
    return clock() - begin


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200]
