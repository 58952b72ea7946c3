"""An engine with a stop-watch, for what an experiment would cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from tensordict import TensorDict

from tailorfl.engines.base import Visit
from tailorfl.engines.results import Parts, Updates
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

    def train(self, visit: Visit, store: StateStore) -> Updates:
        """Runs the function on every client."""
        with self._clocked():
            return super().train(self._of(visit), store)

    def run(self, visit: Visit, states: TensorDict) -> Parts:
        """Returns what the function makes of every client."""
        with self._clocked():
            return super().run(self._of(visit), states)

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        start = clock()
        yield
        self.seconds += clock() - start

    def _of(self, visit: Visit) -> Visit:
        return replace(visit, cohort=replace(visit.cohort, counting=True)) if self._counting else visit
