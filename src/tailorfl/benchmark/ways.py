"""The ways to do one and the same round: the plain loop, and a simulation with one engine or another."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tailorfl.benchmark.plain_loop import LoopClient, LoopFit, PlainLoop, fastest, shuffled
from tailorfl.benchmark.work import CountedFit, Work, chunks_of, count_work, padding_of, parts_of
from tailorfl.engines.auto import Auto
from tailorfl.engines.base import Engine
from tailorfl.engines.devices import HOST
from tailorfl.engines.in_process import evenly
from tailorfl.engines.pool import PooledEngine
from tailorfl.engines.precision import available
from tailorfl.engines.process_pool import ProcessPool
from tailorfl.engines.sequential import Sequential
from tailorfl.engines.vectorized import Vectorized
from tailorfl.rounds.one_round import RoundResult
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.objective import LOSSES

CHUNKS = (1, 4, 16, 64)


class Round:
    """A simulation's next round with given clients, to be done again and again from the same state."""

    def __init__(self, sim: Simulation, sampled: tuple[int, ...], training: tuple[int, ...]) -> None:
        self.sim, self.sampled, self.training = sim, sampled, training
        self._shortest: RoundResult | None = None
        tensors, facts = sim.dump()
        # Told that no choice was made, an automatic engine keeps its own.
        self._tensors, self._facts = {p: t.clone() for p, t in tensors.items()}, {**facts, "engine": "auto"}

    @classmethod
    def again(cls, other: Round, sim: Simulation) -> Round:
        """Returns the same round of another simulation, of the same states."""
        sim.load(other._tensors, other._facts)
        return cls(sim, other.sampled, other.training)

    def reset(self) -> None:
        """Puts the simulation back to before the round."""
        self.sim.load(self._tensors, self._facts)

    def run(self, engine: Engine) -> None:
        """Does the round with an engine."""
        self.sim.engine = engine
        done = self.sim.step(self.sampled, training=self.training)
        if self._shortest is None or done.seconds < self._shortest.seconds:
            self._shortest = done

    @property
    def server_share(self) -> float:
        """The share of the server's aggregation in the shortest of the rounds that were done; 0 before any."""
        return self._shortest.server_seconds / self._shortest.seconds if self._shortest is not None else 0.0

    @property
    def steps(self) -> int:
        """Training steps of all its clients."""
        return sum(work.steps for work in self.work())

    def work(self) -> list[Work]:
        """Returns what its clients do, by architecture."""
        return [count_work(self.sim, part) for part in parts_of(self.sim, self.training)]


@dataclass
class Loop:
    """The plain loop's round for what clients of a method do, one loop an architecture, each in its fastest variant."""

    work: Sequence[Work]
    loops: list[PlainLoop] = field(init=False)

    def __post_init__(self) -> None:
        self.loops = []
        for work in self.work:
            cohort = work.part.cohort
            loss = LOSSES[cohort.source.task]
            start = tree.tensors(work.part.group.context.init)
            clients = list(_clients(work))
            self.loops.append(
                fastest(cohort.model.whole, cohort.source.original, loss, cohort.config, start, clients)
            )

    @property
    def variant(self) -> str:
        """How the loops compute."""
        return "; ".join(dict.fromkeys(str(loop.variant) for loop in self.loops))

    def run(self) -> None:
        """Does the round, with new batches."""
        for loop, work in zip(self.loops, self.work, strict=True):
            loop.round(tree.tensors(work.part.group.context.init), _clients(work))


@dataclass(frozen=True)
class Candidate:
    """An engine to be measured."""

    name: str
    settings: str
    kind: Auto | Sequential | Vectorized
    """What cuts the cohort and trains its chunks."""
    pool: ProcessPool | None = None
    """The workers that do so at once, if there are any."""

    @property
    def engine(self) -> Engine:
        """What runs the round."""
        if self.pool is None:
            return self.kind
        return PooledEngine(self.kind.current if isinstance(self.kind, Auto) else self.kind, self.pool)

    @property
    def precision(self) -> str:
        """What networks multiply in."""
        return self.kind.precision

    @property
    def workers(self) -> int:
        """How many processes train."""
        return 1 if self.pool is None else self.pool.size

    def chunk(self, work: Sequence[Work]) -> int:
        """Returns how many clients train together, at most."""
        return max((len(c.ids) for w in work for c in chunks_of(self.kind, w.part.cohort)), default=1)

    def padding(self, work: Sequence[Work]) -> float:
        """Returns the padded samples over the real ones; of all architectures the largest."""
        return max(padding_of(chunks_of(self.kind, w.part.cohort), w.fits[0]) for w in work)

    def close(self) -> None:
        """Ends its workers."""
        if self.pool is not None:
            self.pool.close()


def candidates(work: Sequence[Work], chunk: int | None) -> list[Candidate]:
    """Returns the engines that make sense for a cohort, in the order of how little they ask for.

    `chunk` is the experiment's own setting, which the automatic engine takes too. Workers train as it chose.
    """
    beside = "" if chunk is None else f" engine.chunk={chunk}"
    automatic, usual = Auto(vectorized=Vectorized(chunk)), Vectorized()
    largest = Candidate("", "", usual).chunk(work)
    everyone = max(len(w.fits) for w in work)
    nominal = (c for c in (*CHUNKS, chunk or 1, everyone) if c <= everyone)
    sizes = sorted({evenly(everyone, c) for c in nominal} - {largest})
    return [
        Candidate("auto", f"engine.name=auto{beside}", automatic),
        Candidate(f"vectorized, {largest} by itself", "engine.name=vectorized", usual),
        Candidate("sequential", "engine.name=sequential", Sequential()),
        *(
            Candidate(
                f"auto, {precision}",
                f"engine.name=auto{beside} engine.precision={precision}",
                Auto(Sequential(precision=precision), Vectorized(chunk, precision=precision)),
            )
            for precision in available(HOST)[1:]
        ),
        *(
            Candidate(
                f"vectorized, chunk {c}",
                f"engine.name=vectorized engine.chunk={c}",
                Vectorized(c),
            )
            for c in sizes
        ),
        *(
            Candidate(
                f"auto, {n} workers",
                f"engine.name=auto{beside} engine.workers={n}",
                automatic,
                ProcessPool(n),
            )
            for n in _worker_counts(everyone)
        ),
    ]


def _worker_counts(clients: int) -> list[int]:
    """Numbers of processes that make sense: powers of two up to the cores, and the cores."""
    cores = min(os.cpu_count() or 1, clients)
    if sys.platform == "win32" or cores < 2:
        return []
    return sorted({*(2**k for k in range(1, cores.bit_length()) if 2**k <= cores), cores})


def _clients(work: Work) -> Iterator[LoopClient]:
    cohort = work.part.cohort
    total = max(int(cohort.sizes.sum()), 1)
    for rows, fits in zip(cohort.members, work.fits, strict=True):
        own = torch.from_numpy(rows)
        made = [one for fit in fits for one in _fits(own, fit, cohort.min_batch)]
        yield LoopClient(len(rows) / total, made)


def _fits(rows: torch.Tensor, fit: CountedFit, min_batch: int) -> Iterator[LoopFit]:
    for _ in range(fit.models):
        yield LoopFit(shuffled(rows, fit.request.batch, fit.steps, min_batch), fit.trained)
