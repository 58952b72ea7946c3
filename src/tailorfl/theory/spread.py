"""Distances between clients' optima, estimated from two models of every client so that noise does not inflate them.

Client i's optimum `w_i` is observed through models `a_i`, `b_i` trained on two DISJOINT halves of its samples:
`a_i = w_i + noise`, `b_i = w_i + other noise`. The squared distance of a client's model from the mean is
inflated by noise; the product of BOTH models' deviations is not, since their noises are independent:

    R^2   = mean_i ||w_i - w||^2        estimated by  mean_i <a_i - a, b_i - b>
    V     = mean_i E||w^_i - w_i||^2    estimated by  mean_i ||a_i - b_i||^2 / 4
    v_k^2 = ||w_k - theta||^2 / d       estimated by  <a_k - a, b_k - b> / d, corrected for theta's error

`a`, `b`, `w` are means over clients; `w^_i` is trained on all n samples, with half the variance of a half's
model. R^2 is unbiased whatever the noise: no variance formula enters, and a bias that all clients share cancels.
Estimates may be below 0 if clients are alike, and stay so until they are displayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailorfl.partition.rows import Ints
from tailorfl.theory.checks import require_counts, require_share

Floats = NDArray[np.float64]
ROUNDS = 5
"""Alternations between the spreads given the common optimum and the common optimum given the spreads."""


@dataclass(frozen=True)
class SpreadInterval:
    """A number with its range under resampling of the clients."""

    value: float
    low: float
    high: float

    def root(self) -> SpreadInterval:
        """Return the square root; a square estimated below 0 counts as 0."""
        return SpreadInterval(*(max(at, 0.0) ** 0.5 for at in (self.value, self.low, self.high)))


def heterogeneity(gram: Floats, picked: Ints | None = None, among: int | None = None) -> float:
    """Return R^2 of the clients, or of a resample of them.

    Args:
        gram: `[clients, clients]` products `<a_i, b_j>`.
        picked: `[clients]` client numbers drawn with replacement. Repeated clients make R^2 smaller by the factor
            `1 - 1/N`, which is corrected.
        among: N, if the clients are n of N and R^2 is to be that of all N: their own is smaller by the factor
            `(1 - 1/n) / (1 - 1/N)`.
    """
    drawn = 1.0 if among is None else (1 - 1 / among) / (1 - 1 / len(gram))
    if picked is None:
        return float((np.trace(gram) / len(gram) - gram.mean()) * drawn)
    some = gram[np.ix_(picked, picked)]
    narrow = len(picked) / max(len(picked) - 1, 1)
    return float((np.trace(some) / len(some) - some.mean()) * narrow * drawn)


def client_spread(gram: Floats, noise: Floats, dim: int) -> Floats:
    """Return v_k^2 `[clients]`, the variance of one weight of every client's optimum around the common one.

    One client's estimate is noisy: its relative error is about `sqrt(2/d)`, and larger if noise is large. It is
    shrunk towards the mean of all to the extent that this noise explains the scatter of the estimates (empirical
    Bayes), and floored at 0.

    Args:
        gram: `[clients, clients]` products `<a_i, b_j>`.
        noise: `[clients]` squared distance `||a_i - b_i||^2 / 2`, the variance of one half's model.
        dim: d, number of weights.
    """
    clients, per_weight = len(gram), noise / dim
    if clients < 3:
        return np.full(clients, max(heterogeneity(gram) * clients / max(clients - 1, 1) / dim, 0.0))
    weights = np.ones(clients)
    for _ in range(ROUNDS):
        raw = _freed(gram, weights) / dim
        common, floored = max(float(raw.mean()), 0.0), np.maximum(raw, 0.0)
        # variance of <w + e, w + e'> / d: of w's own draw, of w's product with either noise, and of that of the noises
        sampling = (2 * floored**2 + 2 * floored * per_weight + per_weight**2) / dim
        between = max(float(raw.var(ddof=1) - sampling.mean()), 0.0)
        trust = between / np.maximum(between + sampling, 1e-300)
        spread = np.maximum(common + trust * (raw - common), 0.0)
        # clients with a small spread determine the common optimum best (the teacher's weights of Theorem 4.2)
        weights = 1 / np.maximum(spread + per_weight / 2, 1e-300)
    return np.asarray(spread)


def resampled(
    clients: int, statistics: Callable[[Ints], Sequence[float]], *, draws: int = 400, seed: int = 0
) -> Floats:
    """Return `[draws, statistics]` values of statistics of clients drawn with replacement (bootstrap)."""
    require_counts(clients=clients, draws=draws)
    rng = np.random.default_rng(seed)
    return np.array([statistics(rng.integers(clients, size=clients)) for _ in range(draws)])


def interval(value: float, draws: Floats, level: float = 0.9) -> SpreadInterval:
    """Return the value with the range that holds the middle `level` of the draws."""
    require_share(level=level)
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return SpreadInterval(value, float(min(low, value)), float(max(high, value)))


def _freed(gram: Floats, weights: Floats) -> Floats:
    """Return squared distances d_k `[clients]` of optima from the common one, freed of the error of the others' mean.

    Client k is compared with the mean of the others, with weights q_k. The product of its deviations has the
    expectation `d_k + sum_j q_kj^2 d_j`, a linear system for d.
    """
    shares = np.tile(weights, (len(gram), 1))
    np.fill_diagonal(shares, 0.0)
    shares /= shares.sum(1, keepdims=True)
    deviation = np.eye(len(gram)) - shares
    product = np.einsum("ki,ij,kj->k", deviation, gram, deviation)
    return np.asarray(np.linalg.solve(np.eye(len(gram)) + shares**2, product))
