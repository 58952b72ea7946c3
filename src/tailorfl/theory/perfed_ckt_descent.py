"""PerFed-CKT: SGD on one client's objective while the centroids stay, Theorem 4.1 (arXiv 2109.08119).

    Phi(w) = F_k(w) + lam mean_p ||s(w, x_p) - c_p||^2,    w <- w - eta_t g_t

F_k is the mean cross-entropy of the client's samples, s the softmax outputs on public samples x_p, c_p a fixed centroid
and g_t an unbiased estimate of the gradient. With rates whose sum diverges and whose squares' sum does not, the mean
of ||grad Phi||^2 weighted by eta_t goes to 0; with a constant rate it stays at the noise of the batches. Here the model
is a softmax regression, with gradients written out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    """One client's objective: own `x` [n, d] and `y` [n, classes], `public` [P, d] with `centroid` [P, classes]."""

    x: Floats
    y: Floats
    public: Floats
    centroid: Floats
    lam: float

    def gradient(self, w: Floats, own: NDArray[np.int64], seen: NDArray[np.int64]) -> Floats:
        """The gradient at `w` [d, classes], of rows `own` and public rows `seen`."""
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
    """A client with noisy labels of three classes and a centroid that is another model's opinion."""
    rng = np.random.default_rng(seed)
    truth, other = rng.standard_normal((2, 4, 3))
    x, seen = rng.standard_normal((samples, 4)), rng.standard_normal((public, 4))
    labels = (x @ truth + rng.gumbel(size=(samples, 3))).argmax(1)
    return Task(x, np.eye(3)[labels], seen, softmax(seen @ other), lam)


def squared_norms(
    task: Task, steps: int, rate: Callable[[int], float], batch: int = 4, seed: int = 0
) -> tuple[Floats, Floats]:
    """Returns (rates, ||grad Phi||^2 of all samples before each step), [steps], of SGD from zero weights."""
    rng, w = np.random.default_rng(seed), np.zeros((task.x.shape[1], task.y.shape[1]))
    everything = np.arange(len(task.x)), np.arange(len(task.public))
    rates, norms = np.empty(steps), np.empty(steps)
    for t in range(steps):
        rates[t], norms[t] = rate(t), (task.gradient(w, *everything) ** 2).sum()
        own, seen = rng.integers(len(task.x), size=batch), rng.integers(len(task.public), size=batch)
        w = w - rates[t] * task.gradient(w, own, seen)
    return rates, norms
