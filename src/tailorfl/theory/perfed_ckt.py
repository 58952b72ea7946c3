"""PerFed-CKT: the best transfer between linear models, and what the method transmits.

"Personalized Federated Learning for Heterogeneous Clients with Clustered Knowledge Transfer" (arXiv
2109.08119), Theorem 4.2 and the cost column of the CIFAR-10 tables. Client k has the true model `w_k =
theta + zeta_k` with `zeta_k ~ N(0, v_k^2 I)` and a flat prior on theta, sees labels with noise of variance
sigma^2, and fits `||y - X w||^2 + lam ||P (w - sum_i alpha_i w^_i)||^2`, where `w^_i` are the clients'
least squares solutions.

    paper      here
    beta       beta, X'X = beta I for every client
    nu         nu, P'P = nu I for the public rows (at least as many rows as weights; the paper says one)
    sigma^2    sigma2
    v_k^2      v2, one a client
    lambda_k*  lam;  alpha_{k,i}*  alpha, the same for every k
    B_k        normaliser

The printed B_k divides by `sigma^2 + A_k beta v_k^2`, with which the alpha do not sum to 1; the posterior
mean has `A_k + sigma^2 + beta v_k^2` there, and so it is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailorfl.errors import ConfigError, unknown
from tailorfl.theory.checks import require_counts, require_not_negative, require_positive

Floats = NDArray[np.float64]
CostMethod = Literal["fedavg", "hypcluster", "fedfomo", "perfed_ckt"]
VGG11_SCALARS = 9_756_426
"""Weights of the VGG-11 with batch norm and a 512-512-512-10 head, the model of the printed costs."""
PREDICTION_SCALARS = 20_000
"""Class probabilities of 2000 public samples and 10 classes."""


@dataclass(frozen=True)
class Transfer:
    """Theorem 4.2: the best regularised estimate of every client; all arrays are float64."""

    lam: Floats
    """`[clients]` strength of the pull, `sigma^2 / (v_k^2 nu)`."""
    alpha: Floats
    """`[clients]` weights of all estimates in the centre, proportional to `1 / (sigma^2 + beta v_i^2)`."""
    own_weight: Floats
    """`[clients]` weight of the own estimate beside the centre, `beta v_k^2 / (sigma^2 + beta v_k^2)`."""
    normaliser: Floats
    """`[clients]` B_k, with `alpha_{k,i} = B_k / (sigma^2 + beta v_i^2)`."""
    mse: Floats
    """`[clients]` expected squared error of one coordinate of the estimate."""
    local_mse: float
    """The same for least squares on a client's own data, `sigma^2 / beta`."""


@dataclass(frozen=True)
class Cost:
    """Scalars of a whole run; a payload sent down to several clients in a round counts once (multicast)."""

    up: int
    down: int

    @property
    def total(self) -> int:
        """Both directions."""
        return self.up + self.down


def best_transfer(beta: float, sigma2: float, nu: float, v2: Sequence[float]) -> Transfer:
    """The optimum of Theorem 4.2, which is the posterior mean given everybody's estimates.

    Args:
        beta: curvature of the private data, X'X = beta I.
        sigma2: variance of the label noise.
        nu: curvature of the public data, P'P = nu I.
        v2: variances of the clients' true models around the common one, two or more.

    Raises:
        ConfigError: unless all numbers are positive and there are at least two clients.
    """
    spread, noise = _variances(beta, sigma2, nu, v2)
    precision = 1 / noise
    others = 1 / (precision.sum() - precision)  # A_k
    return Transfer(
        lam=sigma2 / (spread * nu),
        alpha=precision / precision.sum(),
        own_weight=beta * spread / noise,
        normaliser=others * noise / (others + noise),
        mse=1 / (beta / (others + beta * spread) + beta / sigma2),
        local_mse=sigma2 / beta,
    )


def transfer_mse(
    beta: float, sigma2: float, nu: float, v2: Sequence[float], client: int, lam: float, alpha: ArrayLike
) -> float:
    """Expected squared error of one coordinate of `client`'s estimate for any `lam` and `alpha`.

    Args:
        beta, sigma2, nu, v2: as in `best_transfer`.
        client: index into v2.
        lam: strength of the pull, not negative.
        alpha: `[clients]` weights of the estimates in the centre; they must sum to 1, or the error would
            depend on theta.

    Raises:
        ConfigError: for numbers as in `best_transfer`, an unknown client or alpha that does not fit.
    """
    spread, _ = _variances(beta, sigma2, nu, v2)
    require_not_negative(lam=lam)
    weights = np.asarray(alpha, dtype=np.float64)
    if not 0 <= client < len(spread):
        raise ConfigError(f"client must be one of 0 to {len(spread) - 1}, but is {client}")
    if weights.shape != spread.shape or not np.isclose(weights.sum(), 1):
        raise ConfigError(f"alpha must be {len(spread)} numbers that sum to 1, but is {weights.tolist()}")
    own = np.eye(len(spread))[client]
    keep = beta / (beta + lam * nu)
    estimates = keep * own + (1 - keep) * weights
    deviations = (1 - keep) * (weights - own)
    return float((estimates**2).sum() * sigma2 / beta + (deviations**2 * spread).sum())


def transmission_cost(
    method: str,
    clients: int,
    rounds: int,
    clusters: int = 1,
    model_scalars: int = VGG11_SCALARS,
    prediction_scalars: int = PREDICTION_SCALARS,
) -> Cost:
    """Scalars sent by a run: every upload, and every distinct payload of a round's downlink once.

    With 200 rounds and the default sizes this gives every printed cost of the homogeneous table; its
    caption says "per round" and the text speaks of 500 rounds, and neither fits the numbers. The cost of
    FedDF with several architectures is not covered. The table charges SCAFFOLD like FedAvg, though with its
    control variates it sends twice as much.

    Args:
        method: "fedavg" (and every method that sends one model down), "hypcluster" (one model a cluster
            down), "fedfomo" (the models of all sampled clients down) or "perfed_ckt" (predictions up, one
            centroid a cluster down).
        clients: sampled in a round.
        rounds: of the run.
        clusters: of hypcluster and perfed_ckt; the others have none.
        model_scalars: of one model.
        prediction_scalars: public samples times classes.

    Raises:
        ConfigError: for an unknown method or a count below 1.
    """
    require_counts(
        clients=clients,
        rounds=rounds,
        clusters=clusters,
        model_scalars=model_scalars,
        prediction_scalars=prediction_scalars,
    )
    distinct = {"fedavg": 1, "hypcluster": clusters, "fedfomo": clients, "perfed_ckt": clusters}
    if method not in distinct:
        raise unknown("method", method, get_args(CostMethod))
    payload = prediction_scalars if method == "perfed_ckt" else model_scalars
    return Cost(up=rounds * clients * payload, down=rounds * distinct[method] * payload)


def _variances(beta: float, sigma2: float, nu: float, v2: Sequence[float]) -> tuple[Floats, Floats]:
    """`(v_i^2, sigma^2 + beta v_i^2)` `[clients]`, once everything is found positive."""
    require_positive(beta=beta, sigma2=sigma2, nu=nu)
    for value in v2:
        require_positive(v2=value)
    if len(v2) < 2:
        raise ConfigError(f"transfer needs at least two clients, but v2 has {len(v2)}")
    spread = np.asarray(v2, dtype=np.float64)
    return spread, sigma2 + beta * spread
