"""The schedule of a job: how long a method trains, and after which rounds it is evaluated.

A method trains so many rounds, or as long as it computes or sends what FedAvg would in so many. A round is no measure
of cost: FedRep takes eleven epochs in one where FedAvg takes one, SCAFFOLD sends twice as much. With `budget:
gradients` every method gets the gradients of single samples that FedAvg computes in `rounds` rounds with the
experiment's training settings, with `budget: bytes` the bytes that it sends and receives. A method stops at the round
that ends nearest to that; one that computes or sends nothing takes `rounds`, and a line with rounds of its own takes
those.

Every `eval.every`-th round and the last are evaluated, or as many as a tenth of the work pays for. Work is counted in
passes of single samples, so that it is the same on every machine and after a resumption:

    E       forward passes of one evaluation: every model on every sample of every set
    3 G     those of a round of training; a gradient is a forward pass and twice as much backwards
    every   the smallest of 5, 10, 20, 40, ... with E <= SHARE (3 G every + E)

E counts a personal and a global model whatever a method has, and G the gradients of FedAvg with the line's steps or
epochs, of as many clients as a round samples on average. Lines that train alike are so evaluated in the same rounds;
others, or seeds whose clients have other sizes, share every second, fourth, ... of theirs. The last round comes on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tailorfl.core.messages import payload_size
from tailorfl.evaluation.protocols import Protocol, common_sets
from tailorfl.rounds.participation import sample_clients, sampled_clients
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.experiment import CYCLIC, ExperimentConfig
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.plan import make_plan

Kind = Literal["gradients", "bytes"]
UNITS = {"gradients": "gradients of single samples", "bytes": "bytes, sent and received"}
EVERY = "evaluated_every"
"""What a job's config.json calls the rounds between its evaluations."""
FIRST = 5
"""Rounds between evaluations, at least, where the budget decides."""
SHARE = 0.1
"""Of all passes, at most, those of evaluations on the way."""
BACKWARD = 3
"""Passes that the gradient of a sample counts."""
MODELS = 2
"""A personal and a global one."""
SHARPNESS = 5
"""Passes of a sample, with the loss, its gradient and the loss at a distance."""
WARN_OUTPUTS = 10_000_000
"""Outputs (of a model for a sample) from which on the last evaluation may be worth a warning."""


@dataclass(frozen=True)
class Limit:
    """When a method has trained enough."""

    rounds: int
    kind: Kind | None = None
    allowance: float = 0.0
    """What it may use up, in gradients of single samples or bytes."""

    def reached(self, sim: Simulation) -> bool:
        """Whether the next round would end further above what is allowed than the last one ended below it."""
        used = 0 if self.kind is None else used_up(sim, self.kind)
        if not used:
            return sim.round >= self.rounds
        return used + used / sim.round / 2 > self.allowance

    def foreseen(self, cost: float) -> int:
        """Return after how many rounds it is reached where each of them uses up `cost`."""
        if self.kind is None or not cost:
            return self.rounds
        return nearest(self.allowance, cost)


def nearest(allowance: float, cost: float) -> int:
    """Return how many, at least one, end nearest what is allowed where each uses up `cost`."""
    return max(1, math.floor(allowance / cost + 1 / 2))


def limit_of(config: ExperimentConfig, rounds: int, has_own_rounds: bool, sim: Simulation) -> Limit:
    """Return the limit of a method; `rounds` are its nominal ones, `has_own_rounds` whether its line gives them."""
    if config.budget == "rounds" or has_own_rounds:
        return Limit(rounds)
    return Limit(rounds, config.budget, of_fedavg(config, sim, config.budget))


def used_up(sim: Simulation, kind: Kind) -> int:
    """Return what all clients of a simulation used so far."""
    return sim.gradients if kind == "gradients" else sim.traffic.bytes_up + sim.traffic.bytes_down


def of_fedavg(config: ExperimentConfig, sim: Simulation, kind: Kind) -> int:
    """Return what FedAvg uses up in the experiment's rounds, with the clients that are drawn in them."""
    clients = sim.federation.num_clients
    costs = np.zeros(clients, dtype=np.int64)
    for group in sim.groups:
        members = [i for i in sorted(group.clients) if i < clients]
        if kind == "bytes":
            _, _, size = payload_size(group.context.init, ())
            costs[members] = 2 * size
            continue
        train = TrainConfig(**{**config.train.model_dump(), "dp": None})
        rows, keys = [sim.federation.train[i] for i in members], np.zeros(len(members), dtype=np.uint64)
        smallest = 2 if group.model.has_batch_statistics else 1
        epochs, steps = train.epochs, train.steps
        plan = make_plan(rows, keys, train.batch_size, epochs=epochs, steps=steps, min_batch=smallest)
        costs[members] = plan.count.sum(1)
    sizes = sim.federation.sizes()[:clients]
    drawn = (
        sample_clients(sim.seed, r, sizes, config.fraction, config.sampling) for r in range(config.rounds)
    )
    return int(sum(costs[list(ids)].sum() for ids in drawn))


def budget_sentence(config: ExperimentConfig) -> str:
    """Say what the methods of an experiment got equally."""
    if config.budget == "rounds":
        return ""
    return (
        f"Budget: every method trained until it had used as many {UNITS[config.budget]} as FedAvg uses in "
        f"{config.rounds} rounds; the column of rounds says how many it got."
    )


def is_due(interval: int, round: int) -> bool:
    """Return whether a round is evaluated wherever it stands in a run; `interval` 0 evaluates only the last."""
    return interval > 0 and round % interval == 0


def protocol_of(config: ExperimentConfig, final: bool = False) -> Protocol:
    """Return what an experiment evaluates on the way, or at the end."""
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
    """Return `eval.every`, or where that is open what a tenth of the work pays for."""
    if config.eval.every is not None:
        return config.eval.every
    passes, round, interval = evaluation_passes(sim, _looks(config)), training_passes(sim), FIRST
    while round and passes > SHARE * (round * interval + passes):
        interval *= 2
    return interval


def left_out(config: ExperimentConfig, sim: Simulation, rounds: int) -> str:
    """Say what the budget leaves out of a job of so many rounds; empty where it leaves nothing out."""
    interval = rounds_between(config, sim)
    if config.eval.every is not None or interval == FIRST or rounds <= FIRST:
        return ""
    passes, round = evaluation_passes(sim, _looks(config)), training_passes(sim)
    share = passes / (round * FIRST + passes)
    moments = f"every {interval} rounds" if interval < rounds else "only at the end"
    return (
        f"evaluated {moments}, so that evaluations on the way are a tenth of the work at most; "
        f"with eval.every={FIRST} they are {100 * share:.0f} % of it"
    )


def _looks(config: ExperimentConfig) -> Protocol:
    """Return what is computed on the way; choosing models takes validation parts though no record shows them."""
    protocol = protocol_of(config)
    chosen = ("val",) if config.eval.select == "val" else ()
    return replace(protocol, sets=tuple(dict.fromkeys((*protocol.sets, *chosen))))


def training_passes(sim: Simulation) -> float:
    """Return what a round of FedAvg computes on average with the run's steps or epochs, in forward passes."""
    clients, train = sim.federation.num_clients, sim.train
    sampled = 1 if sim.sampling in CYCLIC else sampled_clients(sim.fraction, clients)
    sizes = sim.federation.sizes()[:clients]
    batches = np.maximum(-(-sizes // train.batch_size), 1) if train.batch_size else 1
    gradients = sizes * (train.epochs or 1) if train.steps is None else sizes / batches * train.steps
    return BACKWARD * sampled * float(gradients.mean())


def evaluation_passes(sim: Simulation, protocol: Protocol) -> float:
    """Return what one evaluation computes of a personal and a global model, in forward passes."""
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
        samples += BACKWARD * heldout * sum(protocol.adapt_steps) * sim.train.batch_size
    return samples


def rounds_worth(config: ExperimentConfig, sim: Simulation, gradients: float) -> float:
    """Return how many rounds of so many gradients cost what one evaluation does, by passes."""
    return evaluation_passes(sim, _looks(config)) / (BACKWARD * max(gradients, 1.0))


def long_final(sim: Simulation, protocol: Protocol, rounds: int) -> str | None:
    """Say so where the last evaluation takes more work than all training, and much; None otherwise.

    It puts every personal model on every common sample, which grows as a square.
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
        f"the last evaluation puts each of {clients:,} personal models on {sum(sizes.values()):,} samples of the sets "
        f"{', '.join(sizes)}: {outputs / trained:.0f} times the work of all training; eval.max_samples=1000 takes so "
        "many of each set, eval.final=[local] leaves them out"
    )
