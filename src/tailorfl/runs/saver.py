"""When a run saves its state: at a given interval, else as often as is cheap."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from tailorfl.evaluation.selection import Selection
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.store import RunStore

SHARE = 0.02
"""Checkpoints may take this share of the time when no interval is configured."""
BYTES_A_SECOND, WAIT = 200e6, 0.01
"""What the first checkpoint is expected to cost: bytes written, hashed and read back, and seconds of waiting for the
disk. Later ones are expected to cost what the last one did."""


class Saver:
    """Saves the checkpoints of one run.

    Args:
        interval: rounds between checkpoints; None: as often as takes `SHARE` of the time, from the first round on.
        selection: personal models that were chosen, which are saved with the state.
    """

    def __init__(
        self, sim: Simulation, store: RunStore, interval: int | None, selection: Selection | None = None
    ) -> None:
        self._sim, self._store, self._interval, self._selection = sim, store, interval, selection
        self._saved_at = time.perf_counter()
        self._cost: float | None = None

    def due(self) -> bool:
        """Whether it is time for a checkpoint, after a round."""
        if self._interval is not None:
            return self._sim.round % self._interval == 0
        if self._cost is None:
            tensors, _ = self._dump()
            self._cost = WAIT + sum(t.numel() * t.element_size() for t in tensors.values()) / BYTES_A_SECOND
        return time.perf_counter() - self._saved_at >= self._cost / SHARE

    def save(self, seconds: float) -> None:
        """Saves the state as it stands; `seconds` the run has taken so far."""
        begin = time.perf_counter()
        tensors, facts = self._dump()
        self._store.save_checkpoint(self._sim.round, tensors, {**facts, "seconds": seconds})
        self._saved_at = time.perf_counter()
        self._cost = self._saved_at - begin

    def _dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = self._sim.dump()
        return tensors if self._selection is None else {**tensors, **self._selection.dump()}, facts
