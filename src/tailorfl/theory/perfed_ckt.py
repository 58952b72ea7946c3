"""PerFed-CKT: the best transfer between linear models.

"Personalized Federated Learning for Heterogeneous Clients with Clustered Knowledge Transfer" (arXiv
2109.08119), Theorem 4.2. Client k has the true model `w_k = theta + zeta_k` with `zeta_k ~ N(0, v_k^2 I)`
and a flat prior on theta, sees labels with noise of variance sigma^2, and fits
`||y - X w||^2 + lam ||P (w - sum_i alpha_i w^_i)||^2`, where `w^_i` are the clients' least squares solutions.

    paper      here
    beta       beta, X'X = beta I for every client
    nu         nu, P'P = nu I for the public rows (at least as many rows as weights; the paper says one)
    sigma^2    sigma2
    v_k^2      v2, one per client
    lambda_k*  lam;  alpha_{k,i}*  alpha, the same for every k
    B_k        normaliser

The printed B_k divides by `sigma^2 + A_k beta v_k^2`, with which the alpha do not sum to 1; the posterior
mean divides by `A_k + sigma^2 + beta v_k^2`, which is used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailorfl.errors import ConfigError
from tailorfl.theory.checks import require_positive

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class BestTransfer:
    """Theorem 4.2: the best regularised estimate of every client; all arrays are float64."""

    lam: Floats
    """`[clients]` strength of the pull, `sigma^2 / (v_k^2 nu)`."""
    alpha: Floats
    """`[clients]` weights of all estimates in the centre, proportional to `1 / (sigma^2 + beta v_i^2)`."""
    own_weight: Floats
    """`[clients]` weight of a client's own estimate, `beta v_k^2 / (sigma^2 + beta v_k^2)`; the centre has the rest."""
    normaliser: Floats
    """`[clients]` B_k, with `alpha_{k,i} = B_k / (sigma^2 + beta v_i^2)`."""
    mse: Floats
    """`[clients]` expected squared error of one coordinate of the estimate."""
    local_mse: float
    """The same for least squares on a client's own data, `sigma^2 / beta`."""


def best_transfer(beta: float, sigma2: float, nu: float, v2: Sequence[float]) -> BestTransfer:
    """Return the optimum of Theorem 4.2, which is the posterior mean given all clients' estimates.

    Args:
        beta: curvature of the private data, X'X = beta I.
        sigma2: variance of the label noise.
        nu: curvature of the public data, P'P = nu I.
        v2: variances of the clients' true models around the common one, two or more.

    Raises:
        ConfigError: unless all numbers are positive and there are at least two clients.
    """
    spread, noise = variances(beta, sigma2, nu, v2)
    precision = 1 / noise
    variance_of_others = 1 / (precision.sum() - precision)  # A_k
    return BestTransfer(
        lam=sigma2 / (spread * nu),
        alpha=precision / precision.sum(),
        own_weight=beta * spread / noise,
        normaliser=variance_of_others * noise / (variance_of_others + noise),
        mse=1 / (beta / (variance_of_others + beta * spread) + beta / sigma2),
        local_mse=sigma2 / beta,
    )


def variances(beta: float, sigma2: float, nu: float, v2: Sequence[float]) -> tuple[Floats, Floats]:
    """Return `(v_i^2, sigma^2 + beta v_i^2)` `[clients]`; raise ConfigError unless all numbers are positive."""
    require_positive(beta=beta, sigma2=sigma2, nu=nu)
    for value in v2:
        require_positive(v2=value)
    if len(v2) < 2:
        raise ConfigError(f"transfer needs at least two clients, but v2 has {len(v2)}")
    spread = np.asarray(v2, dtype=np.float64)
    return spread, sigma2 + beta * spread
