"""Random quadratics with a known coupled optimum, in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Quadratics:
    """`F_i(v) = 0.5 (v - c_i)' H_i (v - c_i)`, one a client, pulled to w by `(lam/2) ||v - w||^2`."""

    H: Floats  # [clients, dim, dim]
    c: Floats  # [clients, dim]
    lam: float

    @property
    def local_inverse(self) -> Floats:
        inverse: Floats = np.linalg.inv(self.H + self.lam * np.eye(self.H.shape[-1])).astype(np.float64)
        return inverse

    def prox(self, w: Floats) -> Floats:
        """`[clients, dim]` every client's exact answer to w."""
        right = np.einsum("kij,kj->ki", self.H, self.c) + self.lam * w
        answers: Floats = np.einsum("kij,kj->ki", self.local_inverse, right)
        return answers

    def optimum(self) -> tuple[Floats, Floats]:
        """w* `[dim]` and v* `[clients, dim]`: w* is the mean of its own answers."""
        pull = np.einsum("kij,kjl->kil", self.local_inverse, self.H)
        w = np.linalg.solve(pull.mean(0), np.einsum("kij,kj->ki", pull, self.c).mean(0))
        return w, self.prox(w)


def draw(seed: int, mu: float, smoothness: float, lam: float, clients: int = 4, dim: int = 3) -> Quadratics:
    """Quadratics in random bases whose eigenvalues include `mu` and `smoothness`."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((clients, dim, dim)))[0]
    eigenvalues = rng.uniform(mu, smoothness, (clients, dim))
    eigenvalues[:, 0], eigenvalues[:, -1] = mu, smoothness
    H = np.einsum("kij,kj,klj->kil", basis, eigenvalues, basis)
    return Quadratics(H, 3 * rng.standard_normal((clients, dim)), lam)
