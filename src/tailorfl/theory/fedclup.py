"""FedCLUP's step sizes and rounds: how fast it converges, from the curvature of its two problems.

"Understanding the Statistical Accuracy-Communication Trade-off in Personalized FL with Minimax Guarantees"
(ICML 2025), Theorem 2 and Corollary 2 (exact gradients), and the theorem of the stochastic variant. All
errors are squared distances to the optimum of `mean_i F_i(v_i) + (lam/2) ||v_i - w||^2`, which is `min_w mean_i
F_i^lam(w)` with the Moreau envelope `F_i^lam(w) = min_v F_i(v) + (lam/2) ||v - w||^2`. The constants hold for
every `F_i` that is `mu`-strongly convex and `L`-smooth.

    paper      here
    mu, L      mu, smoothness of every client's loss;  kappa = L / mu
    lambda     lam
    eta, gamma eta (clients' step), gamma (server's step on `lam (w - v_i)`)
    K          steps, of a client in a round
    L_g        global_smoothness = lam L / (lam + L)
    mu_g       global_convexity = lam mu / (lam + mu)
    L_l        local_smoothness = lam + L
    mu_l       local_convexity = lam + mu
    L_w        prox_lipschitz = lam / (lam + mu)

The appendix once prints the ratio of the local problem's condition upside down, and Corollary 4 drops a
factor 1/4 in the rate and a factor 2 before the initial error; the formulas here follow Theorem 2 and
Corollary 2. docs/theory.md shows why the condition on K (`fewest_steps`) keeps the rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tailorfl.errors import ConfigError
from tailorfl.theory.checks import require_curvature, require_positive, require_share


@dataclass(frozen=True)
class MoreauConstants:
    """Constants of the server's problem (global) and of one client's (local); units are those of mu."""

    global_smoothness: float
    """Smoothness of the envelope F_i^lam, at most min(lam, L)."""
    global_convexity: float
    """Strong convexity of the envelope, at most min(lam, mu)."""
    local_smoothness: float
    """Smoothness of `F_i(v) + (lam/2) ||v - w||^2` in v."""
    local_convexity: float
    """Strong convexity of the same function in v."""
    prox_lipschitz: float
    """Lipschitz constant of `w -> v_i*(w)`, the client's optimum for w; below 1, dimensionless."""

    @property
    def condition(self) -> float:
        """Condition number of the server's problem; it falls from L / mu to 1 as lam goes to 0."""
        return self.global_smoothness / self.global_convexity


def moreau_constants(mu: float, smoothness: float, lam: float) -> MoreauConstants:
    """Return the constants for losses with curvature from `mu` to `smoothness` and penalty `(lam/2) ||v - w||^2`.

    >>> moreau_constants(mu=1, smoothness=10, lam=1).global_convexity
    0.5

    Raises:
        ConfigError: unless 0 < mu <= smoothness and lam > 0.
    """
    require_curvature(mu, smoothness)
    require_positive(lam=lam)
    return MoreauConstants(
        global_smoothness=lam * smoothness / (lam + smoothness),
        global_convexity=lam * mu / (lam + mu),
        local_smoothness=lam + smoothness,
        local_convexity=lam + mu,
        prox_lipschitz=lam / (lam + mu),
    )


@dataclass(frozen=True)
class FedCLUPSchedule:
    """Corollary 2: step sizes, local steps and the rate they guarantee."""

    eta: float
    """Client step size 1 / (lam + L)."""
    gamma: float
    """Server step size 1 / (2 L_g) = (lam + L) / (2 lam L)."""
    steps: int
    """K of the corollary, `>= 2 + (lam + L) / (lam + mu) ln(1056 kappa^2)`."""
    fewest_steps: int
    """The smallest K that meets the proof's own condition for this eta and gamma; never above `steps`."""
    rate: float
    """Factor of the squared error per round, `1 - (lam + L) / (4 kappa (lam + mu))`, in [3/4, 1)."""

    def rounds(self, target: float) -> int:
        """Return the rounds until `rate ** rounds <= target`, the wanted share of the initial squared error.

        Raises:
            ConfigError: unless 0 < target < 1.
        """
        require_share(target=target)
        return math.ceil(math.log(target) / math.log(self.rate))

    def gradients(self, target: float) -> int:
        """Return the gradients of one client in these rounds: rounds times `steps`."""
        return self.rounds(target) * self.steps


def schedule(mu: float, smoothness: float, lam: float) -> FedCLUPSchedule:
    """Return Corollary 2's step sizes, local steps and rate.

    With them the condition of `fewest_steps` is `(2 + 64 lam^2 / mu^2) ((L - mu) / (lam + L))^K <= 1/16`.

    >>> plan = schedule(mu=1, smoothness=10, lam=1)
    >>> plan.gamma, plan.steps, plan.fewest_steps, round(plan.rate, 4), plan.rounds(1e-6)
    (0.55, 66, 35, 0.8625, 94)

    Raises:
        ConfigError: unless 0 < mu <= smoothness and lam > 0.
    """
    require_curvature(mu, smoothness)
    require_positive(lam=lam)
    kappa = smoothness / mu
    ratio = (lam + smoothness) / (lam + mu)
    eta, gamma = 1 / (lam + smoothness), (lam + smoothness) / (2 * lam * smoothness)
    return FedCLUPSchedule(
        eta=eta,
        gamma=gamma,
        steps=math.ceil(2 + ratio * math.log(1056 * kappa**2)),
        fewest_steps=fewest_steps(mu, smoothness, lam, gamma, eta),
        rate=1 - ratio / (4 * kappa),
    )


def fewest_steps(mu: float, smoothness: float, lam: float, gamma: float, eta: float) -> int:
    """Return the smallest K >= 1 with which a round keeps the rate of Theorem 2 (`round_rate`).

    It is the smallest that meets the proof's condition, for any allowed step sizes:
    `(2 + 64 lam^2 / mu^2) (1 - eta (lam + mu))^K <= (1 - gamma L_g)^4`.

    >>> fewest_steps(mu=1, smoothness=10, lam=1, gamma=0.55, eta=1 / 11)
    35
    >>> fewest_steps(mu=1, smoothness=10, lam=1, gamma=1, eta=1 / 11)  # the server takes the mean
    69

    Raises:
        ConfigError: unless 0 < mu <= smoothness, lam > 0, 0 < gamma < 1/L_g = 1/lam + 1/L and
            0 < eta <= 1 / (lam + L); no K meets the condition otherwise.
    """
    constants = _allowed(mu, smoothness, lam, gamma)
    require_positive(eta=eta)
    if eta * constants.local_smoothness > 1 + 1e-9:
        edge = 1 / constants.local_smoothness
        raise ConfigError(f"eta must be at most 1/(lam + smoothness) = {edge:g} for Theorem 2, but is {eta}")
    # A step leaves at most this share of a client's squared error: 1 - eta (lam + mu), without cancellation.
    slack = 1 - eta * constants.local_smoothness
    shrinkage = (slack if slack > 1e-12 else 0.0) + eta * (smoothness - mu)
    if shrinkage == 0:
        return 1  # mu = L and the largest eta: the first step is exact
    exponent = math.log(2 + 64 * (lam / mu) ** 2) - 4 * math.log1p(-gamma * constants.global_smoothness)
    return max(1, math.ceil(exponent / -math.log(shrinkage)))


def round_rate(mu: float, smoothness: float, lam: float, gamma: float) -> float:
    """Return Theorem 2's factor of the squared error per round for any allowed gamma, with its square term.

    It is `1 - x/2 - x^2/2` with `x = gamma mu_g`. The experiments on synthetic data take gamma at the edge
    `1/L_g`, which the theorem excludes.

    Raises:
        ConfigError: unless 0 < mu <= smoothness, lam > 0 and 0 < gamma < 1/L_g = 1/lam + 1/L.
    """
    x = gamma * _allowed(mu, smoothness, lam, gamma).global_convexity
    return 1 - x / 2 - x**2 / 2


def stochastic_eta(mu: float, smoothness: float, lam: float) -> float:
    """Return the stochastic theorem's client step size, `min(mu (lam + L) / (4 L (lam + mu)^2), 1 / (lam + L))`.

    Raises:
        ConfigError: unless 0 < mu <= smoothness and lam > 0.
    """
    require_curvature(mu, smoothness)
    require_positive(lam=lam)
    careful = mu * (lam + smoothness) / (4 * smoothness * (lam + mu) ** 2)
    return min(careful, 1 / (lam + smoothness))


def _allowed(mu: float, smoothness: float, lam: float, gamma: float) -> MoreauConstants:
    """Return the problem's constants; raise ConfigError if Theorem 2 does not allow gamma."""
    constants = moreau_constants(mu, smoothness, lam)
    require_positive(gamma=gamma)
    edge = 1 / constants.global_smoothness
    if gamma >= edge * (1 - 1e-12):
        raise ConfigError(
            f"gamma must be below 1/lam + 1/smoothness = {edge:g} for Theorem 2, but is {gamma}"
        )
    return constants
