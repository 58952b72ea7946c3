"""Stacks of models and choices among them: the best on validation samples, weights of mixtures, mixtures themselves.

Weights come from distances or are minima over the simplex.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.training import tree

Matrix = NDArray[np.float64]
LEAST = 1e-3
"""A smaller weight becomes 0."""


def best_of(client: Client, models: list[TensorDict]) -> TensorDict:
    """Return the model with the lowest loss on the client's validation part, the first of equals."""
    best = models[0]
    if len(models) == 1:
        return best
    lowest = client.loss(best, "val")
    for model in models[1:]:
        loss = client.loss(model, "val")
        best, lowest = tree.choose(loss < lowest, model, best), torch.minimum(loss, lowest)
    return best


def mix(alpha: Tensor, v: TensorDict, w: TensorDict) -> TensorDict:
    """Return α v + (1 − α) w for two sets of parameters."""
    return v * alpha + w * (1 - alpha)


def mixing_weights(variance: Tensor, moment: Tensor) -> Tensor:
    """Return FedPAC's weights β [m, m] float64, row i for client i; rows sum to 1.

    `variance` [m] is V and `moment` [m, C, d_z] is M. Row i minimises βᵀ(diag V + G)β with
    G_jk = Σ_c ⟨M_i[c] − M_j[c], M_i[c] − M_k[c]⟩.
    """
    # A client of a deployment may send a negative V, with which there is no minimum.
    v, flat = variance.double().clamp(min=0).numpy(), moment.double().flatten(1).numpy()
    gram = flat @ flat.T
    rows = []
    for i in range(len(v)):
        g = gram[i, i] - gram[i][None, :] - gram[i][:, None] + gram
        beta = least_quadratic(np.diag(v) + (g + g.T) / 2)
        beta = np.where(beta < min(LEAST, beta.max()), 0.0, beta)  # of a thousand clients all may be small
        rows.append(beta / beta.sum())
    return torch.from_numpy(np.stack(rows))


def least_quadratic(a: Matrix) -> Matrix:
    """Return argmin βᵀAβ over the simplex for a positive semi-definite A [m, m].

    x = argmin over x ≥ 0 of xᵀAx − 2·1ᵀx meets the conditions of β up to its scale, and is non-negative least squares.
    If there are several minima, it is the one of least norm, up to 10⁻¹² of the size of A.
    """
    from scipy.optimize import nnls

    size = float(np.trace(a)) / len(a)
    if size <= 0:
        return np.full(len(a), 1 / len(a))
    lower = np.linalg.cholesky(a / size + 1e-12 * np.eye(len(a)))
    x, _ = nnls(lower.T, np.linalg.solve(lower, np.ones(len(a))))
    return np.asarray(x / x.sum())


def on_simplex(point: Tensor) -> Tensor:
    """Return the nearest point of the simplex to `point` [N]: max(point − t, 0) with the t that makes it sum to 1."""
    falling = point.sort(descending=True).values
    excess = (falling.cumsum(0) - 1) / torch.arange(1, len(point) + 1, dtype=point.dtype)
    threshold = excess[int((falling > excess).sum()) - 1]
    return (point - threshold).clamp(min=0.0)


def squared_gaps(models: TensorDict, rows: Tensor) -> Tensor:
    """Return ‖w_i − w_j‖² of the models at `rows` [m] and all N of a stack [N, ...], [m, N] float64."""
    flats = _flat(models)
    gaps = torch.zeros(len(rows), len(flats[0]), dtype=torch.float64)
    for flat in flats:
        for k, i in enumerate(rows.tolist()):
            gaps[k] += (flat - flat[i]).square().sum(1)
    return gaps


def cosines(models: TensorDict, rows: Tensor) -> Tensor:
    """Return cos(w_i, w_j) of the models at `rows` [m] and all N of a stack [N, ...], [m, N] float64; 0 for w = 0."""
    flats = _flat(models)
    inner = torch.zeros(len(rows), len(flats[0]), dtype=torch.float64)
    square = torch.zeros(inner.shape[1], dtype=torch.float64)
    for flat in flats:
        # One by one: the rounding of a matrix product depends on the number of rows.
        for k, i in enumerate(rows.tolist()):
            inner[k] += flat @ flat[i]
        square += flat.square().sum(1)
    size = square.sqrt()
    return inner / (size[rows][:, None] * size[None, :]).clamp(min=torch.finfo(torch.float64).tiny)


def mixed(models: TensorDict, weights: Tensor) -> TensorDict:
    """Return Σ_j weights[i, j] · model j of a stack [N, ...] for every row, [m, ...]; counters are the first model's.

    Each row is the same to the bit, whatever the others are.
    """
    rows = [tree.weighted_mean(models, row) for row in weights]
    return TensorDict(
        {n: torch.stack([row[n] for row in rows]) for n in tree.tensors(models)}, batch_size=[len(rows)]
    )


def copies(model: TensorDict, count: int) -> TensorDict:
    """Return a stack of `count` copies of a model, [count, ...]."""
    return TensorDict({n: t.expand(count, *t.shape).clone() for n, t in tree.tensors(model).items()})


def replaced(models: TensorDict, rows: Tensor, new: TensorDict | Mapping[str, Tensor]) -> TensorDict:
    """Return a stack [N, ...] with the models `new` [m, ...], which may have more tensors, at `rows` [m]."""
    return TensorDict({n: t.index_copy(0, rows, new[n]) for n, t in tree.tensors(models).items()})


def _flat(models: TensorDict) -> list[Tensor]:
    """Return the tensors of a stack as matrices [N, scalars] float64."""
    return [t.double().reshape(len(t), -1) for t in tree.tensors(models).values()]
