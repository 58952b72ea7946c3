"""Several workers: the chunks of a cohort, each run by whoever is free, with the numbers of one process.

How a cohort is cut depends on the cohort and the engine alone, never on how many workers there are, so neither their
number nor the order in which they finish changes a bit of what comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.engines.base import Inference, Stored, Visit
from tailorfl.engines.in_process import InProcess
from tailorfl.engines.results import Parts, Stacked, Updates
from tailorfl.engines.state import StateStore
from tailorfl.engines.workers.tasks import Map, Predict, States, Task, Train, uses_of
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort
from tailorfl.training.ledger import Record, Uses

WORTH = 2e8
"""Products (samples times scalars of the model) from which on an evaluation is shared: what takes some milliseconds."""


class Team(Protocol):
    """Workers on one machine or on several."""

    def hold(self, store: StateStore) -> StateStore:
        """Returns the store that keeps what `store` keeps where the workers find it."""

    def states(self, store: StateStore, chunks: Sequence[Sequence[int]], fresh: bool) -> list[States]:
        """Returns for each chunk of clients where a worker finds their states, or with `fresh` their starts."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        """Yields (position in `tasks`, what came out) as it is done; tensors are valid until the next one is asked for.

        Raises:
            WorkerError: a worker was lost.
        """

    def close(self) -> None:
        """Ends the workers; the next `run` starts new ones."""


class Workers:
    """An engine whose chunks of clients run in workers.

    Args:
        kind: the engine that each of them runs.
        team: the workers.
    """

    def __init__(self, kind: InProcess, team: Team) -> None:
        self._kind, self.team = kind, team

    @property
    def name(self) -> str:
        """That of the engine that the workers run: the numbers are the same."""
        return self._kind.name

    @property
    def precision(self) -> str:
        """That of the engine that the workers run."""
        return self._kind.precision

    def hold(self, store: StateStore) -> StateStore:
        """Returns the store that keeps what `store` keeps where the workers find it."""
        return self.team.hold(store)

    def train(self, visit: Visit, store: StateStore) -> Updates:
        """Runs the function on every client with its state of `store`."""
        where, parts = self._cut(visit)
        states = self.team.states(store, [part.cohort.ids for part in parts], fresh=False)
        tasks = [Train(self._kind, part, held) for part, held in zip(parts, states, strict=True)]
        out = Stacked(len(visit.cohort.ids), self._kind.room, visit.unlike)
        for k, (replies, metrics, fine, uses) in self.team.run(tasks):
            out.put_updates(where[k], *(_kept(found, tasks) for found in (replies, metrics, fine)))
            _note(visit.cohort, uses)
        return out.updates()

    def map(self, visit: Visit, states: TensorDict | Stored) -> Parts:
        """Returns what the function makes of every client, stacked.

        States that are given are mapped in this process. Of those that are kept the first chunk runs in this process;
        if the function needed no training there, so do the others.
        """
        if isinstance(states, TensorDict):
            return self._kind.map(visit, states)
        where, parts = self._cut(visit)
        out = Stacked(len(visit.cohort.ids), self._kind.room, visit.unlike)

        def note(k: int, found: Parts, uses: Mapping[int, Uses]) -> None:
            out.put(where[k], [dict(tree.leaves(_kept(part, parts))) for part in found])
            _note(visit.cohort, uses)

        watched = Watched(visit)
        here = 0
        while here < len(parts) and not watched.trained:
            part = replace(parts[here], function=watched)
            note(here, self._kind.map(part, states), uses_of(part.cohort))
            here += 1
        if here == len(parts):
            return out.parts()
        held = self.team.states(states.store, [part.cohort.ids for part in parts[here:]], states.fresh)
        tasks = [Map(self._kind, part, rows) for part, rows in zip(parts[here:], held, strict=True)]
        for k, (found, uses) in self.team.run(tasks):
            note(here + k, found, uses)
        return out.parts()

    def predict(self, asked: Inference) -> list[Tensor]:
        """Returns the outputs of each model on its rows."""
        if asked.samples * (asked.model.scalars + asked.model.held_scalars) <= WORTH:
            return self._kind.predict(asked)
        tasks = [Predict(self._kind, share) for share in self._kind.shares(asked)]
        found: list[list[Tensor]] = [[] for _ in tasks]
        for k, outputs in self.team.run(tasks):
            found[k] = [t.clone() for t in outputs]
        return asked.joined(found)

    def _cut(self, visit: Visit) -> tuple[list[Tensor], list[Visit]]:
        """The positions of each chunk, and the chunks; each has a ledger of its own where the cohort has one."""
        where = list(self._kind.chunks(visit.cohort))
        parts = [visit.part(positions) for positions in where]
        if visit.cohort.record is None:
            return where, parts
        return where, [replace(part, cohort=replace(part.cohort, record=Record())) for part in parts]


class Watched:
    """The function of a visit, and whether any client that ran it has trained."""

    def __init__(self, visit: Visit) -> None:
        self._function, self.about, self.trained = visit.function, visit.about, False

    def __call__(self, client: Client, state: TensorDict, message: TensorDict) -> Parts:
        found = self._function(client, state, message)
        self.trained = self.trained or bool(client.metrics)
        return found


def _note(cohort: Cohort, uses: Mapping[int, Uses]) -> None:
    if cohort.record is not None:
        cohort.record.uses.update(uses)


def _kept(found: Any, chunks: Sequence[object]) -> Any:
    """What a worker sent; a copy where `Stacked` would keep the tensors as they are."""
    return found.clone() if len(chunks) == 1 else found
