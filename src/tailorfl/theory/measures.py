"""Gradient noise and curvature at the pilot's models.

rho^2   E ||grad of one sample - grad of its client||^2 at the client's own optimum. At the model of one half,
        it is too small on that half, whose noise the model has fitted, and too large on the other half; for
        least squares by factors `1 - d/m` and `1/(1 - d/m)` (m samples in a half), which cancel in the
        geometric mean of the two
L, mu   largest and smallest curvature: of the mean loss of all clients, which is closest to the population's;
        of every client's own loss, which limits step sizes and varies more by chance with few samples
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tailorfl.partition.rows import Ints, spread_indices
from tailorfl.theory.objective import Objective
from tailorfl.theory.pilot import DENSE, Pilot
from tailorfl.theory.spread import Floats

FLAT = 1e-6
"""Curvature below this share of the largest counts as none: directions that no sample determines."""
SCALARS = 2e7
"""Largest number of scalars in the per-sample gradients that are held at once."""
ROWS = 256
"""Samples per client on which curvature is measured if the whole Hessian is too large to compute."""


@dataclass(frozen=True)
class Curvature:
    """Curvature of the losses at the pilot's reference; NaN if it has no meaning or cannot be computed."""

    smoothness: float
    """L of the mean loss of all clients."""
    mu: float
    """Smallest curvature of the same loss, apart from flat directions."""
    client_smoothness: float
    """Largest L of any client's loss."""
    client_mu: float
    """Smallest curvature of any client's loss in the directions that all clients together determine."""
    trace: float
    """Sum of all curvatures of the mean loss; divided by `rank` their mean."""
    flat: int
    """Number of directions without curvature for any client: no loss changes and no method moves along them."""


def gradient_noise(pilot: Pilot) -> Floats:
    """Return rho^2 of every client, `[N]`.

    A loss that compares samples (Cox) has no per-sample gradients; rho^2 then comes from the halves'
    gradients at the mean of both models, `m ||g_a - g_b||^2 / 2` with m samples each.
    """
    out = []
    for first, second, (half, second_half) in zip(*pilot.models, pilot.halves, strict=True):
        if pilot.objective.separable:
            inside = [_scatter(pilot.objective, first, half), _scatter(pilot.objective, second, second_half)]
            across = [_scatter(pilot.objective, first, second_half), _scatter(pilot.objective, second, half)]
            out.append(math.sqrt(sum(inside) / 2 * sum(across) / 2))
        else:
            middle = (first + second) / 2
            gap = pilot.objective.gradient(middle, half) - pilot.objective.gradient(middle, second_half)
            out.append(float(gap.square().sum()) / (1 / len(half) + 1 / len(second_half)))
    return np.array(out)


def curvature(pilot: Pilot, *, steps: int = 30, probes: int = 8, seed: int = 0) -> Curvature:
    """Return the curvature of the losses at the reference.

    It comes from whole Hessians up to 256 weights; above, L from Lanczos' method with `steps` products, and the
    trace from Hutchinson's with `probes` random ones. mu is then unknown; without a convex loss it has no meaning.
    """
    at, objective = pilot.reference, pilot.objective
    if objective.size <= DENSE:
        hessians = torch.stack([objective.hessian(at, rows).double() for rows in pilot.rows])
        values, vectors = torch.linalg.eigh(hessians.mean(0))
        determined = values > FLAT * float(values[-1])
        inside = vectors[:, determined]
        projected = torch.linalg.eigvalsh(inside.mT @ hessians @ inside)
        convex = objective.affine
        return Curvature(
            smoothness=float(values[-1]),
            mu=float(values[determined][0]) if convex else float("nan"),
            client_smoothness=float(projected[:, -1].max()),
            client_mu=max(float(projected[:, 0].min()), 0.0) if convex else float("nan"),
            trace=float(values.sum()),
            flat=int((~determined).sum()) if convex else 0,
        )
    rng = torch.Generator().manual_seed(seed)
    some = [rows[torch.randperm(len(rows), generator=rng)[:ROWS].numpy()] for rows in pilot.rows]
    pooled = np.concatenate([rows[: max(1, ROWS * 4 // len(some))] for rows in some])
    trace = 0.0
    for _ in range(probes):
        signs = torch.randint(0, 2, at.shape, generator=rng).to(at) * 2 - 1
        trace += float(signs @ objective.along(at, pooled, signs)) / probes
    return Curvature(
        smoothness=_largest(objective, at, pooled, steps, rng),
        mu=float("nan"),
        client_smoothness=max(_largest(objective, at, rows, max(steps // 2, 5), rng) for rows in some[:8]),
        client_mu=float("nan"),
        trace=trace,
        flat=0,
    )


def _largest(objective: Objective, at: Tensor, rows: Ints, steps: int, rng: torch.Generator) -> float:
    """Return the largest eigenvalue of the Hessian by Lanczos' method; it is never above the true one."""
    direction = torch.randn(at.shape, generator=rng, dtype=at.dtype)
    direction /= direction.norm()
    basis: list[Tensor] = [direction]
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    for _ in range(min(steps, len(at))):
        image = objective.along(at, rows, basis[-1])
        diagonal.append(float(image @ basis[-1]))
        for _ in range(2):  # twice is enough to stay orthogonal despite rounding
            for vector in basis:
                image = image - (image @ vector) * vector
        length = float(image.norm())
        if length < 1e-6 * max(abs(diagonal[0]), 1e-12):
            break
        off_diagonal.append(length)
        basis.append(image / length)
    size = len(diagonal)
    small = np.diag(diagonal) + np.diag(off_diagonal[: size - 1], 1) + np.diag(off_diagonal[: size - 1], -1)
    return float(np.linalg.eigvalsh(small)[-1])


def _scatter(objective: Objective, theta: Tensor, rows: Ints) -> float:
    """Return the mean squared distance of n per-sample gradients from their mean, with n - 1 degrees of freedom."""
    if len(rows) < 2:
        return 0.0
    some = spread_indices(len(rows), max(2, int(SCALARS // objective.size)))  # the first may be of one class
    gradients = objective.sample_gradients(theta, rows[some])
    return float((gradients - gradients.mean(0)).square().sum()) / (len(gradients) - 1)


def prediction_ratio(pilot: Pilot, x: Tensor) -> float:
    """Return the squared distance of the clients' weights from the mean model, over that of predictions on `x`.

    It turns a pull on weights, `(lam/2) ||v - w||^2`, into PerFed-CKT's on predictions, `lam mean_x ||s - s~||^2`,
    whose lam is half this ratio times as large. Predictions are class probabilities, or the outputs of a
    regression. NaN if all clients predict the same.
    """
    models, objective = pilot.models[0], pilot.objective
    centre = models.mean(0)
    softmax = objective.source.task == "classification"

    def predict(theta: Tensor) -> Tensor:
        outputs = objective.model(objective.tensors(theta), objective.cast(x))
        return outputs.softmax(-1) if softmax else outputs

    with torch.no_grad():
        middle = predict(centre)
        weights = float((models - centre).square().sum())
        predictions = sum(float((predict(m) - middle).square().sum(-1).mean()) for m in models)
    return weights / predictions if predictions > 0 else float("nan")


def gain_of_own(pilot: Pilot) -> Floats:
    """Return the loss of the mean model minus that of each client's own on the half it was not trained on, `[N]`."""
    objective = pilot.objective
    means = [side.mean(0) for side in pilot.models]
    out = []
    with torch.no_grad():
        for first, second, (half, second_half) in zip(*pilot.models, pilot.halves, strict=True):
            a, b = objective.samples(half), objective.samples(second_half)
            gain = objective.value(means[0], *b) - objective.value(first, *b)
            gain += objective.value(means[1], *a) - objective.value(second, *a)
            out.append(float(gain) / 2)
    return np.array(out)
