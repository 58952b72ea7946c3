"""FedCLUP's statistical error: which lam to take, what it guarantees, and the best that any method can do.

"Understanding the Statistical Accuracy-Communication Trade-off in Personalized FL with Minimax Guarantees"
(ICML 2025), Theorem 1 (statistical bound), Corollary 1 (choice of lam) and the minimax rate: the error of every
method is at least of order `1/N + min(R^2, 1/n)`.
Errors are mean squared distances of the clients' models to their true parameters.

    paper    here
    rho      rho: bound on the gradient noise of one sample at the true parameter (standard deviation)
    R        radius: heterogeneity, distance of the clients' true parameters from their centre
    n, m, N  samples (of one client), clients, total = m n
    mu, L    mu, smoothness;  kappa = L / mu
    g(lam)   slack
    q_1(lam) 1 / `_pooling_excess`
    q_2(lam) `_coupling_excess`, the part of the second bound that grows with lam

Resolved misprints: 1/q_1 prints `n^2` twice where its derivation has `n`; the noise of the second bound
grows as `16 rho^2 lam / (mu^3 n)`, which is what (35) inserted into (64) gives, while (8) and (66) print 4
for 16; the condition on g is once printed `1/(8L)^2` where the proof needs `1/(8 L^2)`; the introduction says
that small lam leads to the global model, but large lam does. The constants are those of the proof: safe and
far from sharp (kappa = 10 requires a lam of 6e4). The
comparison table prints the minimax order between the two thresholds as the minimum of R^2 and 1/(m n); it is
their maximum, R^2, which is used here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tailorfl.theory.checks import require_counts, require_curvature, require_not_negative, require_positive


@dataclass(frozen=True)
class Problem:
    """The numbers that the bounds depend on; raises ConfigError for invalid values."""

    mu: float
    smoothness: float
    rho: float
    radius: float
    samples: int
    clients: int

    def __post_init__(self) -> None:
        require_curvature(self.mu, self.smoothness)
        require_positive(rho=self.rho)
        require_not_negative(radius=self.radius)
        require_counts(samples=self.samples, clients=self.clients)

    @property
    def total(self) -> int:
        """Samples of all clients together, N."""
        return self.samples * self.clients

    @property
    def kappa(self) -> float:
        """Condition number L / mu."""
        return self.smoothness / self.mu

    @property
    def threshold(self) -> float:
        """Heterogeneity 1 / sqrt(n) up to which learning together pays off."""
        return 1 / math.sqrt(self.samples)


@dataclass(frozen=True)
class LambdaRange:
    """Corollary 1's interval of lam: at least `lower`, at most `upper`."""

    lower: float
    upper: float
    together: bool
    """Whether R <= 1/sqrt(n): pull the clients together (lam large) instead of leaving them alone (small)."""


@dataclass(frozen=True)
class StatisticalBound:
    """Theorem 1's bound on the mean squared error of the clients' models at the optimum for one lam."""

    pooled: float
    """First bound, good for large lam; infinite if `slack(lam) > 1 / (8 L^2)`, where it does not hold."""
    separate: float
    """Second bound, good for small lam."""

    @property
    def value(self) -> float:
        """The smaller of the two."""
        return min(self.pooled, self.separate)


def lambda_range(problem: Problem) -> LambdaRange:
    """Return the lam for which FedCLUP is minimax optimal (Corollary 1).

    If `R <= 1/sqrt(n)`: `lam >= max(64 kappa^2 L, max(2 kappa, 5) mu s) - mu`, where `s = (2 L^2 R^2 +
    rho^2/n) / (L^2 R^2 + rho^2/N)`; otherwise `lam <= rho^2 / (n mu R^2)`.

    >>> lambda_range(Problem(mu=1, smoothness=10, rho=2, radius=0.05, samples=200, clients=10)).lower
    63999.0
    """
    mu, L, kappa = problem.mu, problem.smoothness, problem.kappa
    if problem.radius > problem.threshold:
        upper = problem.rho**2 / (problem.samples * mu * problem.radius**2)
        return LambdaRange(0.0, upper, together=False)
    drift = (L * problem.radius) ** 2
    ratio = (2 * drift + problem.rho**2 / problem.samples) / (drift + problem.rho**2 / problem.total)
    lower = max(64 * kappa**2 * L, max(2 * kappa, 5) * mu * ratio) - mu
    return LambdaRange(lower, math.inf, together=True)


def slack(problem: Problem, lam: float) -> float:
    """Return `g = (4/mu) (1 / (mu + lam) + L / (mu + lam)^2)`; Theorem 1's first bound needs `g <= 1 / (8 L^2)`.

    Raises:
        ConfigError: if lam is negative.
    """
    require_not_negative(lam=lam)
    x = problem.mu + lam
    return 4 / problem.mu * (1 / x + problem.smoothness / x**2)


def statistical_bound(problem: Problem, lam: float) -> StatisticalBound:
    """Return Theorem 1's two bounds for one lam.

        pooled = 48 rho^2 / (mu^2 N) + (48 kappa^2 + 3) R^2 + 1/q_1(lam)
        separate = 4 rho^2 / (mu^2 n) + (16 rho^2 / (mu^3 n) + 4 R^2 / mu) lam + 8 R^2 lam^2 / mu^2

    Raises:
        ConfigError: if lam is negative.
    """
    mu, noise, spread = problem.mu, (problem.rho / problem.mu) ** 2, problem.radius**2
    pooled = math.inf
    if slack(problem, lam) <= 1 / (8 * problem.smoothness**2):
        pooled = 48 * noise / problem.total + (48 * problem.kappa**2 + 3) * spread
        pooled += _pooling_excess(problem, lam)
    separate = 4 * noise / problem.samples
    return StatisticalBound(pooled, separate * (1 + 4 * lam / mu) + _coupling_excess(problem, lam))


def _pooling_excess(problem: Problem, lam: float) -> float:
    """Return 1/q_1, the part of the first bound that is due to a finite lam; it falls as 1/lam."""
    mu, L, x, factor = problem.mu, problem.smoothness, problem.mu + lam, slack(problem, lam)
    local = 4 * (L * problem.radius) ** 2 + 2 * problem.rho**2 / problem.samples
    pooled = 8 * (problem.rho / mu) ** 2 / problem.total + 8 * (problem.kappa * problem.radius) ** 2
    grown = factor / (1 - 4 * L**2 * factor)
    return 12 / x**2 * local + (48 * (L / x) ** 2 + 3) * grown * local + 96 * (L / x) ** 2 * pooled


def _coupling_excess(problem: Problem, lam: float) -> float:
    """Return q_2 = `8 R^2 lam^2 / mu^2 + 4 R^2 lam / mu`, the cost of pulling different clients together."""
    return 8 * (problem.radius * lam / problem.mu) ** 2 + 4 * problem.radius**2 * lam / problem.mu


Regime = Literal["pooled", "between", "alone"]


@dataclass(frozen=True)
class MinimaxRate:
    """The minimax rate of the squared error, up to constants that do not depend on n, m and R."""

    rate: float
    """`1/N + min(R^2, 1/n)`."""
    order: float
    """The larger of its two terms: 1/N, R^2 or 1/n."""
    regime: Regime
    """pooled: R <= 1/sqrt(N), where one model for all is as good; alone: R > 1/sqrt(n), where local training is."""
    pooled_below: float
    """1/sqrt(N)."""
    alone_above: float
    """1/sqrt(n)."""


def minimax_rate(samples: int, clients: int, radius: float) -> MinimaxRate:
    """Return the rate for `clients` with `samples` each and heterogeneity `radius`.

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
