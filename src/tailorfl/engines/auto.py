"""The automatic engine: measures both ways on the real model and data, and keeps the faster."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.cohort import Cohort
from tailorfl.data.source import Source
from tailorfl.engines.base import ClientFunction, Engine, Parts
from tailorfl.engines.sequential import Sequential
from tailorfl.engines.vectorized import Vectorized

log = logging.getLogger(__name__)

PROBE_STEPS = 8
"""At most so many training steps of each local training are measured."""
PROBE_REPEATS, PROBE_SECONDS = 7, 2.0
"""The measurement is repeated so often, as long as it takes no longer than this."""


class Auto:
    """Vectorized where that is faster and possible, else sequential; one log line says which and why."""

    def __init__(self, chunk: int | None = None, choice: str | None = None) -> None:
        self._sequential, self._vectorized = Sequential(), Vectorized(chunk)
        self._chosen: Engine | None = None
        if choice is not None:
            self.choose(choice)

    @property
    def name(self) -> str:
        """`auto` until it has chosen, then the engine it chose."""
        return "auto" if self._chosen is None else self._chosen.name

    def choose(self, name: str) -> None:
        """Fixes the choice, as a resumed run must."""
        self._chosen = self._sequential if name == "sequential" else self._vectorized

    def map(
        self,
        function: ClientFunction,
        cohort: Cohort,
        states: TensorDict,
        received: TensorDict,
        index: Tensor | None = None,
    ) -> Parts:
        """Returns `function` of every client, stacked."""
        if self._chosen is None:
            self._measure(function, cohort, states, received, index)
        try:
            return (self._chosen or self._sequential).map(function, cohort, states, received, index)
        except Exception as error:
            # Chosen on another architecture: the first one could run vectorized.
            if self._chosen is not self._vectorized or not unsupported(error):
                raise
            self._give_up(error)
            if cohort.record is not None:
                cohort.record.forget()
            return self._sequential.map(function, cohort, states, received, index)

    def predict(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of client i's model on its rows."""
        return (self._chosen or self._sequential).predict(cohort, models, rows)

    def predict_all(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> Tensor:
        """Returns the outputs of every client's model on the same rows."""
        return (self._chosen or self._sequential).predict_all(cohort, models, source, rows)

    def _measure(
        self,
        function: ClientFunction,
        cohort: Cohort,
        states: TensorDict,
        received: TensorDict,
        index: Tensor | None,
    ) -> None:
        clients = min(len(cohort.ids), self._vectorized.chunk_of(cohort))
        # What is measured is thrown away, so the ledger must not see it.
        probe = replace(cohort.part(range(clients)), limit=PROBE_STEPS, record=None)
        part = (function, probe, states[:clients], received, None if index is None else index[:clients])
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
            rounds = min(PROBE_REPEATS, 1 + int(PROBE_SECONDS / (batched + looped)))
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
            "the vectorized engine cannot run this model (%s); using the sequential one", _first_line(error)
        )
        self._chosen = self._sequential


def unsupported(error: BaseException) -> bool:
    """Whether an error says that `vmap` lacks a rule for the model, rather than that the model is wrong."""
    text = f"{error} {error.__cause__ or ''}"
    return any(mark in text for mark in ("vmap", "Batching rule", "batching rule", "functorch"))


def _seconds(
    engine: Engine, part: tuple[ClientFunction, Cohort, TensorDict, TensorDict, Tensor | None]
) -> float:
    """Seconds of one run: of the process where torch has one thread, which other processes do not disturb."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    engine.map(*part)
    return clock() - begin


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200]
