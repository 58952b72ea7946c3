"""How long a method trains: so many rounds, or as long as it computes or sends what FedAvg would in so many.

A round is no measure of cost: FedRep takes eleven epochs in one where FedAvg takes one, SCAFFOLD sends twice as much.
With `budget: gradients` every method gets the gradients of single samples that FedAvg computes in `rounds` rounds with
the experiment's training settings, with `budget: bytes` the bytes that it sends and receives. A method stops at the
round that ends nearest to that; one that computes or sends nothing takes `rounds`, and a line with rounds of its own
takes those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tailorfl.core.messages import payload_size
from tailorfl.rounds.participation import sample_clients
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.plan import make_plan

Kind = Literal["gradients", "bytes"]
UNITS = {"gradients": "gradients of single samples", "bytes": "bytes, sent and received"}


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


def sentence(config: ExperimentConfig) -> str:
    """Say what the methods of an experiment got equally."""
    if config.budget == "rounds":
        return ""
    return (
        f"Budget: every method trained until it had used as many {UNITS[config.budget]} as FedAvg uses in "
        f"{config.rounds} rounds; the column of rounds says how many it got."
    )
