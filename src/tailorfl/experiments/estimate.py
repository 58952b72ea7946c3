"""What an experiment would cost, found by building everything and training two small clients for a few rounds.

Where that would take long, for one batch: the rest is counted (`core/counting.py`), not trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tailorfl.core.cohort import Cohort
from tailorfl.core.messages import Traffic, count_up
from tailorfl.core.server_distill import ServerDistillation
from tailorfl.data.federation import Federation
from tailorfl.engines.base import Parts
from tailorfl.engines.groups import by_group
from tailorfl.engines.rounds import sampled_clients
from tailorfl.engines.sequential import Sequential
from tailorfl.engines.simulation import Simulation
from tailorfl.experiments.bench_work import Part, count_work, parts_of
from tailorfl.experiments.jobs import Job
from tailorfl.experiments.privacy import planned, spent
from tailorfl.experiments.reductions import remarks
from tailorfl.experiments.runner import make_federation, make_simulation
from tailorfl.experiments.schema import ExperimentConfig

PROBE_CLIENTS, PROBE_ROUNDS = 2, 4
PROBE_SECONDS = 3.0
"""What trying whole rounds of a method may take; longer ones are counted."""
PROBE_REPEATS = 5
"""One and two steps are tried so often, or less where they take long."""
LARGEST_STEP = 8
"""No method takes so many batches for one step."""


@dataclass(frozen=True)
class Estimate:
    """Sizes and costs; of seconds and memory only the order of magnitude is meant."""

    clients: int
    heldout_clients: int
    clients_per_round: int
    samples: Mapping[str, Mapping[str, float]]
    """Part -> smallest, median and largest client, and the total."""
    methods: Mapping[str, Mapping[str, float]]
    """Label -> scalars of the model that may change and that are frozen, trained scalars, scalars and bytes a round,
    seconds a round and for all rounds and seeds.

    With differential privacy also the noise, and the ε that the client with the largest one will have spent.
    """
    seconds: float
    """One process, everything together, without evaluation."""
    reductions: Mapping[str, Sequence[str]]
    """Label -> sentences on which other methods its settings make of it, where they do."""
    memory_bytes: float
    """Data, and the private states of all clients of the largest method."""


def estimate(config: ExperimentConfig) -> Estimate:
    """Returns what running `config` would take. Trains nothing that is kept.

    Raises:
        TailorflError: the experiment cannot be built; the message says why.
    """
    torch.set_num_threads(config.threads)
    seed = config.data.seed_of(config.seeds[0])
    federation = make_federation(config, seed)
    rows, reductions, states, frozen = {}, {}, 0.0, 0
    for method in config.methods:
        job = Job(config, method, config.seeds[0])
        sim = make_simulation(job, federation)
        frozen = max(frozen, sim.model.held_scalars)
        of_model = {"model_scalars": sim.model.scalars, "frozen_scalars": sim.model.held_scalars}
        privacy, same = _privacy(job, sim), remarks(sim, job.rounds)
        if same:
            reductions[method.label] = same
        found, state_bytes = _probe(sim)
        total = found["seconds_per_round"] * job.rounds * len(config.seeds)
        rows[method.label] = {**of_model, **found, "seconds": total, **privacy}
        if config.eval.select == "val" and sim.method.has_personal:  # the chosen models beside the states
            state_bytes += 4 * sim.model.scalars
        states = max(states, state_bytes * federation.num_clients)
    source = federation.source
    return Estimate(
        clients=federation.num_clients,
        heldout_clients=len(federation) - federation.num_clients,
        clients_per_round=sampled_clients(config.fraction, federation.num_clients),
        samples=_sizes(federation),
        methods=rows,
        reductions=reductions,
        seconds=sum(row["seconds"] for row in rows.values()),
        memory_bytes=source.x.numel() * source.x.element_size() + states + 4 * frozen,
    )


def _privacy(job: Job, sim: Simulation) -> dict[str, float]:
    """The noise of a job and the largest ε at its end, where it is private; nothing is trained for that."""
    if sim.level is None:
        return {}
    found = spent(job, sim, planned(job, sim))
    assert found is not None
    least = {"least_noise": min(found.noises)} if found.noises else {}
    return {"noise": found.noise, **least, "epsilon": found.largest}


def _sizes(federation: Federation) -> dict[str, dict[str, float]]:
    out = {}
    for part in ("train", "val", "test"):
        sizes = federation.sizes(part)[: federation.num_clients]
        out[part] = {
            "smallest": int(sizes.min()),
            "median": float(np.median(sizes)),
            "largest": int(sizes.max()),
            "total": int(sizes.sum()),
        }
    return out


def _probe(sim: Simulation) -> tuple[dict[str, float], float]:
    """(costs of a round, bytes of one client's private state) from a few rounds of two small clients.

    Where clients have different architectures, all are taken to cost as much as those of the first one sampled. The
    first round sends less than others in some methods, and is not counted.
    """
    everyone = (
        tuple(range(sim.federation.num_clients)) if sim.method.participation == "all" else sim.sample(0)
    ) or (0,)  # nobody may be drawn where a mean hides who was
    everyone = (0,) if sim.method.pooled else everyone
    group, where = next(by_group(sim.groups, everyone))
    sampled = tuple(everyone[k] for k in where)
    sizes = sim.cohort(sampled).sizes
    # Small clients, so that this is quick, but with a full batch if there are any.
    fitting = np.flatnonzero(sizes >= min(sim.train.batch_size, int(sizes.max())))
    some = tuple(
        sorted(sampled[i] for i in fitting[np.argsort(sizes[fitting], kind="stable")][:PROBE_CLIENTS])
    )
    clients, server, traffic = _rounds(sim, some)
    states = count_up(group.states.get(some), ()).bytes_up
    mine = sim.cohort(some).sizes
    share = len(everyone) / len(some)
    larger = (
        share
        if sim.train.steps is not None
        else float(sizes.sum() / mine.sum()) * len(everyone) / len(sampled)
    )
    of_a_round = share / (PROBE_ROUNDS - 1)
    shown: dict[str, Any] = {
        "trained_scalars": sim.trained_scalars,
        "scalars_up_per_round": round(traffic.up * of_a_round),
        "scalars_down_per_round": round(traffic.down_unicast * of_a_round),
        "bytes_per_round": round((traffic.bytes_up + traffic.bytes_down) * of_a_round),
        "seconds_per_round": clients * larger + server,
    }
    return shown, states / len(some)


class _Counting(Sequential):
    """An engine whose clients train nothing, but send what they would."""

    def map(self, function: Any, cohort: Cohort, states: Any, received: Any, index: Any = None) -> Parts:
        """Returns `function` of every client, as if no training had moved anything."""
        return super().map(function, replace(cohort, counting=True), states, received, index)


def _rounds(sim: Simulation, some: tuple[int, ...]) -> tuple[float, float, Traffic]:
    """(seconds of the clients `some` in a round, of the server, traffic of all rounds but the first)."""
    method, distil = sim.method, getattr(sim.method, "distil", None)

    def server_seconds(steps: int) -> float:
        if isinstance(distil, ServerDistillation):
            short = distil.model_copy(update={"steps": min(steps, distil.steps)})
            sim.method = method.model_copy(update={"distil": short})
        return sim.step(some, training=some).server_seconds

    sim.engine = _Counting()
    first = server_seconds(1)
    server = min(first, server_seconds(1))
    if isinstance(distil, ServerDistillation) and distil.steps > 1:
        server += max(server_seconds(2) - server, 0.0) * (distil.steps - 1)
    (part,) = parts_of(sim, some)
    clients = _client_seconds(sim, part)
    whole = PROBE_ROUNDS * (clients + server) <= PROBE_SECONDS
    if whole:
        sim.engine, sim.method = Sequential(), method
        clients = server = math.inf
    traffic = Traffic()
    for r in range(PROBE_ROUNDS):
        done = sim.step(some, training=some)
        if whole:
            clients = min(clients, done.seconds - done.server_seconds)
            server = min(server, done.server_seconds)
        if r:
            traffic.add(done.traffic)
    return clients, server, traffic


def _client_seconds(sim: Simulation, part: Part) -> float:
    """What the clients of a part take in a round, from what the first takes for one and for two steps a training."""
    index = None if part.index is None else part.index[:1]
    first = replace(part, cohort=part.cohort.part((0,)), states=part.states[:1], index=index)

    def limited(batches: int) -> Part:
        return replace(first, cohort=replace(first.cohort, limit=batches, plans={}))

    # A step may take several batches.
    short = next((n for n in range(1, LARGEST_STEP) if _gradients(sim, limited(n))), 1)
    work = {n: _gradients(sim, limited(n)) for n in (short, 2 * short)}

    def tried(batches: int) -> float:
        it, start = limited(batches), time.perf_counter()
        Sequential().map(sim.local, it.cohort, it.states, it.received, it.index)
        return time.perf_counter() - start

    tried(short)  # the first one is slow in a new process
    seconds, begin = dict.fromkeys(work, math.inf), time.perf_counter()
    for _ in range(PROBE_REPEATS):
        for n in work:
            seconds[n] = min(seconds[n], tried(n))
        if time.perf_counter() - begin > PROBE_SECONDS / 4:
            break
    more = max(work[2 * short] - work[short], 1)
    of_a_gradient = max(seconds[2 * short] - seconds[short], 0.0) / more
    fixed = max(seconds[short] - of_a_gradient * work[short], 0.0)
    return len(part.cohort.ids) * fixed + of_a_gradient * _gradients(sim, part)


def _gradients(sim: Simulation, part: Part) -> int:
    """How many gradients of a batch the clients of a part take in a round, counted without training."""
    return sum(fit.steps * fit.gradients for fits in count_work(sim, part).fits for fit in fits)
