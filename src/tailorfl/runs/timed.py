"""An engine with a stop-watch, for what an experiment would cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from tensordict import TensorDict

from tailorfl.engines.base import CohortTask
from tailorfl.engines.results import CohortUpdates, Parts
from tailorfl.engines.sequential import Sequential
from tailorfl.engines.state import StateStore


def clock() -> float:
    """Seconds of this process where torch has one thread, which no other disturbs; else of the day."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Timed(Sequential):
    """An engine that says how long its clients took; if `counting` they train nothing, but send what they would."""

    def __init__(self, counting: bool) -> None:
        super().__init__()
        self.seconds, self._counting = 0.0, counting

    def train(self, task: CohortTask, store: StateStore) -> CohortUpdates:
        """Runs the function on every client."""
        with self._clocked():
            return super().train(self._of(task), store)

    def run(self, task: CohortTask, states: TensorDict) -> Parts:
        """Returns what the function makes of every client."""
        with self._clocked():
            return super().run(self._of(task), states)

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        start = clock()
        yield
        self.seconds += clock() - start

    def _of(self, task: CohortTask) -> CohortTask:
        return replace(task, cohort=replace(task.cohort, counting=True)) if self._counting else task
