"""FedCLUP's step sizes and number of local steps, as functions of λ (Yu et al., ICML 2025).

    server step γλ    "mean" 1;   "theory" (λ + L)/(2L), Corollary 2;   "edge" (λ + L)/L, the synthetic experiments
    client step η     "deterministic" 1/(λ + L), Corollary 2
                      "stochastic" min(μ(λ + L)/(4L(λ + μ)²), 1/(λ + L)), the theorem on mini-batches
    K                 the smallest with (2 + 64λ²/μ²) (1 − η(λ + μ))^K ≤ (1 − γL_g)⁴, L_g = λL/(λ + L), in the proof
                      of Theorem 2 (docs/theory.md)

Theorem 2 asks for γ < 1/L_g = 1/λ + 1/L and η ≤ 1/(λ + L). "mean" is always below that, but slow where λ is much larger
than L, and asks for many steps where λ is much smaller; "edge" is the boundary itself, and the fastest in practice, but
no K meets the condition there.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tailorfl.errors import ConfigError
from tailorfl.theory.fedclup import fewest_steps as of_theory

ServerRule = Literal["mean", "theory", "edge"]
ClientRule = Literal["deterministic", "stochastic"]


def server_step(rule: ServerRule, lam: float, smoothness: float | None) -> float:
    """Return γλ: how far the server moves from w to the mean of the personal models (0 without a pull)."""
    if lam == 0 or rule == "mean" or smoothness is None:
        return 1.0 if lam > 0 else 0.0
    edge = 1.0 + lam / smoothness
    return edge if rule == "edge" else edge / 2.0


def client_step(rule: ClientRule, lam: Tensor, mu: float | None, smoothness: float) -> Tensor:
    """Return η, of the shape and dtype of `lam`; `mu` is for the stochastic rule only."""
    exact: Tensor = 1 / (lam + smoothness)
    if rule == "deterministic" or mu is None:
        return exact
    return torch.minimum(mu * (lam + smoothness) / (4 * smoothness * (lam + mu) ** 2), exact)


def fewest_steps(lam: float, mu: float, smoothness: float, server: float, eta: float) -> int:
    """Return the smallest K ≥ 1 of the proof for the server's step γλ = `server` and the clients' step η = `eta`.

    >>> fewest_steps(lam=1, mu=1, smoothness=10, server=1, eta=1 / 11)
    69

    Raises:
        ConfigError: where no K meets the condition.
    """
    try:
        return of_theory(mu, smoothness, lam, server / lam, eta)
    except ConfigError as error:
        raise ConfigError(
            f"local_steps = theory: no number of steps keeps Theorem 2's rate for λ = {lam:g}: {error}; take lr_rule = "
            "deterministic and gamma = theory or mean, or give local_steps a number"
        ) from error
