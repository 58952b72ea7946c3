"""The minimax rate of personalized estimation: when learning together helps.

"Understanding the Statistical Accuracy-Communication Trade-off in Personalized FL with Minimax Guarantees"
(ICML 2025): no method estimates the clients' parameters better than of order `1/N + min(R^2, 1/n)`, with n
samples a client, N = m n samples of all m clients and heterogeneity R. The paper's comparison table prints
the order between the two thresholds as the minimum of R^2 and 1/(m n); it is their maximum, R^2, and so it
is here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tailorfl.theory.checks import require_counts, require_not_negative

Regime = Literal["pooled", "between", "alone"]


@dataclass(frozen=True)
class MinimaxRate:
    """The rate, up to constants that do not depend on n, m and R; a squared error."""

    rate: float
    """`1/N + min(R^2, 1/n)`."""
    order: float
    """The larger of its two terms: 1/N, R^2 or 1/n."""
    regime: Regime
    """pooled: R <= 1/sqrt(N), one model for all is as good; alone: R > 1/sqrt(n), local training is."""
    pooled_below: float
    """1/sqrt(N)."""
    alone_above: float
    """1/sqrt(n)."""


def minimax_rate(samples: int, clients: int, radius: float) -> MinimaxRate:
    """Return the rate for `samples` a client, `clients` and heterogeneity `radius`.

    >>> minimax_rate(samples=100, clients=25, radius=0.05).regime
    'between'

    Raises:
        ConfigError: unless samples >= 1, clients >= 1 and radius >= 0.
    """
    require_counts(samples=samples, clients=clients)
    require_not_negative(radius=radius)
    total = samples * clients
    pooled_below, alone_above = 1 / math.sqrt(total), 1 / math.sqrt(samples)
    pooled, cost = 1 / total, min(radius**2, 1 / samples)
    regime: Regime = "pooled" if radius <= pooled_below else "between" if radius <= alone_above else "alone"
    return MinimaxRate(pooled + cost, max(pooled, cost), regime, pooled_below, alone_above)
