"""The pull lam that loses least, from how far clients lie apart and how badly each knows its own optimum.

The coupled estimate `v_i = (H + lam)^-1 (H w^_i + lam w)` shrinks a client's own estimate `w^_i` to the common w.
Along a direction of curvature h it keeps the share `a = h / (h + lam)` of the deviation. Over clients whose
optima scatter with variance r^2 around their mean and are known with error s^2 / n, the squared error is

    error(lam) = sum over directions of   s^2 / (n N)  +  (1 - 1/N) a^2 s^2 / n  +  (1 - a)^2 r^2

(r^2 counted over the N clients themselves; the mean moves by a 1/N-th of every client's noise). Its minimum has
`a = r^2 / (r^2 + (1 - 1/N) s^2/n)`. For a model that fits its data the gradient noise is `sigma^2 h`, so `s^2 =
sigma^2 / h`, and one lam is best in ALL directions, whatever their curvature:

    lam* = (1 - 1/N) sigma^2 / (n r^2) = (1 - 1/N) E / R^2,
    E = sigma^2 d / n = rho^2 d / (tr(H) n),     R^2 = d r^2

E is twice the loss by which a client alone misses its optimum. With the mean curvature `h = tr(H) / d` this is
`rho^2 / (n h R^2)`: FedCLUP's Corollary 1 has mu in place of h, as an upper limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tailorfl.errors import ConfigError
from tailorfl.theory.checks import require_counts, require_not_negative


@dataclass(frozen=True)
class Errors:
    """Expected mean squared distance of the clients' models from their optima."""

    alone: float
    """Training alone: V."""
    pooled: float
    """One model for all: V / N + R^2."""
    coupled: float
    """The best pull: V / N + R^2 V' / (R^2 + V') with V' = (1 - 1/N) V; exact where all curvatures are equal."""


def best_pull(excess: float, radius2: float, clients: int, most: float = math.inf) -> float:
    """lam*, at most `most`, which stands for infinity where clients do not differ.

    >>> best_pull(excess=0.1, radius2=0.5, clients=10)
    0.18

    Args:
        excess: E, twice the loss by which a client alone misses its optimum.
        radius2: R^2; an estimate may be 0 or negative, and the pull is then the largest.
        clients: N.
        most: largest lam.

    Raises:
        ConfigError: if excess is negative, most is not positive or there is no client.
    """
    require_not_negative(excess=excess)
    require_counts(clients=clients)
    if not most > 0:
        raise ConfigError(f"most must be above 0, as the largest lam, but is {most}")
    if radius2 <= 0:
        return most
    return min((1 - 1 / clients) * excess / radius2, most)


def expected_errors(noise: float, radius2: float, clients: int) -> Errors:
    """Errors of training alone, together and coupled.

    >>> expected_errors(noise=0.1, radius2=0.09, clients=10).coupled
    0.055

    Args:
        noise: V, squared error of training alone.
        radius2: R^2; below 0 it counts as 0.
        clients: N.
    """
    require_not_negative(noise=noise)
    require_counts(clients=clients)
    radius2, own_noise = max(radius2, 0.0), (1 - 1 / clients) * noise
    both = radius2 + own_noise
    between = radius2 * own_noise / both if both > 0 else 0.0
    return Errors(noise, noise / clients + radius2, noise / clients + between)
