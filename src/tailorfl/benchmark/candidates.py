"""The candidates of a benchmark: one round repeated, by the plain loop and by every engine that makes sense."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tailorfl.benchmark.plain_loop import LoopClient, PlainLoop, fastest, shuffled
from tailorfl.engines.base import Engine
from tailorfl.engines.choice import Auto
from tailorfl.engines.devices import HOST, available
from tailorfl.engines.in_process import Sequential, Vectorized, evenly
from tailorfl.engines.pool import PooledEngine
from tailorfl.engines.process_pool import ProcessPool
from tailorfl.rounds.groups import Group, by_group
from tailorfl.rounds.planning import work_of
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort
from tailorfl.training.objective import LOSSES

CHUNKS = (1, 4, 16, 64)


class Round:
    """A simulation's next round with given clients, to be done again and again from the same state.

    Attributes:
        gradients: client -> gradients of single samples that it takes, counted without training.
        cohorts: the training clients of each architecture.
    """

    def __init__(self, sim: Simulation, sampled: tuple[int, ...], training: tuple[int, ...]) -> None:
        self.sim, self.sampled, self.training = sim, sampled, training
        tensors, facts = sim.dump()
        # Told that no choice was made, an automatic engine keeps its own.
        self._tensors, self._facts = {p: t.clone() for p, t in tensors.items()}, {**facts, "engine": "auto"}
        work, _ = work_of(sim, sim.method.broadcast(sim.server, training), training, sim.round)
        self.gradients: Mapping[int, int] = {client: round(work[client].gradients) for client in training}
        self.cohorts: list[tuple[Group, Cohort]] = [
            (group, sim.cohort(tuple(training[k] for k in positions)))
            for group, positions in by_group(sim.groups, training)
        ]

    def reset(self) -> None:
        """Put the simulation back to before the round."""
        self.sim.load(self._tensors, self._facts)

    def run(self, engine: Engine) -> None:
        """Do the round with an engine."""
        self.sim.engine = engine
        self.sim.step(self.sampled, training=self.training)

    def chunk(self, engine: Auto | Sequential | Vectorized) -> int:
        """Return how many clients an engine trains together, at most."""
        current = engine.current if isinstance(engine, Auto) else engine
        if not isinstance(current, Vectorized):
            return 1
        return max(len(chunk) for _, cohort in self.cohorts for chunk in current.chunks(cohort))


class LoopRound:
    """FedAvg's round by the plain loop: every client takes as many gradients of samples as in `round_`.

    There is one loop an architecture, each in the variant that is fastest here.
    """

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._loops: list[PlainLoop] = []
        for group, cohort in round_.cohorts:
            start, clients = tree.tensors(group.context.init), list(self._clients(cohort))
            source, loss = cohort.source.original, LOSSES[cohort.source.task]
            self._loops.append(fastest(cohort.model.whole, source, loss, cohort.config, start, clients))

    @property
    def variant(self) -> str:
        """Layout and kernels of the loops."""
        return "; ".join(dict.fromkeys(str(loop.variant) for loop in self._loops))

    def run(self) -> None:
        """Do the round, with new batches."""
        for loop, (group, cohort) in zip(self._loops, self._round.cohorts, strict=True):
            loop.round(tree.tensors(group.context.init), self._clients(cohort))

    def _clients(self, cohort: Cohort) -> Iterator[LoopClient]:
        total = max(int(cohort.sizes.sum()), 1)
        for client, rows in zip(cohort.ids, cohort.members, strict=True):
            gradients = self._round.gradients[client]
            batches = shuffled(torch.from_numpy(rows), cohort.config.batch_size, gradients, cohort.min_batch)
            yield LoopClient(len(rows) / total, batches)


@dataclass(frozen=True)
class Candidate:
    """An engine to be measured."""

    name: str
    settings: str
    kind: Auto | Sequential | Vectorized
    """The engine that cuts the cohort and trains its chunks."""
    pool: ProcessPool | None = None
    """The workers that do so at once, if there are any."""

    @property
    def engine(self) -> Engine:
        """The engine of the round, with its workers."""
        if self.pool is None:
            return self.kind
        return PooledEngine(self.kind.current if isinstance(self.kind, Auto) else self.kind, self.pool)

    @property
    def workers(self) -> int:
        """Number of processes that train."""
        return 1 if self.pool is None else self.pool.size

    def close(self) -> None:
        """End its workers."""
        if self.pool is not None:
            self.pool.close()


def candidates(round_: Round, chunk: int | None) -> list[Candidate]:
    """Return the engines that make sense for a round, in the order of how little they ask for.

    `chunk` is the experiment's own setting, which the automatic engine takes too. Workers train as it chose.
    """
    chunk_setting = "" if chunk is None else f" engine.chunk={chunk}"
    automatic, usual = Auto(vectorized=Vectorized(chunk)), Vectorized()
    largest = round_.chunk(usual)
    everyone = max(len(cohort.ids) for _, cohort in round_.cohorts)
    # The engine takes no more by itself than the memory allows.
    nominal = {*(c for c in CHUNKS if c <= largest), min(chunk or 1, everyone)}
    engines = [
        Candidate("auto", f"engine.name=auto{chunk_setting}", automatic),
        Candidate(f"vectorized, {largest} by itself", "engine.name=vectorized", usual),
        Candidate("sequential", "engine.name=sequential", Sequential()),
    ]
    for precision in available(HOST)[1:]:
        rounded = Auto(Sequential(precision=precision), Vectorized(chunk, precision=precision))
        settings = f"engine.name=auto{chunk_setting} engine.precision={precision}"
        engines.append(Candidate(f"auto, {precision}", settings, rounded))
    for size in sorted({evenly(everyone, c) for c in nominal} - {largest}):
        settings = f"engine.name=vectorized engine.chunk={size}"
        engines.append(Candidate(f"vectorized, chunk {size}", settings, Vectorized(size)))
    for workers in worker_counts(everyone):
        settings = f"engine.name=auto{chunk_setting} engine.workers={workers}"
        engines.append(Candidate(f"auto, {workers} workers", settings, automatic, ProcessPool(workers)))
    return engines


def worker_counts(clients: int) -> Sequence[int]:
    """Return numbers of processes that make sense: powers of two up to the cores, and the cores."""
    cores = min(os.cpu_count() or 1, clients)
    if sys.platform == "win32" or cores < 2:
        return []
    return sorted({*(2**k for k in range(1, cores.bit_length()) if 2**k <= cores), cores})
