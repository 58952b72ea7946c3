"""Curvature of the Moreau envelope and of the proximal problem.

Federated methods with a proximal pull solve `min_w mean_i F_i^lam(w)` with `F_i^lam(w) = min_v F_i(v) +
(lam/2) ||v - w||^2`. The constants below hold for every `F_i` that is `mu`-strongly convex and `L`-smooth;
they are the ones of the FedCLUP analysis ("Understanding the Statistical Accuracy-Communication Trade-off
in Personalized FL with Minimax Guarantees", ICML 2025).

    paper  here
    L_g    global_smoothness = lam L / (lam + L)
    mu_g   global_convexity = lam mu / (lam + mu)
    L_l    local_smoothness = lam + L
    mu_l   local_convexity = lam + mu
    L_w    prox_lipschitz = lam / (lam + mu)
"""

from __future__ import annotations

from dataclasses import dataclass

from tailorfl.theory.checks import require_curvature, require_positive


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
    """Strong convexity of the same."""
    prox_lipschitz: float
    """Lipschitz constant of `w -> v_i*(w)`, the client's answer to w; below 1, without a unit."""

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
