"""L2GD's coin: the probability of averaging, the step size and the communication they cost.

Hanzely and Richtárik, "Federated Learning of a Mixture of Global and Local Models" (2020). Minimises `(1/N)
sum_i (F_i(x_i) + (lam/2) ||x_i - mean x||^2)`; a coin shared by all clients picks a local step (probability
1 - p) or a pull towards the mean (p). Clients communicate only when a pull follows a local step.

    paper  here
    p      p;  p* = lam / (lam + L) needs the fewest iterations and the fewest communications
    Lcal   expected_smoothness = max(L / (1 - p), lam / p) / N
    alpha  step = 1 / (2 Lcal)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tailorfl.theory.checks import require_counts, require_curvature, require_positive, require_share


@dataclass(frozen=True)
class L2GDPlan:
    """Settings and cost of L2GD for reducing the squared error to a given share of the initial one."""

    p: float
    expected_smoothness: float
    step: float
    iterations: float
    """`(2 Lcal N / mu) ln(1 / target)`: local steps and pulls together."""
    communications: float
    """Expected uploads of a client, `p (1 - p)` times iterations.

    At p* they are `2 lam kappa / (lam + L) ln(1 / target)`.
    """


def best_probability(smoothness: float, lam: float) -> float:
    """Return p* = lam / (lam + L).

    Raises:
        ConfigError: unless both are positive.
    """
    require_positive(smoothness=smoothness, lam=lam)
    return lam / (lam + smoothness)


def plan(
    mu: float, smoothness: float, lam: float, clients: int, target: float, p: float | None = None
) -> L2GDPlan:
    """Return step size, iterations and communications for probability `p` (p* if None).

    Args:
        mu: strong convexity of every F_i.
        smoothness: L of every F_i.
        lam: strength of the coupling.
        clients: N; it scales step and expected smoothness, and cancels from iterations.
        target: wanted share of the initial squared error, apart from the noise of the coin.
        p: probability of a pull.

    Raises:
        ConfigError: unless 0 < mu <= smoothness, lam > 0, clients >= 1, 0 < target < 1 and 0 < p < 1.
    """
    require_curvature(mu, smoothness)
    require_counts(clients=clients)
    require_share(target=target)
    p = best_probability(smoothness, lam) if p is None else p
    require_positive(lam=lam)
    require_share(p=p)
    largest = max(smoothness / (1 - p), lam / p)
    iterations = 2 * largest / mu * math.log(1 / target)
    return L2GDPlan(
        p=p,
        expected_smoothness=largest / clients,
        step=clients / (2 * largest),
        iterations=iterations,
        communications=p * (1 - p) * iterations,
    )
