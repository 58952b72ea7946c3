"""Maximum mean discrepancy of two sets of features of one batch, by Gaussian kernels (Gretton et al., JMLR 2012).

    MMD²(Z, Y) = mean K(z, z') + mean K(y, y') − 2 mean K(z, y)      over all pairs, the diagonal too

Padding has no share in any mean.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LEAST = 1e-8
"""Added to the mean squared distance, so that features that are all equal are no division by 0."""


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return ‖a_i − b_j‖², [rows of a, rows of b], of [rows, width] each: exactly 0 where they are equal."""
    return (a[:, None, :] - b[None, :, :]).square().sum(-1)


def shares(rows: Tensor, weight: Tensor | None) -> Tensor:
    """Return what each sample counts in a mean, [rows], from 1 for real samples and 0 for padding, None: all real."""
    if weight is None:
        return torch.full_like(rows[:, 0], 1.0 / max(len(rows), 1))
    return weight.to(rows.dtype) / weight.sum().clamp(min=1.0)


def mmd(z: Tensor, y: Tensor, weight: Tensor | None, kernel: Callable[[Tensor], Tensor]) -> Tensor:
    """Return MMD² of features z and y [batch, width], 0-d; `kernel` is a function of squared distances."""
    share = shares(z, weight)

    def mean(a: Tensor, b: Tensor) -> Tensor:
        return (share[:, None] * share * kernel(squared_distances(a, b))).sum()

    return mean(z, z) + mean(y, y) - 2 * mean(z, y)


def mmd_by_mean_distance(z: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Return MMD² with Σ_k exp(−d²/(b 2^{k−2})), k = 0..4, and b the mean d² of pairs, without its gradient.

    The pairs are those of two different rows of the joint batch. With one sample a side b would be d² itself and the
    slope grow without bound as the two come together, so MMD² is 0 there.
    """
    share = shares(z, weight)
    samples = z.new_tensor(len(z)) if weight is None else weight.sum().to(z.dtype)
    both, of_both = torch.cat([z, y]).detach(), torch.cat([share, share]) / 2
    mean_with_itself = (of_both[:, None] * of_both * squared_distances(both, both)).sum()
    b = mean_with_itself * (2 * samples / (2 * samples - 1)) + LEAST

    def kernel(square: Tensor) -> Tensor:
        return torch.stack([torch.exp(-square / (b * 2.0 ** (k - 2))) for k in range(5)]).sum(0)

    return torch.where(samples > 1, mmd(z, y, weight, kernel), 0.0)
