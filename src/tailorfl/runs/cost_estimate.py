"""What an experiment would cost, found by building everything and training two small clients for a few rounds.

Where that would take long, for one batch: the rest is counted (`training/counting.py`), not trained. In a simulated
system, who answers when depends on keys and on what clients have to do: that is counted once, for the first round, and
where later rounds are shorter or send more, times differ by as much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from tailorfl.core.messages import Traffic, count_up
from tailorfl.core.server_distill import ServerDistillation
from tailorfl.data.federation import Federation
from tailorfl.engines.base import CohortTask, Engine
from tailorfl.engines.results import CohortUpdates, Parts
from tailorfl.engines.sequential import Sequential
from tailorfl.engines.state import StateStore
from tailorfl.evaluation.leading import first_metric
from tailorfl.evaluation.protocols import Protocol as EvaluationProtocol
from tailorfl.evaluation.protocols import evaluate
from tailorfl.rounds.buffered import Buffered
from tailorfl.rounds.events import Timeline
from tailorfl.rounds.groups import by_group, message_for
from tailorfl.rounds.one_round import WORK, RoundResult
from tailorfl.rounds.participation import TOO_FEW, RoundTrace
from tailorfl.rounds.planning import work_of
from tailorfl.rounds.sampling import sampled_clients
from tailorfl.rounds.simulation import Simulation
from tailorfl.rounds.system import ClientWork
from tailorfl.runs.budget import limit_of
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.eval_schedule import rounds_between, rounds_worth
from tailorfl.runs.job import Job
from tailorfl.runs.job_loop import check_sets, make_selection
from tailorfl.runs.privacy import planned, spent
from tailorfl.runs.reductions import remarks
from tailorfl.settings.experiment import CYCLIC, ExperimentConfig

PROBE_CLIENTS, PROBE_ROUNDS = 2, 4
PROBE_SECONDS = 3.0
"""What trying whole rounds of a method may take; longer ones are counted."""
PATIENCE = 6.0
"""Seconds that trying whole rounds of all clients may take, of all methods together."""
TRIED = 3
"""So many of them; the first one is slower."""
PROBE_REPEATS = 5
"""One and two steps are tried so often, or less where they take long."""
LARGEST_STEP = 8
"""No method takes so many batches for one step."""


@dataclass(frozen=True)
class Estimate:
    """Sizes and costs; of seconds and memory only the order of magnitude is meant."""

    clients: int
    heldout_clients: int
    malicious_clients: str
    """How many of the training clients, and what they do."""
    clients_per_round: int
    aggregation: str
    """What the server does with updates: mean, or the robust rule that takes its place."""
    samples: Mapping[str, Mapping[str, float]]
    """Part -> smallest, median and largest client, and the total."""
    methods: Mapping[str, Mapping[str, float]]
    """Label -> scalars of the model that may change and that are frozen, trained scalars, gradients of single samples,
    scalars and bytes a round, rounds, seconds of a round, of an evaluation and of all rounds and seeds. Where what
    frozen layers give out is computed once, what that takes. In a simulated system also what `foreseen` returns.

    With differential privacy also the noise, and the ε that the client with the largest one will have spent.
    """
    seconds: float
    """Everything together. Where a round is too long to be tried, evaluations are counted by their forward passes."""
    reductions: Mapping[str, Sequence[str]]
    """Label -> sentences on which other methods its settings make of it, where they do."""
    memory_bytes: float
    """Data, the private states of all clients of the largest method, and the features that are kept of samples."""


def estimate(config: ExperimentConfig, watch: Callable[[str], None] | None = None) -> Estimate:
    """Returns what running `config` would take. Trains nothing that is kept; `watch` is told what is tried.

    Raises:
        TailorflError: the experiment cannot be built; the message says why.
    """
    torch.set_num_threads(config.threads)
    # What is tried are rounds beyond those of a recorded run.
    config = config.model_copy(update={"system": config.system.model_copy(update={"trace": None})})
    seed = config.data.seed_of(config.seeds[0])
    federation = make_federation(config, seed)
    first_metric(config, federation.source)
    rows: dict[str, dict[str, Any]] = {}
    reductions, states, frozen, features = {}, 0.0, 0, 0
    patience, tried, kinds, worth = PATIENCE, [], [], []
    for number, method in enumerate(config.methods, start=1):
        if watch is not None:
            watch(f"estimating {method.label} ({number} of {len(config.methods)})")
        job = Job(config, method, config.seeds[0])
        sim = make_simulation(job, federation)
        check_sets(config, sim)
        make_selection(config, sim, None)
        engine, hostile = sim.engine, sim.malicious
        frozen = max(frozen, sim.model.held_scalars)
        of_model = {"model_scalars": sim.model.scalars, "frozen_scalars": sim.model.held_scalars}
        kept, of_features = sim.features, dict[str, float]()
        if kept is not None:
            of_features = {"features_bytes": kept.bytes, "features_seconds": kept.seconds()}
            if of_features["features_seconds"] < PATIENCE / 2:
                kept.compute()  # else rounds that are timed would take what is done once
            features = max(features, 0 if kept.on_disk else kept.bytes)
        privacy, same = _privacy(job, sim), remarks(sim, job.rounds)
        answering = foreseen(sim, job.rounds)
        if same:
            reductions[method.label] = same
        allowed = limit_of(config, job.rounds, method.rounds is not None, sim)
        found, state_bytes = _probe(sim)
        each = found["bytes_per_round" if allowed.kind == "bytes" else "gradients_per_round"]
        found["rounds"] = allowed.foreseen(each)
        between = rounds_between(config, sim)
        found["evaluations"] = 1 + (found["rounds"] // between if between else 0)
        begin = clock()
        tried.append(_really(sim, engine, config, found["seconds_per_round"], patience))
        patience -= clock() - begin
        kinds.append(_kind(job, sim))
        worth.append(rounds_worth(config, sim, found["gradients_per_round"]))
        rows[method.label] = {**of_model, **of_features, **found, **answering, **privacy}
        if config.eval.select == "val" and sim.method.has_personal:  # the chosen models beside the states
            state_bytes += 4 * sim.model.scalars
        states = max(states, state_bytes * federation.num_clients)
    _add_seconds(config, rows, tried, kinds, worth)
    source = federation.source
    return Estimate(
        clients=federation.num_clients,
        heldout_clients=len(federation) - federation.num_clients,
        malicious_clients=f"{len(hostile.clients)} ({hostile.settings.kind})" if hostile.clients else "0",
        aggregation="mean" if config.server.robust.rule == "none" else config.server.robust.rule,
        clients_per_round=1
        if config.sampling in CYCLIC
        else sampled_clients(config.fraction, federation.num_clients),
        samples=_sizes(federation),
        methods=rows,
        reductions=reductions,
        seconds=sum(row["seconds"] for row in rows.values()),
        memory_bytes=source.x.numel() * source.x.element_size() + states + 4 * frozen + features,
    )


class _Tried(NamedTuple):
    """Seconds of a round, of an evaluation, and what a first round takes more: the automatic engine tries both ways."""

    round: float
    evaluation: float
    begin: float


def _kind(job: Job, sim: Simulation) -> str:
    """What is equal for methods whose clients train alike, and differ in how a model is tuned before it is used."""
    options = {n: v for n, v in sim.method.all_options().items() if not n.startswith("ft_")}
    return repr((type(sim.method).local, options, sim.train, job.config.model_of(job.method)))


def _add_seconds(
    config: ExperimentConfig,
    rows: Mapping[str, dict[str, Any]],
    tried: Sequence[_Tried | None],
    kinds: Sequence[str],
    worth: Sequence[float],
) -> None:
    """Puts seconds into the rows: of a round as tried, or as predicted and then corrected by what the others took.

    An evaluation of which there is no time takes as long as the rounds that it is `worth`.

    Methods of a kind get one time a round: what is measured is not the same twice.
    """
    predicted = [row["seconds_per_round"] for row in rows.values()]
    ratios = [t.round / p for t, p in zip(tried, predicted, strict=True) if t is not None and p > 0]
    ratio = float(np.median(ratios)) if ratios else 1.0
    looking = float(np.median([t.evaluation for t in tried if t is not None])) if ratios else None
    begin = float(np.median([t.begin / t.round for t in tried if t is not None and t.round > 0] or [0.0]))
    of_kind: dict[str, _Tried] = {}
    for row, kind, guess, found, share in zip(rows.values(), kinds, predicted, tried, worth, strict=True):
        evaluation = guess * share if looking is None else looking
        own = found if found is not None else _Tried(guess * ratio, evaluation, guess * ratio * begin)
        known = of_kind.setdefault(kind, own)
        rounds = row["rounds"]
        row["seconds_per_round"] = known.round
        row["seconds_per_evaluation"] = max(known.evaluation, own.evaluation)
        once = row.get("features_seconds", 0.0)
        of_job = (
            once + known.begin + known.round * rounds + row["seconds_per_evaluation"] * row["evaluations"]
        )
        row["seconds"] = of_job * len(config.seeds)


def _privacy(job: Job, sim: Simulation) -> dict[str, float]:
    """The noise of a job and the largest ε at its end, where it is private; nothing is trained for that."""
    if sim.level is None or isinstance(sim, Buffered):  # whose cohorts nobody knows before
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
    clients, server, done = _rounds(sim, some)
    states = count_up(group.states.get(some), ()).bytes_up
    mine = sim.cohort(some).sizes
    share = len(everyone) / len(some)
    larger = (
        share
        if sim.train.steps is not None
        else float(sizes.sum() / mine.sum()) * len(everyone) / len(sampled)
    )
    traffic, of_a_round = Traffic(), share / (PROBE_ROUNDS - 1)
    for one in done[1:]:
        traffic.add(one.traffic)
    shown: dict[str, Any] = {
        "trained_scalars": sim.trained_scalars,
        "gradients_per_round": round(done[-1].gradients * larger),
        "scalars_up_per_round": round(traffic.up * of_a_round),
        "scalars_down_per_round": round(traffic.down_unicast * of_a_round),
        "bytes_per_round": round((traffic.bytes_up + traffic.bytes_down) * of_a_round),
        "seconds_per_round": clients * larger + server,
    }
    return shown, states / len(some)


def _really(
    sim: Simulation, engine: Engine, config: ExperimentConfig, predicted: float, patience: float
) -> _Tried | None:
    """What the experiment's own engine takes; None where trying some rounds would take long.

    `predicted` is what one takes with one client after another. The first is tried where it fits into half of the
    `patience`, others while they do.
    """
    if not 2 * predicted < patience or sim.level is not None:
        return None
    sim.engine = engine
    now = clock if config.engine.workers < 2 and config.engine.device == "cpu" else time.perf_counter
    begin = now()
    sim.step()
    first, rounds = now() - begin, list[float]()
    while len(rounds) < TRIED - 1 and 2 * (first + sum(rounds)) < patience:
        begin = now()
        sim.step()
        rounds.append(now() - begin)
    seconds, begin = float(np.median(rounds or [first])), now()
    evaluate(sim, EvaluationProtocol(tuple(config.eval.sets)), sim.sample(0))
    return _Tried(seconds, now() - begin, max(first - seconds, 0.0))


def _rounds(sim: Simulation, some: tuple[int, ...]) -> tuple[float, float, list[RoundResult]]:
    """(seconds of the clients `some` in a round, of all else in it, the rounds that were tried)."""
    method, distil = sim.method, getattr(sim.method, "distil", None)
    engine = sim.engine = Timed(counting=True)

    def timed() -> tuple[float, float, RoundResult]:
        engine.seconds, start = 0.0, clock()
        done = sim.step(some, training=some)
        return engine.seconds, max(clock() - start - engine.seconds, 0.0), done

    def server_seconds(steps: int) -> float:
        if isinstance(distil, ServerDistillation):
            short = distil.model_copy(update={"steps": min(steps, distil.steps)})
            sim.method = method.model_copy(update={"distil": short})
        return timed()[1]

    rule, sim.robust = sim.robust, None  # which may need more clients than these
    first = server_seconds(1)
    server = min(first, server_seconds(1))
    if isinstance(distil, ServerDistillation) and distil.steps > 1:
        server += max(server_seconds(2) - server, 0.0) * (distil.steps - 1)
    clients = _client_seconds(sim, some)
    whole = PROBE_ROUNDS * (clients + server) <= PROBE_SECONDS
    if whole:
        engine = sim.engine = Timed(counting=False)
        sim.method = method
    mine, others, done = zip(*(timed() for _ in range(PROBE_ROUNDS)), strict=True)
    sim.robust = rule
    return (min(mine), min(others), list(done)) if whole else (clients, server, list(done))


def _client_seconds(sim: Simulation, some: tuple[int, ...]) -> float:
    """Return what some clients of one architecture take in a round, from one and two steps a training of the first."""
    message = sim.method.broadcast(sim.server, some)
    ((group, where),) = by_group(sim.groups, some)
    task = CohortTask.of(sim.local, sim.cohort(some), message_for(message, group, where))

    def limited(batches: int) -> CohortTask:
        """The training of the first client with at most so many batches a fit."""
        first = task.part((0,))
        return replace(first, cohort=replace(first.cohort, limit=batches, plans={}))

    def gradients(task: CohortTask) -> float:
        """Gradients of samples that clients take, counted without training."""
        counting = replace(task, cohort=replace(task.cohort, counting=True, plans={}))
        with torch.no_grad():
            _, _, metrics = Sequential().map(counting, group.states.get(task.cohort.ids))
        return float(metrics[WORK].sum())

    # A step may take several batches.
    short = next((n for n in range(1, LARGEST_STEP) if gradients(limited(n))), 1)
    work = {n: gradients(limited(n)) for n in (short, 2 * short)}

    def tried(batches: int) -> float:
        states, start = group.states.get(some[:1]), clock()
        Sequential().map(limited(batches), states)
        return clock() - start

    tried(short)  # the first one is slow in a new process
    seconds, begin = dict.fromkeys(work, math.inf), time.perf_counter()
    for _ in range(PROBE_REPEATS):
        for n in work:
            seconds[n] = min(seconds[n], tried(n))
        if time.perf_counter() - begin > PROBE_SECONDS / 4:
            break
    more = max(work[2 * short] - work[short], 1.0)
    of_a_gradient = max(seconds[2 * short] - seconds[short], 0.0) / more
    fixed = max(seconds[short] - of_a_gradient * work[short], 0.0)
    return len(some) * fixed + of_a_gradient * gradients(task)


def foreseen(sim: Simulation, rounds: int) -> dict[str, float]:
    """Returns how many replies arrive in the mean of a round, the rounds without effect, and how long all rounds take.

    Args:
        sim: before its first round; it is left as it is.
        rounds: how many there will be.

    Returns:
        `replies_per_round`, `rounds_without_effect`, `simulated_seconds`; nothing where no system is simulated.

    Raises:
        RunError: in buffered rounds nobody can be reached any more; the message says when.
    """
    if sim.system is None:
        return {}
    said = _buffered(sim, rounds) if isinstance(sim, Buffered) else _synchronous(sim, rounds)
    return {
        "replies_per_round": sum(len(one.answered) for one in said) / rounds,
        "rounds_without_effect": sum(one.too_few or not one.answered for one in said),
        "simulated_seconds": sum(one.seconds or 0.0 for one in said),
    }


def _synchronous(sim: Simulation, rounds: int) -> list[RoundTrace]:
    assert sim.system is not None
    work, found, clock = _Work(sim), list[RoundTrace](), 0.0
    wanted = sampled_clients(sim.fraction, sim.participants)
    for number in range(rounds):
        sampled = sim.sample(number)
        asked = sim.trainees(sampled)
        one = sim.system.round(number + 1, clock, sampled, asked, work(asked), wanted)
        clock += one.seconds or 0.0
        enough = len(set(one.answered) & set(sampled)) >= sim.min_replies
        found.append(one if enough else one.refused(asked, TOO_FEW))
    return found


def _buffered(sim: Buffered, rounds: int) -> list[RoundTrace]:
    work, found, timeline = _Work(sim), list[RoundTrace](), Timeline()
    for version in range(rounds):
        one, timeline = sim.buffer.until_full(timeline, version, work)
        found.append(one)
    return found


class _Work:
    """What clients have to do in a round, each counted once."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._of = cache(self._counted)

    def __call__(self, clients: Sequence[int]) -> Mapping[int, ClientWork]:
        assert self._sim.system is not None
        if not self._sim.system.devices.takes_time:
            return dict.fromkeys(clients, ClientWork(0, 0, 0))
        everybody = self._of()
        return {i: everybody[i] for i in clients}

    def _counted(self) -> Mapping[int, ClientWork]:
        clients = tuple(range(self._sim.participants))
        message = self._sim.method.broadcast(self._sim.server, clients)
        return work_of(self._sim, message, clients, 0)[0]


def clock() -> float:
    """Seconds of this process where torch has one thread, which no other disturbs; else of the day."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Timed(Sequential):
    """An engine that says how long its clients took; if `counting` they train nothing, but send what they would."""

    def __init__(self, counting: bool) -> None:
        super().__init__()
        self.seconds, self._counting = 0.0, counting

    def train(self, task: CohortTask, store: StateStore) -> CohortUpdates:
        """Runs the function on every client."""
        with self._clocked():
            return super().train(self._of(task), store)

    def run(self, task: CohortTask, states: TensorDict) -> Parts:
        """Returns what the function makes of every client."""
        with self._clocked():
            return super().run(self._of(task), states)

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        start = clock()
        yield
        self.seconds += clock() - start

    def _of(self, task: CohortTask) -> CohortTask:
        return replace(task, cohort=replace(task.cohort, counting=True)) if self._counting else task
