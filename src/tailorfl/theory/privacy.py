"""The privacy cost of DP-SGD for a client (Abadi et al., CCS 2016), from the settings alone.

    Poisson batches:   q = min(1, B/n);   steps = trainings · rounds · E · ⌈n/B⌉
    shuffled ones:     q = 1;             steps = trainings · rounds · E, since a pass has each sample in one batch
                       σ' = σ/√g for g gradients of each batch

The first also covers client-level privacy: of n clients B are drawn per round, independently, and a round is one step.
"""

from __future__ import annotations

import math

from tailorfl.errors import ConfigError
from tailorfl.privacy import Entry
from tailorfl.settings.train import UNBOUND, BatchSampling
from tailorfl.theory.checks import require_counts


def releases(
    samples: int,
    batch: int,
    epochs: int,
    rounds: int,
    trainings: int = 1,
    gradients: int = 1,
    noise: float = 1.0,
    sampling: BatchSampling = UNBOUND.sampling,
) -> Entry:
    """Return (q, σ', steps) of a client with `samples` samples, for `tailorfl.privacy`.

    Args:
        samples: n.
        batch: B; 0 takes all samples at once.
        epochs: E, passes over the samples in one training.
        rounds: rounds in which the client takes part.
        trainings: number of models it trains in a round, each on its own batches (Ditto: 2).
        gradients: number of gradients of each batch (SAM: 2).
        noise: σ.
        sampling: whether batches are Poisson samples or those of shuffled passes.

    Raises:
        ConfigError: a number is below 1 (the batch and the noise below 0).
    """
    require_counts(samples=samples, epochs=epochs, rounds=rounds, trainings=trainings, gradients=gradients)
    if batch < 0 or noise < 0:
        raise ConfigError(f"batch and noise must not be negative, but are {batch} and {noise}")
    size = samples if batch == 0 else min(batch, samples)
    if sampling == "shuffle":
        return 1.0, noise / math.sqrt(gradients), trainings * rounds * epochs
    return size / samples, noise / math.sqrt(gradients), trainings * rounds * epochs * -(-samples // size)
