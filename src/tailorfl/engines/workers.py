"""Several workers: the chunks of a cohort, each run by whoever is free, with the numbers of one process.

How a cohort is cut depends on the cohort and the engine alone, never on how many workers there are, so neither their
number nor the order in which they finish changes a bit of what comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.client import Client
from tailorfl.core.cohort import Cohort, rows_at_once
from tailorfl.core.ledger import Record, Uses
from tailorfl.core.state import StateStore
from tailorfl.data.source import Source
from tailorfl.engines.base import ClientFunction, InProcess, Parts, Stacked, Updates
from tailorfl.engines.memory import Room
from tailorfl.engines.vectorized import Vectorized
from tailorfl.engines.worker import Deploy, Predict, PredictAll, States, Train, Work, uses_of

WORTH = 2e8
"""Products (samples times scalars of the model) from which on an evaluation is shared: what takes some milliseconds."""

SHARES = 8
"""Into so many parts an evaluation is cut where each model is evaluated by itself."""


class Team(Protocol):
    """Workers on one machine or on several."""

    def hold(self, store: StateStore) -> StateStore:
        """Returns the store that keeps what `store` keeps where the workers find it."""

    def states(self, store: StateStore, chunks: Sequence[Sequence[int]], fresh: bool) -> list[States]:
        """Returns for each chunk of clients where a worker finds their states, or with `fresh` their starts."""

    def run(self, works: Sequence[Work]) -> Iterator[tuple[int, Any]]:
        """Yields (position in `works`, what came out) as it is done; tensors are valid until the next one is asked for.

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
        self._kind, self.team, self._room = kind, team, Room()

    @property
    def name(self) -> str:
        """That of the engine that the workers run: the numbers are the same."""
        return self._kind.name

    def resume(self, name: str) -> None:
        """Goes on as the engine of a run's records."""
        self._kind.resume(name)

    def hold(self, store: StateStore) -> StateStore:
        """Returns the store that keeps what `store` keeps where the workers find it."""
        return self.team.hold(store)

    def train(
        self,
        function: ClientFunction,
        cohort: Cohort,
        store: StateStore,
        received: TensorDict,
        index: Tensor | None = None,
    ) -> Updates:
        """Runs `function` on every client with its state of `store`; an automatic choice is made in this process."""
        self._kind.settle(function, cohort, lambda clients: store.get(cohort.ids[:clients]), received, index)

        def run(engine: InProcess) -> Updates:
            where, parts = _cut(engine, cohort)
            states = self.team.states(store, [part.ids for part in parts], fresh=False)
            works = [
                Train(engine, function, part, held, received, None if index is None else index[chosen])
                for chosen, part, held in zip(where, parts, states, strict=True)
            ]
            out = Stacked(len(cohort.ids), self._room)
            for k, (replies, metrics, fine, uses) in self.team.run(works):
                out.put_updates(where[k], *(_kept(found, works) for found in (replies, metrics, fine)))
                if cohort.record is not None:
                    cohort.record.uses.update(uses)
            return out.updates()

        return self._kind.attempt(cohort, run)

    def deploy(
        self,
        function: ClientFunction,
        cohort: Cohort,
        store: StateStore,
        received: TensorDict,
        index: Tensor | None = None,
        *,
        fresh: bool = False,
    ) -> TensorDict:
        """Returns the model of every client.

        The first chunk runs in this process; if its models needed no training, so do the others.
        """

        def run(engine: InProcess) -> TensorDict:
            where, parts = _cut(engine, cohort)
            out = Stacked(len(cohort.ids), self._room)
            chosen = [None if index is None else index[positions] for positions in where]

            trains = False

            def watched(client: Client, state: TensorDict, message: TensorDict) -> Parts:
                nonlocal trains
                found = function(client, state, message)
                trains = trains or bool(client.metrics)
                return found

            def note(k: int, models: TensorDict, uses: Mapping[int, Uses]) -> None:
                out.put(where[k], [dict(tree.leaves(_kept(models, parts)))])
                if cohort.record is not None:
                    cohort.record.uses.update(uses)

            for k, part in enumerate(parts):
                if k and trains:
                    break
                models = engine.deploy(watched, part, store, received, chosen[k], fresh=fresh)
                note(k, models, uses_of(part))
            if len(parts) == 1 or not trains:
                return out.parts()[0]
            states = self.team.states(store, [part.ids for part in parts[1:]], fresh)
            works = [
                Deploy(engine, function, part, held, received, rows)
                for part, held, rows in zip(parts[1:], states, chosen[1:], strict=True)
            ]
            for k, (models, uses) in self.team.run(works):
                note(k + 1, models, uses)
            return out.parts()[0]

        return self._kind.attempt(cohort, run)

    def map(
        self,
        function: ClientFunction,
        cohort: Cohort,
        states: TensorDict,
        received: TensorDict,
        index: Tensor | None = None,
    ) -> Parts:
        """Returns `function` of every client, stacked, found in this process."""
        return self._kind.map(function, cohort, states, received, index)

    def predict(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of client i's model on its rows."""
        engine, clients = self._kind.current, models.batch_size[0]
        if not _worth_it(cohort, sum(len(r) for r in rows)):
            return engine.predict(cohort, models, rows)
        bare = replace(cohort, ids=(), members=(), val=())
        if isinstance(engine, Vectorized):  # all models at once, some samples after others
            step = rows_at_once(cohort.source, clients)
            pieces = [[r[s : s + step] for r in rows] for s in range(0, max(map(len, rows)), step)]
            found = self._ordered([Predict(engine, bare, models, piece) for piece in pieces])
            return [torch.cat([part[i] for part in found]) for i in range(clients)]
        shares = [range(clients)[s] for s in _shares(clients)]
        works = [Predict(engine, bare, models[s.start : s.stop], rows[s.start : s.stop]) for s in shares]
        return [outputs for part in self._ordered(works) for outputs in part]

    def predict_all(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> Tensor:
        """Returns the outputs of every client's model on the same rows."""
        engine, clients = self._kind.current, models.batch_size[0]
        if not _worth_it(cohort, len(rows) * clients):
            return engine.predict_all(cohort, models, source, rows)
        bare = replace(cohort, ids=(), members=(), val=())
        if isinstance(engine, Vectorized) or clients == 1:
            pieces = torch.split(rows, rows_at_once(source, clients))
            return torch.cat(
                self._ordered([PredictAll(engine, bare, models, source, piece) for piece in pieces]), dim=1
            )
        return torch.cat(
            self._ordered([PredictAll(engine, bare, models[s], source, rows) for s in _shares(clients)])
        )

    def _ordered(self, works: Sequence[Work]) -> list[Any]:
        """What came out of each work, as copies."""
        found: list[Any] = [None] * len(works)
        for k, value in self.team.run(works):
            found[k] = value.clone() if isinstance(value, Tensor) else [t.clone() for t in value]
        return found


def _cut(engine: InProcess, cohort: Cohort) -> tuple[list[Tensor], list[Cohort]]:
    """The positions of each chunk, and the chunks; each has a ledger of its own where the cohort has one."""
    where = list(engine.chunks(cohort))
    parts = [cohort.part(positions.tolist()) for positions in where]
    return where, [part if cohort.record is None else replace(part, record=Record()) for part in parts]


def _kept(found: Any, chunks: Sequence[object]) -> Any:
    """What a worker sent; a copy where `Stacked` would keep the tensors as they are."""
    return found.clone() if len(chunks) == 1 else found


def _worth_it(cohort: Cohort, samples: int) -> bool:
    return samples * (cohort.model.scalars + cohort.model.held_scalars) >= WORTH


def _shares(models: int) -> list[slice]:
    step = -(-models // SHARES)
    return [slice(start, start + step) for start in range(0, models, step)]
