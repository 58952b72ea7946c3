"""Formulas of PerFed-CKT (arXiv 2109.08119) that only claims and studies need.

The error of any transfer between linear models (Theorem 4.2, symbols as in `tailorfl.theory.perfed_ckt`), what a run
transmits (the cost column of the CIFAR-10 tables), and Theorem 4.1: SGD on one client's objective while the centroids
stay.

    Phi(w) = F_k(w) + lam mean_p ||s(w, x_p) - c_p||^2,    w <- w - eta_t g_t

F_k is the mean cross-entropy of the client's samples, s the softmax outputs on public samples x_p, c_p a fixed centroid
and g_t an unbiased estimate of the gradient. With rates whose sum diverges and whose squares' sum does not, the mean
of ||grad Phi||^2 weighted by eta_t goes to 0; with a constant rate it stays at the noise of the batches. Here the model
is a softmax regression, with gradients written out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailorfl.errors import ConfigError, unknown
from tailorfl.theory.checks import require_counts, require_not_negative
from tailorfl.theory.perfed_ckt import variances

Floats = NDArray[np.float64]
CostMethod = Literal["fedavg", "hypcluster", "fedfomo", "perfed_ckt"]
VGG11_SCALARS = 9_756_426
"""Weights of the VGG-11 with batch norm and a 512-512-512-10 head, the model of the printed costs."""
PREDICTION_SCALARS = 20_000
"""Class probabilities of 2000 public samples and 10 classes."""


@dataclass(frozen=True)
class Cost:
    """Scalars of a whole run; a payload sent down to several clients in a round counts once (multicast)."""

    up: int
    down: int

    @property
    def total(self) -> int:
        """Both directions."""
        return self.up + self.down


def transfer_mse(
    beta: float, sigma2: float, nu: float, v2: Sequence[float], client: int, lam: float, alpha: ArrayLike
) -> float:
    """Return expected squared error of one coordinate of `client`'s estimate for any `lam` and `alpha`.

    Args:
        beta, sigma2, nu, v2: as in `best_transfer`.
        client: index into v2.
        lam: strength of the pull, not negative.
        alpha: `[clients]` weights of the estimates in the centre; they must sum to 1, or the error would
            depend on theta.

    Raises:
        ConfigError: for numbers as in `best_transfer`, an unknown client or alpha that does not fit.
    """
    spread, _ = variances(beta, sigma2, nu, v2)
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


@dataclass(frozen=True)
class Task:
    """One client's objective: own `x` [n, d] and `y` [n, classes], `public` [P, d] with `centroid` [P, classes]."""

    x: Floats
    y: Floats
    public: Floats
    centroid: Floats
    lam: float

    def gradient(self, w: Floats, own: NDArray[np.int64], seen: NDArray[np.int64]) -> Floats:
        """Return the gradient at `w` [d, classes], of rows `own` and public rows `seen`."""
        x, public = self.x[own], self.public[seen]
        fit = x.T @ (softmax(x @ w) - self.y[own]) / len(own)
        s = softmax(public @ w)
        apart = s - self.centroid[seen]
        outputs = 2 * s * (apart - (s * apart).sum(1, keepdims=True))
        return np.asarray(fit + self.lam * public.T @ outputs / len(seen))


def softmax(z: Floats) -> Floats:
    """Class probabilities of outputs [rows, classes]."""
    e = np.exp(z - z.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def example(seed: int = 0, samples: int = 60, public: int = 40, lam: float = 2.0) -> Task:
    """Return a client with noisy labels of three classes and a centroid that is another model's opinion."""
    rng = np.random.default_rng(seed)
    truth, other = rng.standard_normal((2, 4, 3))
    x, seen = rng.standard_normal((samples, 4)), rng.standard_normal((public, 4))
    labels = (x @ truth + rng.gumbel(size=(samples, 3))).argmax(1)
    return Task(x, np.eye(3)[labels], seen, softmax(seen @ other), lam)


def squared_norms(
    task: Task, steps: int, rate: Callable[[int], float], batch: int = 4, seed: int = 0
) -> tuple[Floats, Floats]:
    """Return (rates, ||grad Phi||^2 of all samples before each step), [steps], of SGD from zero weights."""
    rng, w = np.random.default_rng(seed), np.zeros((task.x.shape[1], task.y.shape[1]))
    everything = np.arange(len(task.x)), np.arange(len(task.public))
    rates, norms = np.empty(steps), np.empty(steps)
    for t in range(steps):
        rates[t], norms[t] = rate(t), (task.gradient(w, *everything) ** 2).sum()
        own, seen = rng.integers(len(task.x), size=batch), rng.integers(len(task.public), size=batch)
        w = w - rates[t] * task.gradient(w, own, seen)
    return rates, norms
