"""Who takes part in a round."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailorfl.settings.experiment import CYCLIC, Sampling
from tailorfl.training.keys import generator

REDRAWS = 10_000
"""Empty cohorts after which one client is drawn at random: so many happen only where fraction · N is below 0.002, and
there a cohort that is not empty has one client but for a chance in a thousand."""


def sample_clients(
    seed: int,
    round: int,
    sizes: NDArray[np.int64],
    fraction: float,
    sampling: Sampling,
    may_be_empty: bool = False,
) -> tuple[int, ...]:
    """Returns the clients of a round in rising order, a function of its arguments only.

    `sizes` [clients] training samples; uniform and proportional sampling take the share `fraction`, at least one.
    Bernoulli sampling draws again where nobody was drawn, unless the cohort `may_be_empty`: then each client is in it
    with probability `fraction`, which drawing again raises to fraction/(1 − (1 − fraction)^N). Cyclic sampling has one
    client a round, whatever the fraction, and everyone once in N rounds.
    """
    total = len(sizes)
    if sampling in CYCLIC:
        cycle, turn = divmod(round, total)
        drawn = sampling == "cyclic"
        order = generator(seed, "cycle", cycle).permutation(total) if drawn else np.arange(total)
        return (int(order[turn]),)
    rng = generator(seed, "sample", round)
    if sampling == "bernoulli":
        for _ in range(REDRAWS):
            chosen = np.flatnonzero(rng.random(total) < fraction)
            if len(chosen) or may_be_empty:
                return tuple(int(c) for c in chosen)
        return (int(rng.integers(total)),)
    share = sizes / sizes.sum() if sampling == "proportional" else None
    size = min(sampled_clients(fraction, total), total)
    return tuple(sorted(int(c) for c in rng.choice(total, size=size, replace=False, p=share)))


def sampled_clients(fraction: float, total: int) -> int:
    """Returns how many of `total` clients a share of them is, at least one."""
    return max(1, round_half_up(fraction * total))


def round_half_up(value: float) -> int:
    """Returns the nearest integer, halves upwards, so that 0.25 · 10 clients is 3 on every machine."""
    return int(np.floor(value + 0.5))
