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

from tailorfl.benchmark.candidates import Candidate, LoopRound, Round, candidates
from tailorfl.benchmark.clock import alternate, one_thread, processor, timed
from tailorfl.benchmark.recommend import LOOP, paired, recommend
from tailorfl.benchmark.result import Bench, Way
from tailorfl.engines.base import unsupported
from tailorfl.engines.in_process import Sequential
from tailorfl.errors import ConfigError
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.experiment import DEFAULT, ExperimentConfig

PROBED, PROBES = 3, 3
"""So many clients of middle size tell in so many rounds how long one of all clients will be."""
PASSES = 5
"""So many passes over all ways should fit into the time, the one that warms up among them."""
LEAST, MOST = 2, 50
FIRST_ROUNDS = 20
"""So many rounds are looked through for one in which clients train."""
Watch = Callable[[str], None]


def measure(
    sim: Simulation, config: ExperimentConfig, *, seconds: float, watch: Watch = lambda _: None
) -> Bench:
    """Return the times of a simulation's next round, and what to set.

    Args:
        sim: before its first round; engines are taken in turn, on states in the memory of this process.
        config: the experiment, of whose first method it is.
        seconds: how long to measure; a part of the clients is measured where a round is long.
        watch: told what is being done.

    Raises:
        ConfigError: nobody trains in the first rounds.
        TailorflError: the method diverges at once.
    """
    until = time.perf_counter() + seconds
    with torch.random.fork_rng(devices=[]):
        watch("finding out how long a round is")
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
    """Return a round with as many of its clients as the time allows, and how many it has."""
    sampled = sim.sample(0) or (0,)  # nobody may be drawn where a mean hides who was
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
    """Return the next round in which somebody trains."""
    round_ = Round(sim, sampled, training)
    while not sum(round_.gradients.values()):
        if sim.round >= FIRST_ROUNDS:
            raise ConfigError(
                f"in the first {FIRST_ROUNDS} rounds of {sim.method.title} no client takes a training step, so there "
                "is nothing to measure; look at train.epochs, train.steps and the sizes of the clients"
            )
        round_.run(Sequential())
        round_ = Round(sim, sampled, training)
    return round_


def _measure(round_: Round, engines: Sequence[Candidate], until: float, watch: Watch) -> list[Way]:
    """Return the plain loop and all engines, each warmed up, looked at for its memory, and timed in alternation."""
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
    """Do a round with an engine; return why it is left out, or ""."""
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
