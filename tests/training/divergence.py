"""Privacy by numerical integration of densities: what no accountant of the package has a hand in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq

Mixture = Sequence[tuple[float, float]]
"""(weight, mean) of normal densities of deviation 1."""

GRID = np.linspace(-40.0, 40.0, 400_001)


def density(mixture: Mixture) -> np.ndarray:
    """The density of a mixture on `GRID`."""
    return sum(w * np.exp(-0.5 * (GRID - mean) ** 2) for w, mean in mixture) / math.sqrt(2 * math.pi)


def hockey_stick(p: Mixture, q: Mixture, epsilon: float) -> float:
    """∫ max(p − e^ε q, 0)."""
    return float(np.maximum(density(p) - math.exp(epsilon) * density(q), 0.0).sum() * (GRID[1] - GRID[0]))


def epsilon_of(p: Mixture, q: Mixture, delta: float) -> float:
    """The smallest ε with which both hockey-stick divergences are at most δ."""

    def one_way(a: Mixture, b: Mixture) -> float:
        if hockey_stick(a, b, 0.0) <= delta:
            return 0.0
        return float(brentq(lambda e: hockey_stick(a, b, e) - delta, 0.0, 60.0, xtol=1e-6))

    return max(one_way(p, q), one_way(q, p))
