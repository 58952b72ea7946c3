"""The base of engines that run clients in this process, a chunk of the cohort after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.engines.base import CohortTask, Inference, Stored
from tailorfl.engines.devices import HOST, Place
from tailorfl.engines.memory import Room
from tailorfl.engines.results import CohortUpdates, Parts, Stacked, finite_clients
from tailorfl.engines.state import StateStore
from tailorfl.settings.experiment import DEFAULT
from tailorfl.training.cohort import Cohort


class InProcessEngine(ABC):
    """An engine that needs no other process.

    Args:
        device: where clients calculate.
        precision: what networks multiply in: float32, tf32 or bfloat16.
    """

    kind: ClassVar[str]
    """Its name in settings."""

    def __init__(self, device: torch.device = HOST, precision: str = DEFAULT.engine.precision) -> None:
        self.place, self.room = Place(device, precision), Room()

    @property
    def name(self) -> str:
        """Its name in the run's records: its kind, and its precision where that is not float32."""
        return self.kind if self.precision == "float32" else f"{self.kind}, {self.precision}"

    @property
    def precision(self) -> str:
        """The precision of products."""
        return self.place.precision

    def hold(self, store: StateStore) -> StateStore:
        """Return `store` itself."""
        return store

    def train(self, task: CohortTask, store: StateStore) -> CohortUpdates:
        """Run the function on every client; only one chunk has its states taken out of the store at a time."""
        out = Stacked(len(task.cohort.ids), self.room, task.unlike)
        for positions in self.chunks(task.cohort):
            part = task.part(positions)
            new, replies, metrics = self.map(part, Stored(store))
            store.stage(part.cohort.ids, new)
            out.put(positions, [replies, metrics, {"finite": finite_clients(new, replies)}])
        return out.updates()

    def map(self, task: CohortTask, states: TensorDict | Stored) -> Parts:
        """Return what the function makes of every client, stacked."""
        start = states if isinstance(states, TensorDict) else states.of(task.cohort.ids)
        return self.run(task, start)

    @abstractmethod
    def run(self, task: CohortTask, states: TensorDict) -> Parts:
        """Return what the function makes of every client with its state, stacked."""

    def predict(self, task: Inference) -> list[Tensor]:
        """Return the outputs of each model on its rows."""
        if not task.samples:
            return [torch.zeros(0, task.source.outputs)] * task.models
        with self.place.calculating():
            return self.outputs(self.place.inference(task))

    @abstractmethod
    def outputs(self, task: Inference) -> list[Tensor]:
        """Return the outputs of each model in host memory; the models and their source lie on the device.

        There is at least one row.
        """

    @abstractmethod
    def shares(self, task: Inference) -> list[Inference]:
        """Return the pieces in which several processes may be asked, which give the bits of the whole."""

    @abstractmethod
    def chunk_of(self, cohort: Cohort) -> int:
        """Return how many clients make up a chunk."""

    def chunks(self, cohort: Cohort) -> Iterator[Tensor]:
        """Yield the positions of each chunk's clients, int64 [clients]: those with most samples first.

        The size is asked for again each time: what fits into memory may have shown in the chunk before.
        """
        return cut(cohort, partial(self.next_chunk, cohort))

    def next_chunk(self, cohort: Cohort, remaining: Tensor) -> Tensor:
        """Return the first of the positions that are `remaining`, as many as make up the next chunk."""
        return remaining[: evenly(len(remaining), self.chunk_of(cohort))]


def largest_first(cohort: Cohort) -> Tensor:
    """Return the positions of a cohort's clients, int64 [clients], those with most samples first."""
    return torch.from_numpy(np.argsort(-cohort.sizes, kind="stable"))


def cut(cohort: Cohort, first_of: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Yield the positions of a cohort's clients in parts, of those that are left each time what `first_of` takes."""
    remaining = largest_first(cohort)
    while len(remaining):
        part = first_of(remaining)
        yield part
        remaining = remaining[len(part) :]


def evenly(clients: int, most: int) -> int:
    """Return the size of the next chunk where `clients` are left: as few chunks as can be, and those alike."""
    return -(-clients // -(-clients // most))
