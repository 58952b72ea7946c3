"""The measurements of `tailorfl bench`: a simulation's round, timed as a plain loop and with every sensible engine."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tailorfl.benchmark.clock import alternate, one_thread, processor, timed
from tailorfl.benchmark.plain_loop import LoopClient, PlainLoop, fastest, shuffled
from tailorfl.benchmark.result import LOOP, Bench, Way, paired, recommend
from tailorfl.engines.base import Engine, unsupported
from tailorfl.engines.choice import Auto
from tailorfl.engines.devices import HOST, available
from tailorfl.engines.in_process import Sequential, Vectorized, evenly
from tailorfl.engines.pool import PooledEngine
from tailorfl.engines.process_pool import ProcessPool
from tailorfl.errors import ConfigError
from tailorfl.rounds.groups import Group, by_group
from tailorfl.rounds.planning import work_of
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.experiment import DEFAULT, ExperimentConfig
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort
from tailorfl.training.objective import LOSSES

PROBED, PROBES = 3, 3
"""Number of medium-sized clients, and of rounds with them, from which the time of a whole round is estimated."""
PASSES = 5
"""Number of passes over all ways that should fit into the time, including the warm-up."""
LEAST, MOST = 2, 50
FIRST_ROUNDS = 20
"""Number of rounds that are searched for one in which clients train."""
Watch = Callable[[str], None]
CHUNKS = (1, 4, 16, 64)


def measure(
    sim: Simulation, config: ExperimentConfig, *, seconds: float, watch: Watch = lambda _: None
) -> Bench:
    """Return the times of a simulation's next round, and the settings to use.

    Args:
        sim: a simulation before its first round; engines take turns, on states in the memory of this process.
        config: the experiment, whose first method the simulation runs.
        seconds: how long to measure; if a round is long, only some of its clients are measured.
        watch: called with a description of each stage.

    Raises:
        ConfigError: no client trains in the first rounds.
        TailorflError: the method diverges at once.
    """
    until = time.perf_counter() + seconds
    with torch.random.fork_rng(devices=[]):
        watch("measuring how long a round takes")
        round_, everyone = _round(sim, seconds)
        engines = candidates(round_, config.engine.chunk)
        try:
            timings = _measure(round_, engines, until, watch)
        finally:
            for candidate in engines:
                candidate.close()
    return Bench(
        experiment=config.name,
        method=config.methods[0].label,
        title=sim.method.title,
        model=", ".join(model.name for model in config.model_of(config.methods[0]).architectures.values()),
        scalars=sim.model.scalars,
        clients=everyone,
        measured=len(round_.training),
        gradients=sum(round_.gradients.values()),
        threads=config.threads,
        clock="process" if one_thread() else "wall",
        ways=tuple(timings),
        recommendation=recommend(timings),
        machine=_machine(),
        settings=config.to_dict(),
        features="" if sim.features is None else sim.features_note,
    )


def _round(sim: Simulation, seconds: float) -> tuple[Round, int]:
    """Return a round with as many of its clients as the time allows, and the number of all its clients."""
    sampled = sim.sample(0) or (0,)  # client-level privacy may draw no client
    everyone = Round(sim, sampled, sim.trainees(sampled))
    sizes = {i: n for _, cohort in everyone.cohorts for i, n in zip(cohort.ids, cohort.sizes, strict=True)}
    order = sorted(sizes, key=lambda client: int(sizes[client]))
    some = tuple(sorted(order[max(len(order) // 2 - PROBED // 2, 0) :][:PROBED]))
    single_round = _next(sim, some, some)
    times = []
    for _ in range(PROBES):
        times.append(timed(lambda: single_round.run(Sequential())).wall)
        single_round.reset()
    per_gradient = min(times) / sum(single_round.gradients.values())
    training, engines = everyone.training, len(candidates(everyone, None)) + 1
    share = seconds / (PASSES * engines * per_gradient * max(sum(everyone.gradients.values()), 1))
    count = max(int(share * len(training)), PROBED)
    if count < len(training):
        positions = np.linspace(0, len(order) - 1, count).round().astype(int)
        training = tuple(sorted({order[position] for position in positions}))
        sampled = tuple(i for i in sampled if i in set(training)) or training
    Round(sim, sampled, training).run(Sequential())  # so that clients have states, as they do in most rounds
    return _next(sim, sampled, training), len(order)


def _next(sim: Simulation, sampled: tuple[int, ...], training: tuple[int, ...]) -> Round:
    """Return the next round in which a client trains."""
    round_ = Round(sim, sampled, training)
    while not sum(round_.gradients.values()):
        if sim.round >= FIRST_ROUNDS:
            raise ConfigError(
                f"in the first {FIRST_ROUNDS} rounds of {sim.method.title} no client takes a training step, so there "
                "is nothing to measure; check train.epochs, train.steps and the numbers of samples of the clients"
            )
        round_.run(Sequential())
        round_ = Round(sim, sampled, training)
    return round_


def _measure(round_: Round, engines: Sequence[Candidate], until: float, watch: Watch) -> list[Way]:
    """Return the plain loop and all engines, each warmed up, and timed in alternation."""
    loop = LoopRound(round_)
    runs: dict[str, Callable[[], object]] = {LOOP: loop.run}
    watch("warming up: the plain loop")
    loop.run()
    notes: dict[str, str] = {LOOP: loop.variant}
    for candidate in sorted(engines, key=lambda c: (c.workers, round_.chunk(c.kind))):
        watch(f"warming up: {candidate.name}")
        notes[candidate.name] = _warmed(round_, candidate)
        if not notes[candidate.name]:
            runs[candidate.name] = partial(round_.run, candidate.engine)
    ordered = {name: runs[name] for name in (LOOP, *(c.name for c in engines)) if name in runs}
    times = alternate(ordered, until, LEAST, MOST, round_.reset, watch)
    count, timings = len(round_.training), []
    for chosen in (None, *engines):
        name = LOOP if chosen is None else chosen.name
        by_wall = (chosen is not None and chosen.workers > 1) or not one_thread()
        taken, of_loop = ([t.wall if by_wall else t.process for t in times.get(n, [])] for n in (name, LOOP))
        low, middle, high = paired(of_loop, taken) if taken else (math.nan,) * 3
        median = float(np.median(taken)) if taken else math.nan
        if chosen is not None and name.startswith("auto") and not notes[name]:
            notes[name] = f"chose {chosen.kind.name}"
        timings.append(
            Way(
                name=name,
                settings="" if chosen is None else chosen.settings,
                kind="" if chosen is None else chosen.kind.name,
                chunk=1 if chosen is None else round_.chunk(chosen.kind),
                workers=1 if chosen is None else chosen.workers,
                precision=DEFAULT.engine.precision if chosen is None else chosen.kind.precision,
                seconds=tuple(taken),
                wall_seconds=tuple(t.wall for t in times.get(name, [])),
                seconds_min=min(taken, default=math.nan),
                seconds_median=median,
                clients_per_second=count / median,
                times_faster=middle,
                spread=(low, high),
                note=notes[name],
            )
        )
    return timings


def _warmed(round_: Round, candidate: Candidate) -> str:
    """Run a round with an engine; return why the engine is left out, or ""."""
    round_.reset()
    try:
        round_.run(candidate.engine)
    except Exception as error:
        if not unsupported(error):
            raise
        return f"left out: {str(error).splitlines()[0][:200]}"
    return ""


def _machine() -> dict[str, Any]:
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


class Round:
    """A simulation's next round with given clients, to be repeated from the same state.

    Attributes:
        gradients: client -> number of per-sample gradients that it computes, counted without training.
        cohorts: the training clients of each architecture.
    """

    def __init__(self, sim: Simulation, sampled: tuple[int, ...], training: tuple[int, ...]) -> None:
        self.sim, self.sampled, self.training = sim, sampled, training
        tensors, facts = sim.dump()
        # "auto" is no choice of an engine, so an automatic engine keeps its own.
        self._tensors, self._facts = {p: t.clone() for p, t in tensors.items()}, {**facts, "engine": "auto"}
        work, _ = work_of(sim, sim.method.broadcast(sim.server, training), training, sim.round)
        self.gradients: Mapping[int, int] = {client: round(work[client].gradients) for client in training}
        self.cohorts: list[tuple[Group, Cohort]] = [
            (group, sim.cohort(tuple(training[k] for k in positions)))
            for group, positions in by_group(sim.groups, training)
        ]

    def reset(self) -> None:
        """Restore the simulation's state before the round."""
        self.sim.load(self._tensors, self._facts)

    def run(self, engine: Engine) -> None:
        """Run the round with an engine."""
        self.sim.engine = engine
        self.sim.step(self.sampled, training=self.training)

    def chunk(self, engine: Auto | Sequential | Vectorized) -> int:
        """Return the largest number of clients that an engine trains together."""
        current = engine.current if isinstance(engine, Auto) else engine
        if not isinstance(current, Vectorized):
            return 1
        return max(len(chunk) for _, cohort in self.cohorts for chunk in current.chunks(cohort))


class LoopRound:
    """FedAvg's round by the plain loop: every client computes as many per-sample gradients as in `round_`.

    There is one loop per architecture, each in the variant that is fastest on this machine.
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
        """Run the round, with new batches."""
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
    """The engine that divides the cohort into chunks and trains them."""
    pool: ProcessPool | None = None
    """The workers that train chunks in parallel, if there are any."""

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
    """Return the sensible engines for a round, the simplest settings first.

    `chunk` is the experiment's own setting, which the automatic engine uses too. Workers train with its choice.
    """
    chunk_setting = "" if chunk is None else f" engine.chunk={chunk}"
    automatic, usual = Auto(vectorized=Vectorized(chunk)), Vectorized()
    largest = round_.chunk(usual)
    everyone = max(len(cohort.ids) for _, cohort in round_.cohorts)
    # By default the engine takes no more clients at once than the memory allows.
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
    """Return sensible numbers of processes: powers of two up to the number of cores, and that number."""
    cores = min(os.cpu_count() or 1, clients)
    if cores < 2:
        return []
    return sorted({*(2**k for k in range(1, cores.bit_length()) if 2**k <= cores), cores})
