"""The schedule of a job: how long a method trains, and after which rounds it is evaluated.

A method trains for `rounds` rounds, or until it has computed or sent as much as FedAvg in that many. Rounds do not
measure cost: FedRep takes eleven epochs in a round where FedAvg takes one, and SCAFFOLD sends twice as much. With
`budget: gradients` every method gets the gradients of single samples that FedAvg computes in `rounds` rounds with the
experiment's training settings, with `budget: bytes` the bytes that FedAvg sends and receives. A method stops at the
round that ends nearest to the budget; one that computes or sends nothing takes `rounds`, and a line with its own rounds
takes those.

Every `eval.every`-th round and the last are evaluated. By default intermediate evaluations take at most a tenth of the
work. Work is counted in passes of single samples, so that it is the same on every machine and after a resumption:

    E       forward passes of one evaluation: every model on every sample of every set
    3 G     those of a round of training; a gradient is a forward pass and a backward pass of twice the cost
    every   the smallest of 5, 10, 20, 40, ... with E <= SHARE (3 G every + E)

E counts a personal and a global model for every method, and G the gradients of FedAvg with the line's steps or epochs,
for the average number of sampled clients. So lines that train alike are evaluated in the same rounds; others, or seeds
whose clients have other sizes, share every second, fourth, ... of theirs. The last round comes in addition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tailorfl.core.messages import payload_size
from tailorfl.evaluation.protocols import Protocol, common_sets
from tailorfl.rounds.participation import sample_clients, sampled_clients
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.job import Job
from tailorfl.settings.experiment import CYCLIC, ExperimentConfig
from tailorfl.training.plan import make_plan

Kind = Literal["gradients", "bytes"]
UNITS = {"gradients": "gradients of single samples", "bytes": "bytes, sent and received"}
EVERY = "evaluated_every"
"""Key of the rounds between evaluations in a job's config.json."""
FIRST = 5
"""Smallest number of rounds between evaluations without `eval.every`."""
SHARE = 0.1
"""Largest share of all passes for intermediate evaluations."""
BACKWARD = 3
"""Number of passes that the gradient of a sample counts."""
MODELS = 2
"""A personal and a global one."""
SHARPNESS = 5
"""Number of passes of a sample: the loss, its gradient and the loss at a distance."""
WARN_OUTPUTS = 10_000_000
"""Number of outputs (one per model and sample) from which the last evaluation may be worth a warning."""


@dataclass(frozen=True)
class Limit:
    """The end of a method's training."""

    rounds: int
    kind: Kind | None = None
    allowance: float = 0.0
    """The method's budget, in gradients of single samples or bytes."""

    def reached(self, sim: Simulation) -> bool:
        """Return whether the next round would end further above the budget than the last one ended below it."""
        used = 0 if self.kind is None else used_up(sim, self.kind)
        if not used:
            return sim.round >= self.rounds
        return used + used / sim.round / 2 > self.allowance

    def foreseen(self, cost: float) -> int:
        """Return the number of rounds until the limit, if each costs `cost`."""
        if self.kind is None or not cost:
            return self.rounds
        return nearest(self.allowance, cost)


def nearest(allowance: float, cost: float) -> int:
    """Return the number of rounds, at least one, of this `cost` each whose total is nearest to the budget."""
    return max(1, math.floor(allowance / cost + 1 / 2))


def limit_of(job: Job, sim: Simulation) -> Limit:
    """Return the limit of a job: its rounds, or what its budget allows."""
    config = job.config
    if config.budget == "rounds" or not job.has_budget:  # the first for type checkers
        return Limit(job.rounds)
    return Limit(job.rounds, config.budget, of_fedavg(config, sim, config.budget))


def used_up(sim: Simulation, kind: Kind) -> int:
    """Return the gradients or bytes that all clients of a simulation have used so far."""
    return sim.gradients if kind == "gradients" else sim.traffic.bytes_up + sim.traffic.bytes_down


def of_fedavg(config: ExperimentConfig, sim: Simulation, kind: Kind) -> int:
    """Return the gradients or bytes of FedAvg in the experiment's rounds, with the clients sampled in them."""
    clients = sim.federation.num_clients
    costs, sizes = np.zeros(clients, dtype=np.int64), sim.federation.sizes()[:clients]
    for group in sim.groups:  # clients that were left out cost nothing, even if they are drawn
        members = [i for i in sorted(group.clients) if i < clients and sizes[i]]
        if kind == "bytes":
            _, _, size = payload_size(group.context.init, ())
            costs[members] = 2 * size
            continue
        train = config.train
        rows, keys = [sim.federation.train[i] for i in members], np.zeros(len(members), dtype=np.uint64)
        smallest = 2 if group.model.has_batch_statistics else 1
        length: dict[str, Any] = {"epochs": train.epochs, "steps": train.steps}
        plan = make_plan(rows, keys, train.batch_size, **length, min_batch=smallest)
        costs[members] = plan.count.sum(1)
    drawn = (
        sample_clients(sim.seed, r, sizes, config.fraction, config.sampling) for r in range(config.rounds)
    )
    return int(sum(costs[list(ids)].sum() for ids in drawn))


def budget_sentence(config: ExperimentConfig) -> str:
    """Return a sentence on the equal budget of an experiment's methods."""
    if config.budget == "rounds":
        return ""
    return (
        f"Budget: every method trained until it had used as many {UNITS[config.budget]} as FedAvg uses in "
        f"{config.rounds} rounds; the column of rounds shows how many that was."
    )


def is_due(interval: int, round: int) -> bool:
    """Return whether a round is evaluated even if it is not the last; never if `interval` is 0."""
    return interval > 0 and round % interval == 0


def protocol_of(config: ExperimentConfig, final: bool = False) -> Protocol:
    """Return the protocol of an experiment's intermediate evaluations, or of the `final` one."""
    further = config.eval.final if final else ()
    if final and config.eval.calibrate != "none":
        further = (*further, "val")
    sets = dict.fromkeys((*config.eval.sets, *further))
    return Protocol(
        tuple(sets),
        config.eval.adapt_steps,
        config.eval.max_samples,
        config.eval.feature_distance,
        config.eval.sharpness,
        config.eval.generation,
        tuple(dict.fromkeys((*config.eval.metrics, *([config.eval.metric] if config.eval.metric else ())))),
    )


def rounds_between(config: ExperimentConfig, sim: Simulation) -> int:
    """Return `eval.every` or, by default, the interval at which evaluations take at most a tenth of the work."""
    if config.eval.every is not None:
        return config.eval.every
    passes, round, interval = evaluation_passes(sim, _looks(config)), training_passes(sim), FIRST
    while round and passes > SHARE * (round * interval + passes):
        interval *= 2
    return interval


def left_out(config: ExperimentConfig, sim: Simulation, rounds: int) -> str:
    """Return a note on evaluations left out of a job of `rounds` rounds to limit work; empty if there are none."""
    interval = rounds_between(config, sim)
    if config.eval.every is not None or interval == FIRST or rounds <= FIRST:
        return ""
    passes, round = evaluation_passes(sim, _looks(config)), training_passes(sim)
    share = passes / (round * FIRST + passes)
    moments = f"every {interval} rounds" if interval < rounds else "only at the end"
    return (
        f"evaluated {moments}, so that intermediate evaluations use at most 10 % of the work; with eval.every={FIRST} "
        f"they would use {100 * share:.0f} %"
    )


def _looks(config: ExperimentConfig) -> Protocol:
    """Return the protocol of intermediate computations; model selection adds validation parts, even unrecorded ones."""
    protocol = protocol_of(config)
    chosen = ("val",) if config.eval.select == "val" else ()
    return replace(protocol, sets=tuple(dict.fromkeys((*protocol.sets, *chosen))))


def training_passes(sim: Simulation) -> float:
    """Return the average work of a round of FedAvg with the run's steps or epochs, in forward passes."""
    clients, train = sim.federation.num_clients, sim.train
    sampled = 1 if sim.sampling in CYCLIC else sampled_clients(sim.fraction, clients)
    sizes = sim.federation.sizes()[:clients]
    per_step = _mean_batch(sizes, train.batch_size)
    gradients = sizes * (train.epochs or 1) if train.steps is None else per_step * train.steps
    return BACKWARD * sampled * float(gradients.mean())


def _mean_batch(sizes: NDArray[np.int64], batch: int) -> NDArray[np.float64]:
    """Return the mean size of a client's batches, [clients]; `batch` 0 takes all samples."""
    whole: NDArray[np.float64] = sizes / (np.maximum(-(-sizes // batch), 1) if batch else 1)
    return whole


def evaluation_passes(sim: Simulation, protocol: Protocol) -> float:
    """Return the work of one evaluation of a personal and a global model, in forward passes."""
    federation, sets = sim.federation, protocol.sets
    clients, heldout = federation.num_clients, len(federation) - federation.num_clients
    test = federation.sizes("test")
    samples = MODELS * float(test[:clients].sum()) if "local" in sets else 0.0
    if "participants" in sets and "local" not in sets:
        samples += MODELS * float(test[:clients].mean()) * sampled_clients(sim.fraction, clients)
    if "val" in sets:
        samples += MODELS * float(federation.sizes("val")[:clients].sum())
    samples += (clients + 1) * sum(len(rows) for _, rows in common_sets(federation, protocol).values())
    samples *= (SHARPNESS if protocol.sharpness is not None else 1) + protocol.feature_distance
    if "heldout" in sets and heldout:
        samples += (1 + len(protocol.adapt_steps)) * float(test[clients:].sum())
        batches = _mean_batch(federation.sizes()[clients:], sim.train.batch_size)
        samples += BACKWARD * float(batches.sum()) * sum(protocol.adapt_steps)
    return samples


def rounds_worth(config: ExperimentConfig, sim: Simulation, gradients: float) -> float:
    """Return the number of rounds of `gradients` gradients that cost as much as one evaluation, by passes."""
    return evaluation_passes(sim, _looks(config)) / (BACKWARD * max(gradients, 1.0))


def long_final(sim: Simulation, protocol: Protocol, rounds: int) -> str | None:
    """Return a warning if the last evaluation is large and takes more work than all training, otherwise None.

    It applies every personal model to every common sample, so its work can grow quadratically with the clients.
    """
    if not sim.method.has_personal:
        return None
    clients = sim.federation.num_clients
    sizes = {name: len(rows) for name, (_, rows) in common_sets(sim.federation, protocol).items()}
    outputs = clients * sum(sizes.values())
    trained = rounds * training_passes(sim)
    if outputs < max(WARN_OUTPUTS, trained):
        return None
    return (
        f"the last evaluation applies each of {clients:,} personal models to {sum(sizes.values()):,} samples of the "
        f"sets {', '.join(sizes)}: {outputs / trained:.0f} times the work of all training; set eval.max_samples=1000 "
        "to use only 1000 samples of each set, or eval.final=[local] to leave these sets out"
    )
