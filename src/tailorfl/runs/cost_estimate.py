"""Cost of an experiment, estimated without running it: rounds are counted without training, and client steps are timed.

Traffic and gradients come from rounds in which a few small clients count instead of training. The seconds of a round
are those of a gradient times the number of gradients, plus the server's work; those of an evaluation follow from its
number of forward passes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tailorfl.core.messages import count_up
from tailorfl.core.server_training import ServerDistillation
from tailorfl.data.federation import Federation
from tailorfl.engines.base import CohortTask, CohortUpdates, Parts, unsupported
from tailorfl.engines.in_process import InProcessEngine, Sequential, Vectorized
from tailorfl.engines.state import StateStore
from tailorfl.evaluation.leading import first_metric
from tailorfl.rounds.buffered import Buffered, Timeline
from tailorfl.rounds.groups import by_group, message_for
from tailorfl.rounds.one_round import WORK, RoundResult
from tailorfl.rounds.participation import TOO_FEW, RoundTrace, sampled_clients
from tailorfl.rounds.planning import work_of
from tailorfl.rounds.simulation import Simulation
from tailorfl.rounds.system import ClientWork
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.runs.job_loop import check_sets, make_selection
from tailorfl.runs.privacy import planned, spent
from tailorfl.runs.reductions import remarks
from tailorfl.runs.schedule import limit_of, rounds_between, rounds_worth
from tailorfl.settings.experiment import CYCLIC, ExperimentConfig

PROBE_CLIENTS, PROBE_ROUNDS = 16, 4
"""Largest number of small clients that count, and number of rounds; half of these have one server training step."""
QUICK_STEPS = 10
"""Server training steps in the other rounds; two if that would take long."""
COUNTED_SCALARS = 10**8
"""Largest total size of all clients' models for counting gradients of every client; else a few represent all."""
PROBE_SECONDS = 3.0
"""Time limit for timing the steps of a method."""
PROBE_REPEATS = 5
"""Number of repetitions for timing one and two steps, less if they take long."""
LARGEST_STEP = 8
"""More batches than any method takes for one step."""


@dataclass(frozen=True)
class Estimate:
    """Sizes and costs; seconds and memory are orders of magnitude."""

    clients: int
    heldout_clients: int
    malicious_clients: str
    """Number of malicious training clients, and their attack."""
    clients_per_round: int
    aggregation: str
    """The server's rule for updates: mean, or the robust rule that replaces it."""
    samples: Mapping[str, Mapping[str, float]]
    """Part -> smallest, median and largest client, and the total."""
    methods: Mapping[str, Mapping[str, float]]
    """Label -> scalars of the model that may change and that are frozen, trained scalars, gradients of single samples,
    scalars and bytes per round (averaged over all rounds, if they grow), rounds, seconds of a round, of an evaluation
    and of all rounds and seeds. If the outputs of frozen layers are cached, their bytes and seconds. In a simulated
    system also the figures of `simulated_system`.

    With differential privacy also the noise, and the largest ε that a client will have spent.
    """
    seconds: float
    """Total of all methods, in one process."""
    reductions: Mapping[str, Sequence[str]]
    """Label -> sentences that name other methods to which its settings reduce it."""
    memory_bytes: float
    """Data, the private states of all clients for the largest method, and the cached features of samples."""


def estimate(config: ExperimentConfig, watch: Callable[[str], None] | None = None) -> Estimate:
    """Return the estimated cost of running `config`; no training is kept. `watch` is called with each step.

    Raises:
        TailorflError: the experiment cannot be built; the message says why.
    """
    torch.set_num_threads(config.threads)
    seed = config.data.seed_of(config.seeds[0])
    federation = make_federation(config, seed)
    first_metric(config, federation.source)
    rows: dict[str, dict[str, Any]] = {}
    reductions, states, frozen, features = {}, 0.0, 0, 0
    for number, method in enumerate(config.methods, start=1):
        if watch is not None:
            watch(f"estimating {method.label} ({number} of {len(config.methods)})")
        job = Job(config, method, config.seeds[0])
        sim = make_simulation(job, federation)
        check_sets(config, sim)
        make_selection(config, sim, None)
        hostile, kept_features = sim.malicious, sim.features
        frozen = max(frozen, sim.model.held_scalars)
        if kept_features is not None and not kept_features.on_disk:
            features = max(features, kept_features.bytes)
        if sentences := remarks(sim, job.rounds):
            reductions[method.label] = sentences
        rows[method.label], state_bytes = _row(job, sim)
        if config.eval.select == "val" and sim.method.has_personal:  # plus the selected models
            state_bytes += 4 * sim.model.scalars
        states = max(states, state_bytes * len(federation.members))
    source = federation.source
    return Estimate(
        clients=len(federation.members),
        heldout_clients=len(federation) - federation.num_clients,
        malicious_clients=f"{len(hostile.clients)} ({hostile.settings.kind})" if hostile.clients else "0",
        aggregation="mean" if config.server.robust.rule == "none" else config.server.robust.rule,
        clients_per_round=1
        if config.sampling in CYCLIC
        else min(sampled_clients(config.fraction, federation.num_clients), len(federation.members)),
        samples=_sizes(federation),
        methods=rows,
        reductions=reductions,
        seconds=sum(row["seconds"] for row in rows.values()),
        memory_bytes=source.x.numel() * source.x.element_size() + states + 4 * frozen + features,
    )


def _row(job: Job, sim: Simulation) -> tuple[dict[str, Any], float]:
    """Return the costs of a method, and the bytes of one client's private state; trains a little at the end."""
    config, features = job.config, sim.features
    row: dict[str, Any] = {"model_scalars": sim.model.scalars, "frozen_scalars": sim.model.held_scalars}
    seconds = 0.0
    if features is not None:
        seconds = features.seconds()
        row |= {"features_bytes": features.bytes, "features_seconds": seconds}
    privacy, system = _privacy(job, sim), simulated_system(sim, job.rounds)
    limit = limit_of(job, sim)
    costs, state_bytes = _round_costs(config, sim, job.rounds)
    rounds = limit.foreseen(costs["bytes_per_round" if limit.kind == "bytes" else "gradients_per_round"])
    interval = rounds_between(config, sim)
    evaluations = 1 + (rounds // interval if interval else 0)
    evaluation = costs["seconds_per_round"] * rounds_worth(config, sim, costs["gradients_per_round"])
    seconds += costs["seconds_per_round"] * rounds + evaluation * evaluations
    row |= {**costs, "rounds": rounds, "evaluations": evaluations, "seconds_per_evaluation": evaluation}
    return {**row, "seconds": seconds * len(config.seeds), **system, **privacy}, state_bytes


def _privacy(job: Job, sim: Simulation) -> dict[str, float]:
    """Return the noise of a job and the largest ε at its end, if it is private, without training."""
    if sim.level is None or isinstance(sim, Buffered):  # its cohorts are not known in advance
        return {}
    budget = spent(job, sim, planned(job, sim))
    assert budget is not None
    least = {"least_noise": min(budget.noises)} if budget.noises else {}
    return {"noise": budget.noise, **least, "epsilon": budget.largest}


def _sizes(federation: Federation) -> dict[str, dict[str, float]]:
    out = {}
    for part in ("train", "val", "test"):
        sizes = federation.sizes(part)[list(federation.members)]
        out[part] = {
            "smallest": int(sizes.min()),
            "median": float(np.median(sizes)),
            "largest": int(sizes.max()),
            "total": int(sizes.sum()),
        }
    return out


def _round_costs(config: ExperimentConfig, sim: Simulation, rounds: int) -> tuple[dict[str, Any], float]:
    """Return the costs of a round, averaged over `rounds`, and the bytes of one client's private state.

    If clients have different architectures, all are assumed to cost as much as those of the first one sampled. The
    first round is not counted, as it sends less than others in some methods.
    """
    participants = sim.population.present
    everyone = sim.trainees(sim.sample(0)) or participants[:1]  # those that were drawn may have been left out
    group, positions = next(by_group(sim.groups, everyone))
    sampled = tuple(everyone[k] for k in positions)
    sizes = sim.cohort(sampled).sizes
    # Small clients, for speed, but with a full batch if there are any.
    fitting = np.flatnonzero(sizes >= min(sim.train.batch_size, int(sizes.max())))
    smallest = fitting[np.argsort(sizes[fitting], kind="stable")]
    some = tuple(sorted(sampled[i] for i in smallest[:PROBE_CLIENTS]))
    server, counted = _counted_rounds(sim, some)
    state_bytes = count_up(group.states.get(some), ()).bytes_up / len(some)
    fixed, of_a_gradient = _client_seconds(config, sim, some)
    share = len(everyone) / len(some)
    larger = (
        share
        if sim.train.steps is not None
        else float(sizes.sum() / sim.cohort(some).sizes.sum()) * len(everyone) / len(sampled)
    )
    sent = [result.traffic for result in counted[1:]]
    gradients = counted[-1].gradients * larger
    if not sim.method.pooled and len(participants) * sim.model.scalars <= COUNTED_SCALARS:
        gradients = _gradients(sim, participants) * len(everyone) / len(participants)
    costs: dict[str, Any] = {
        "trained_scalars": sim.trained_scalars,
        "gradients_per_round": round(gradients),
        "scalars_up_per_round": _mean_of_rounds([t.up for t in sent], share, rounds),
        "scalars_down_per_round": _mean_of_rounds([t.down_unicast for t in sent], share, rounds),
        "bytes_per_round": _mean_of_rounds([t.bytes_up + t.bytes_down for t in sent], share, rounds),
        "seconds_per_round": fixed * len(everyone) + of_a_gradient * gradients + server * share,
    }
    return costs, state_bytes


def _mean_of_rounds(counts: Sequence[int], share: float, rounds: int) -> int:
    """Return the traffic of a round, averaged over `rounds`.

    If the server sends all that it has ever received, as with trees, each round costs more than the previous one: by
    each client's addition, times the number of receiving clients.

    Args:
        counts: traffic of the counted clients in round 2 and later ones.
        share: ratio of the participating clients to the counted ones.
        rounds: number of rounds.
    """
    growths = {after - before for before, after in pairwise(counts)}
    growth = max(growths.pop(), 0) if len(growths) == 1 else 0
    if not growth:
        return round(sum(counts) / len(counts) * share)
    return round((counts[0] - growth) * share + growth * share**2 * (rounds - 1) / 2)


def _counted_rounds(sim: Simulation, clients: tuple[int, ...]) -> tuple[float, list[RoundResult]]:
    """Return the server's seconds per round, and the results of rounds in which these clients count."""
    method, distil = sim.method, getattr(sim.method, "distil", None)
    steps = distil.steps if isinstance(distil, ServerDistillation) else 1
    rule, sim.robust = sim.robust, None  # a rule may need more clients than these
    engine = sim.engine = _Counting()
    server: dict[int, float] = {}
    rounds, taken = [], 1
    for number in range(PROBE_ROUNDS):
        if 2 * number == PROBE_ROUNDS:
            taken = min(steps, 2 if server[1] * QUICK_STEPS > PROBE_SECONDS / PROBE_ROUNDS else QUICK_STEPS)
        if isinstance(distil, ServerDistillation):
            sim.method = method.model_copy(update={"distil": distil.model_copy(update={"steps": taken})})
        engine.seconds, start = 0.0, clock()
        rounds.append(sim.step(clients, training=clients))
        seconds = max(clock() - start - engine.seconds, 0.0)
        server[taken] = min(server.get(taken, math.inf), seconds)
    sim.method, sim.robust = method, rule
    of_a_step = max(server[taken] - server[1], 0.0) / max(taken - 1, 1)
    return server[1] + of_a_step * (steps - 1), rounds


def _gradients(sim: Simulation, clients: tuple[int, ...]) -> float:
    """Return the gradients of single samples of these clients in a round, counted for a few clients at a time."""
    total = 0.0
    for start in range(0, len(clients), PROBE_CLIENTS):
        some = clients[start : start + PROBE_CLIENTS]
        work, _ = work_of(sim, sim.method.broadcast(sim.server, some), some, sim.round)
        total += sum(work[i].gradients for i in some)
    return total


def _client_seconds(
    config: ExperimentConfig, sim: Simulation, clients: tuple[int, ...]
) -> tuple[float, float]:
    """Return (fixed seconds per client, seconds per gradient of a sample), from trainings of one and two steps.

    Clients are of one architecture. One is timed alone and, if the engine may train several together and a step is
    quick, as many as take a few seconds; the faster of the two counts. Workers share the clients evenly.
    """
    begin = time.perf_counter()
    times = [_step_seconds(sim, clients[:1], Sequential())]
    together = min(len(clients), int(PROBE_SECONDS / max(time.perf_counter() - begin, 1e-3)))
    if config.engine.name != "sequential" and together > 1:
        try:
            times.append(_step_seconds(sim, clients[:together], Vectorized(config.engine.chunk)))
        except Exception as error:
            if not unsupported(error):
                raise
    fixed, of_a_gradient = min(times, key=lambda pair: pair[1])
    workers = max(config.engine.workers, 1)
    return fixed / workers, of_a_gradient / workers


def _step_seconds(sim: Simulation, clients: tuple[int, ...], engine: InProcessEngine) -> tuple[float, float]:
    """Return (fixed seconds per client, seconds per gradient of a sample) with an engine."""
    ((group, positions),) = by_group(sim.groups, clients)
    message = message_for(sim.method.broadcast(sim.server, clients), group, positions)
    task = CohortTask.of(sim.local, sim.cohort(clients), message)

    def limited(batches: int) -> CohortTask:
        """Return the task with at most this number of batches per fit."""
        return replace(task, cohort=replace(task.cohort, limit=batches, plans={}))

    def gradients(batches: int) -> float:
        counting = limited(batches)
        counting = replace(counting, cohort=replace(counting.cohort, counting=True))
        with torch.no_grad():
            _, _, metrics = Sequential().map(counting, group.states.get(clients))
        return float(metrics[WORK].sum())

    def seconds(batches: int) -> float:
        states, start = group.states.get(clients), clock()
        engine.map(limited(batches), states)
        return clock() - start

    # A step may take several batches.
    short = next((n for n in range(1, LARGEST_STEP) if gradients(n)), 1)
    work = {n: gradients(n) for n in (short, 2 * short)}
    seconds(short)  # the first one is slow in a new process
    least, begin = dict.fromkeys(work, math.inf), time.perf_counter()
    for _ in range(PROBE_REPEATS):
        for n in work:
            least[n] = min(least[n], seconds(n))
        if time.perf_counter() - begin > PROBE_SECONDS / 4:
            break
    of_a_gradient = max(least[2 * short] - least[short], 0.0) / max(work[2 * short] - work[short], 1.0)
    return max(least[short] - of_a_gradient * work[short], 0.0) / len(clients), of_a_gradient


def clock() -> float:
    """Return the process's CPU seconds if torch has one thread, undisturbed by others; else wall-clock seconds."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class _Counting(Sequential):
    """An engine whose clients do not train but return replies of the same size; it measures its own seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def train(self, task: CohortTask, store: StateStore) -> CohortUpdates:
        """Run the function on every client, counting instead of training."""
        with self._clocked():
            return super().train(self._counting(task), store)

    def run(self, task: CohortTask, states: TensorDict) -> Parts:
        """Return the function's results for every client."""
        with self._clocked():
            return super().run(self._counting(task), states)

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        start = clock()
        yield
        self.seconds += clock() - start

    def _counting(self, task: CohortTask) -> CohortTask:
        return replace(task, cohort=replace(task.cohort, counting=True))


def simulated_system(sim: Simulation, rounds: int) -> dict[str, float]:
    """Return the mean number of replies per round, the rounds without effect, and the duration of all rounds.

    A replay has those of its trace. Otherwise the times of answers depend on random keys and on the clients' work. The
    work is counted once, for the first round: if later rounds are shorter or send more, times differ accordingly.

    Args:
        sim: a simulation before its first round; it is not changed.
        rounds: number of rounds.

    Returns:
        `replies_per_round`, `rounds_without_effect`, `simulated_seconds`; empty if all clients always answer.

    Raises:
        RunError: in buffered rounds no client can be reached any more; the message says when.
    """
    if not sim.is_traced:
        return {}
    if sim.trace is not None:
        traces = list(sim.trace)[:rounds]
    else:
        traces = _buffered(sim, rounds) if isinstance(sim, Buffered) else _synchronous(sim, rounds)
    return {
        "replies_per_round": sum(len(trace.answered) for trace in traces) / len(traces),
        "rounds_without_effect": sum(
            trace.too_few or len(set(trace.answered) & set(trace.sampled)) < max(sim.min_replies, 1)
            for trace in traces
        ),
        "simulated_seconds": sum(trace.seconds or 0.0 for trace in traces),
    }


def _synchronous(sim: Simulation, rounds: int) -> list[RoundTrace]:
    assert sim.system is not None
    work, traces, clock = _work(sim), list[RoundTrace](), 0.0
    replies = sampled_clients(sim.fraction, sim.participants)
    for number in range(rounds):
        sampled = sim.sample(number)
        trainees = sim.trainees(sampled)
        trace = sim.system.round(number + 1, clock, sampled, trainees, work(trainees), replies)
        clock += trace.seconds or 0.0
        enough = len(set(trace.answered) & set(sampled)) >= sim.min_replies
        traces.append(trace if enough else trace.refused(trainees, TOO_FEW))
    return traces


def _buffered(sim: Buffered, rounds: int) -> list[RoundTrace]:
    work, traces, timeline = _work(sim), list[RoundTrace](), Timeline()
    for version in range(rounds):
        trace, timeline = sim.buffer.until_full(timeline, version, work)
        traces.append(trace)
    return traces


def _work(sim: Simulation) -> Callable[[Sequence[int]], Mapping[int, ClientWork]]:
    """Return a function clients -> work of each in a round, counted once for all if devices take time."""
    assert sim.system is not None
    everybody = tuple(range(sim.participants))
    if not sim.system.devices.takes_time:
        work: Mapping[int, ClientWork] = dict.fromkeys(everybody, ClientWork(0, 0, 0))
    else:
        work = work_of(sim, sim.method.broadcast(sim.server, everybody), everybody, 0)[0]
    return lambda clients: {client: work[client] for client in clients}
