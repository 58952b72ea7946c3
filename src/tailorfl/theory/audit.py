"""A lower bound on ε from an attack that tells two neighbouring runs apart, to hold against the one that is stated.

Whoever guesses "with" where a score is above a threshold is right with probability TPR and wrong with probability FPR.
(ε, δ)-privacy allows no better than (Kairouz, Oh and Viswanath, ICML 2015)

    TPR ≤ e^ε FPR + δ,     TNR ≤ e^ε FNR + δ,     so   ε ≥ log((TPR − δ)/FPR)   and   ε ≥ log((TNR − δ)/FNR)

The threshold is chosen on one half of the runs. The rates are those of the other half, by Clopper and Pearson's exact
bounds, which hold together with the stated confidence. A bound above the stated ε shows that a promise is broken; one
below it shows nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailorfl.errors import ConfigError

Scores = NDArray[np.float64]
THRESHOLDS = 101
"""How many are tried: quantiles of all scores."""


@dataclass(frozen=True)
class Attack:
    """How well a threshold told runs with a canary from those without."""

    hits: int
    """Of `trials` runs with it, how many were above the threshold."""
    false_alarms: int
    """Of `trials` runs without it."""
    trials: int
    """Runs of each kind that the rates are of: half of all."""

    def epsilon(self, delta: float, confidence: float = 0.95) -> float:
        """Returns what ε is at least, with the stated confidence; 0 where nothing was told apart."""
        out = 0.0
        n, error = self.trials, (1 - confidence) / 4  # two rates by each of two inequalities
        for right, wrong in ((self.hits, self.false_alarms), (n - self.false_alarms, n - self.hits)):
            least, most = at_least(right, n, error), at_most(wrong, n, error)
            if least > delta:
                out = max(out, math.log((least - delta) / most))
        return out


def at_least(successes: int, trials: int, error: float) -> float:
    """Returns the probability that an event has at least, wrong with probability `error`."""
    from scipy.stats import beta

    return float(beta.ppf(error, successes, trials - successes + 1)) if successes else 0.0


def at_most(successes: int, trials: int, error: float) -> float:
    """Returns the probability that an event has at most, wrong with probability `error`."""
    return 1.0 - at_least(trials - successes, trials, error)


def attack(with_it: Scores, without: Scores, delta: float) -> Attack:
    """Returns the attack on scores [runs] of both kinds, which are larger where the canary was there.

    Raises:
        ConfigError: the two are not equally many, or fewer than four.
    """
    if len(with_it) != len(without) or len(with_it) < 4:
        raise ConfigError(
            f"an attack needs as many runs with the canary as without, four at least; got {len(with_it)} and "
            f"{len(without)}"
        )
    half = len(with_it) // 2
    tried = np.quantile(np.concatenate([with_it[:half], without[:half]]), np.linspace(0, 1, THRESHOLDS))
    chosen = max(tried, key=lambda t: _counted(with_it[:half], without[:half], t).epsilon(delta))
    return _counted(with_it[half:], without[half:], float(chosen))


def _counted(with_it: Scores, without: Scores, threshold: float) -> Attack:
    return Attack(int((with_it >= threshold).sum()), int((without >= threshold).sum()), len(with_it))
