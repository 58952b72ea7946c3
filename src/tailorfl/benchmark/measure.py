"""What `tailorfl bench` does: a simulation's round, timed as a plain loop and with every engine that makes sense."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from tailorfl.benchmark.advice import LOOP, paired, recommend
from tailorfl.benchmark.clock import Seconds, alternate, extra_memory, one_thread, processor, timed
from tailorfl.benchmark.profile import profiled
from tailorfl.benchmark.result import Bench, Way
from tailorfl.benchmark.ways import Candidate, Loop, Round, candidates
from tailorfl.benchmark.work import Work, parts_of
from tailorfl.engines.failures import unsupported
from tailorfl.engines.memory import free_memory
from tailorfl.engines.sequential import Sequential
from tailorfl.errors import ConfigError
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.experiment import DEFAULT, ExperimentConfig

PROBED, PROBES = 3, 3
"""So many clients of middle size tell in so many rounds how long one of all clients will be."""
PASSES = 5
"""So many passes over all ways should fit into the time, the two that warm up and look at memory among them."""
LEAST, MOST = 2, 50
GAINS = 3
"""So many rounds are compared with those that compute frozen layers in every pass."""
FIRST_ROUNDS = 20
"""So many rounds are looked through for one in which clients train."""
MEMORY_SHARE = 0.5
"""A chunk is left out if it would need more than this share of the free memory, judging by the one before."""
SERVER_SHARE = 0.2
"""A share of the server in a round above this is named: the plain loop has nothing but the average."""

Watch = Callable[[str], None]


def measure(
    sim: Simulation,
    config: ExperimentConfig,
    *,
    anew: Simulation | None = None,
    seconds: float,
    profile: bool = False,
    watch: Watch = lambda _: None,
) -> Bench:
    """Returns the times of a simulation's next round, and what to set.

    Args:
        sim: before its first round; engines are taken in turn, on states in the memory of this process.
        config: the experiment, of whose first method it is.
        anew: the same simulation in which frozen layers are computed in every pass, where `sim` computes them once.
        seconds: how long to measure; a part of the clients is measured where a round is long.
        profile: also tell where the time goes, and how near to the machine's limits a round is.
        watch: told what is being done.

    Raises:
        ConfigError: nobody trains in the first rounds.
        TailorflError: the method diverges at once.
    """
    until = time.perf_counter() + seconds
    with torch.random.fork_rng(devices=[]):
        watch("finding out how long a round is")
        round_, everyone = _round(sim, seconds)
        work = round_.work()
        wanted = candidates(work, config.engine.chunk)
        try:
            ways = _measure(round_, work, wanted, until, watch)
        finally:
            for candidate in wanted:
                candidate.close()
        once = "" if anew is None else _gain(round_, anew, watch)
        beyond = tuple(dict.fromkeys(extra for w in work for extra in w.extras))
        if round_.server_share > SERVER_SHARE:
            beyond += (f"work of the server ({round_.server_share:.0%} of the shortest round)",)
        found = recommend(ways, plain=not beyond)
        shown = None
        if profile:
            watch("profiling")
            # Workers run the automatic engine, which is profiled in this process.
            name = "auto" if found.way.endswith("workers") else found.way
            engine = next(candidate.kind for candidate in wanted if candidate.name == name)
            shown = profiled(round_, work, engine, next(way for way in ways if way.name == name))
    return Bench(
        experiment=config.name,
        method=config.methods[0].label,
        title=sim.method.title,
        model=", ".join(model.name for model in config.model_of(config.methods[0]).architectures.values()),
        scalars=sim.model.scalars,
        clients=everyone,
        measured=len(round_.training),
        steps=sum(w.steps for w in work),
        samples=sum(sum(w.samples().values()) for w in work),
        beyond=beyond,
        threads=config.threads,
        clock="process" if one_thread() else "wall",
        ways=tuple(ways),
        recommendation=found,
        machine=_machine(),
        settings=config.to_dict(),
        profile=shown,
        features=once,
    )


def _round(sim: Simulation, seconds: float) -> tuple[Round, int]:
    """A round with as many of its clients as the time allows, and how many it has."""
    sampled = sim.sample(0) or (0,)  # nobody may be drawn where a mean hides who was
    training = sim.trainees(sampled)
    sizes = np.concatenate([part.cohort.sizes for part in parts_of(sim, training)])
    ids = np.concatenate([part.cohort.ids for part in parts_of(sim, training)])
    order = ids[np.argsort(sizes, kind="stable")].tolist()
    some = tuple(sorted(order[max(len(order) // 2 - PROBED // 2, 0) :][:PROBED]))
    alone = _next(sim, some, some)
    times = []
    for _ in range(PROBES):
        times.append(timed(lambda: alone.run(Sequential())).wall)
        alone.reset()
    each = min(times) / alone.steps
    everyone = Round(sim, sampled, training)
    engines = len(candidates(everyone.work(), None)) + 1
    wanted = seconds / (PASSES * engines * each * everyone.steps) * len(training)
    count = max(int(wanted), PROBED)
    if count < len(training):
        places = np.linspace(0, len(order) - 1, count).round().astype(int)
        training = tuple(sorted({order[place] for place in places}))
        sampled = tuple(i for i in sampled if i in set(training)) or training
    Round(sim, sampled, training).run(Sequential())  # so that clients have states, as they do in most rounds
    return _next(sim, sampled, training), len(order)


def _gain(round_: Round, anew: Simulation, watch: Watch) -> str:
    """What computing frozen layers once brings a round, in words; `anew` computes them in every pass."""
    watch("computing frozen layers in every pass")
    other = Round.again(round_, anew)
    runs = {True: round_, False: other}
    found: dict[bool, list[float]] = {True: [], False: []}
    for number in range(GAINS + 1):
        for once, one in runs.items():
            one.reset()
            taken = timed(partial(one.run, Sequential()))
            if number:  # the first warms up
                found[once].append(taken.process if one_thread() else taken.wall)
    round_.reset()
    median = float(np.median(np.array(found[False]) / np.array(found[True])))
    return (
        f"{round_.sim.features_note}; the sequential engine's round is {median:.2f} times as fast as without"
    )


def _next(sim: Simulation, sampled: tuple[int, ...], training: tuple[int, ...]) -> Round:
    """The next round in which somebody trains."""
    found = Round(sim, sampled, training)
    while not found.steps:
        if sim.round >= FIRST_ROUNDS:
            raise ConfigError(
                f"in the first {FIRST_ROUNDS} rounds of {sim.method.title} no client takes a training step, so there "
                "is nothing to measure; look at train.epochs, train.steps and the sizes of the clients"
            )
        found.run(Sequential())
        found = Round(sim, sampled, training)
    return found


def _measure(
    round_: Round, work: Sequence[Work], wanted: Sequence[Candidate], until: float, watch: Watch
) -> list[Way]:
    """The plain loop and all engines, each warmed up, looked at for its memory, and timed in alternation."""
    loop = Loop(work)
    runs: dict[str, Callable[[], object]] = {LOOP: loop.run}
    watch("warming up: the plain loop")
    loop.run()
    memory: dict[str, float | None] = {LOOP: extra_memory(loop.run)}
    notes: dict[str, str] = {}
    known: list[tuple[int, float]] = []
    for candidate in sorted(wanted, key=lambda c: (c.workers, c.chunk(work))):
        watch(f"warming up: {candidate.name}")
        notes[candidate.name] = _warmed(round_, candidate, candidate.chunk(work), known, memory)
        if candidate.name in memory:
            runs[candidate.name] = partial(round_.run, candidate.engine)
    ordered = {name: runs[name] for name in (LOOP, *(c.name for c in wanted)) if name in runs}
    times = alternate(ordered, until, LEAST, MOST, round_.reset, watch)
    count = len(round_.training)
    ways = [_way(LOOP, times[LOOP], times[LOOP], count, memory_bytes=memory[LOOP], note=loop.variant)]
    for candidate in wanted:
        chose = candidate.name.startswith("auto") and not notes[candidate.name]
        ways.append(
            _way(
                candidate.name,
                times.get(candidate.name, []),
                times[LOOP],
                count,
                settings=candidate.settings,
                kind=candidate.kind.name,
                chunk=candidate.chunk(work),
                workers=candidate.workers,
                precision=candidate.precision,
                padding=candidate.padding(work),
                memory_bytes=memory.get(candidate.name),
                note=f"chose {candidate.kind.name}" if chose else notes[candidate.name],
            )
        )
    return ways


def _warmed(
    round_: Round,
    candidate: Candidate,
    chunk: int,
    known: list[tuple[int, float]],
    memory: dict[str, float | None],
) -> str:
    """Does two rounds with an engine and notes the memory of the second; returns why it was left out, or ""."""
    free = free_memory(torch.device("cpu"))
    if known and free is not None and chunk > known[-1][0]:
        expected = known[-1][1] * chunk / known[-1][0]
        if expected > MEMORY_SHARE * free:
            return f"left out: would need about {expected / 2**20:,.0f} MB of {free / 2**20:,.0f} MB of free memory"
    round_.reset()
    try:
        round_.run(candidate.engine)
    except Exception as error:
        if not unsupported(error):
            raise
        return f"left out: {str(error).splitlines()[0][:200]}"
    round_.reset()
    found = extra_memory(partial(round_.run, candidate.engine))
    # What workers take is not in this process.
    memory[candidate.name] = found if candidate.workers == 1 else None
    if found is not None and candidate.workers == 1:
        known.append((chunk, found))
    return ""


def _way(
    name: str,
    taken: Sequence[Seconds],
    loop: Sequence[Seconds],
    clients: int,
    *,
    settings: str = "",
    kind: str = "",
    chunk: int = 1,
    workers: int = 1,
    precision: str = DEFAULT.engine.precision,
    padding: float = 0.0,
    memory_bytes: float | None = None,
    note: str = "",
) -> Way:
    by_wall = workers > 1 or not one_thread()
    own, other = ([t.wall if by_wall else t.process for t in times] for times in (taken, loop))
    low, middle, high = paired(other, own) if own else (math.nan,) * 3
    median = float(np.median(own)) if own else math.nan
    return Way(
        name=name,
        settings=settings,
        kind=kind,
        chunk=chunk,
        workers=workers,
        precision=precision,
        padding=padding,
        memory_bytes=memory_bytes,
        seconds=tuple(own),
        wall_seconds=tuple(t.wall for t in taken),
        seconds_min=min(own, default=math.nan),
        seconds_median=median,
        clients_per_second=clients / median,
        times_faster=middle,
        spread=(low, high),
        note=note,
    )


def _machine() -> dict[str, Any]:
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
