"""What the last evaluation of a run costs: every personal model on every common sample, which grows as a square."""

from __future__ import annotations

from tailorfl.evaluation.protocols import Protocol, common_sets
from tailorfl.rounds.simulation import Simulation

LONG = 10_000_000
"""Outputs (of a model for a sample) from which on it is worth a warning."""
BACKWARD = 3
"""Times as much as an output that training does for a sample."""


def long_final(sim: Simulation, protocol: Protocol, rounds: int) -> str | None:
    """Says so where the last evaluation takes more work than all training, and much; None otherwise."""
    if not sim.method.has_personal:
        return None
    clients, train = sim.federation.num_clients, sim.train
    sizes = {name: len(rows) for name, (_, rows) in common_sets(sim.federation, protocol).items()}
    outputs = clients * sum(sizes.values())
    if outputs < LONG:
        return None
    each = float(sim.federation.sizes()[:clients].mean()) * (train.epochs or 1)
    trained = rounds * clients * sim.fraction * BACKWARD
    trained *= each if train.steps is None else train.steps * train.batch_size
    if outputs < trained:
        return None
    return (
        f"the last evaluation puts each of {clients:,} personal models on {sum(sizes.values()):,} samples of the sets "
        f"{', '.join(sizes)}: {outputs / trained:.0f} times the work of all training; eval.max_samples=1000 takes so "
        "many of each set, eval.final=[local] leaves them out"
    )
