"""Distances between the features of two models on the same batch: a pull by such a distance, and MMD².

The pull is a term of the local loss that keeps a model's features close to those of a fixed one.

    λ · D(z, z^g),   z = Φ(p; x) of the model in training, z^g = Φ(centre; x) of the fixed one, on the same batch

| distance | D |
|---|---|
| mean_l2 | mean over samples of ‖z_b − z_b^g‖ |
| batch_l2 | ‖Z − Z^g‖ (Frobenius) of every run of `micro_batch` samples, mean over the runs; FedOA's released code |
| cosine | mean over samples of 1 − cos(z_b, z_b^g) |
| pearson | mean over samples of 1 − corr(z_b, z_b^g), the correlation over the feature's entries |
| sdr | mean over samples of |⟨z_b, |z_b^g − mean of z^g|⟩|, the absolute values of the vector by entry; FedSDR |

The centre is in evaluation mode and no gradient flows through it. A norm has no gradient at 0; there it is set to 0, so
that D of equal features does not move them.

MMD is the maximum mean discrepancy of two sets of features of one batch, with Gaussian kernels (Gretton et al., JMLR
2012). Padding does not count in any mean.

    MMD²(Z, Y) = mean K(z, z') + mean K(y, y') − 2 mean K(z, y)      over all pairs, the diagonal too
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F

from tailorfl.training.objective import Seen, Term, mean_of

Distance = Literal["mean_l2", "batch_l2", "cosine", "pearson", "sdr"]
TOGETHER: tuple[Distance, ...] = ("batch_l2", "sdr")
"""Distances that combine samples: not a mean of terms of one sample each, which sample-level privacy needs."""
LEAST = 1e-8
"""Added to the mean squared distance, so that features that are all equal cause no division by 0."""


def feature_pull(strength: float, distance: Distance, centre: TensorDict, micro_batch: int = 8) -> Term:
    """Return the term λ·D.

    Args:
        strength: λ.
        distance: D, see the table.
        centre: a whole model state, one for all clients or each client's own.
        micro_batch: samples per norm of batch_l2.
    """

    def pull(batch: Seen, centre: TensorDict) -> Tensor:
        _, fixed = batch.of(centre)
        return strength * distance_of(batch.features, fixed, batch.weight, distance, micro_batch)

    return Term(pull, given=(centre,), mixes=distance in TOGETHER)


def distance_of(
    z: Tensor, fixed: Tensor, weight: Tensor | None, distance: Distance, micro_batch: int = 8
) -> Tensor:
    """Return D of features [batch, width], 0-d; `weight` [batch] is 0 for padding."""
    match distance:
        case "mean_l2":
            return mean_of(_norm((z - fixed).square().sum(1)), weight)
        case "batch_l2":
            return _by_micro_batch((z - fixed).square().sum(1), weight, micro_batch)
        case "cosine":
            return mean_of(1.0 - F.cosine_similarity(z, fixed, dim=1), weight)
        case "pearson":
            inner, outer = z - z.mean(1, keepdim=True), fixed - fixed.mean(1, keepdim=True)
            return mean_of(1.0 - F.cosine_similarity(inner, outer, dim=1), weight)
        case "sdr":
            mean = fixed.mean(0)
            if weight is not None:
                mean = (fixed * weight[:, None]).sum(0) / weight.sum().clamp(min=1)
            return mean_of((z * (fixed - mean).abs()).sum(1).abs(), weight)


def _by_micro_batch(squares: Tensor, weight: Tensor | None, micro_batch: int) -> Tensor:
    """Return the mean over runs of `micro_batch` samples of the root of their sum; runs of padding do not count."""
    present = torch.ones_like(squares) if weight is None else weight
    padding = -len(squares) % micro_batch
    runs = F.pad(squares * present, (0, padding)).reshape(-1, micro_batch).sum(1)
    counted = (F.pad(present, (0, padding)).reshape(-1, micro_batch).sum(1) > 0).to(squares.dtype)
    return mean_of(_norm(runs), counted)


def _norm(square: Tensor) -> Tensor:
    """Return the root, with gradient 0 at 0."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return ‖a_i − b_j‖², [rows of a, rows of b], of [rows, width] each: exactly 0 for equal rows."""
    return (a[:, None, :] - b[None, :, :]).square().sum(-1)


def shares(rows: Tensor, weight: Tensor | None) -> Tensor:
    """Return each sample's weight in a mean, [rows], from 1 for real samples and 0 for padding, None: all real."""
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

    The pairs are those of two different rows of the joint batch. With one sample per side b would be d² itself, and the
    gradient would grow without bound as the two approach each other, so MMD² is then 0.
    """
    share = shares(z, weight)
    samples = z.new_tensor(len(z)) if weight is None else weight.sum().to(z.dtype)
    both, of_both = torch.cat([z, y]).detach(), torch.cat([share, share]) / 2
    mean_with_itself = (of_both[:, None] * of_both * squared_distances(both, both)).sum()
    b = mean_with_itself * (2 * samples / (2 * samples - 1)) + LEAST

    def kernel(square: Tensor) -> Tensor:
        return torch.stack([torch.exp(-square / (b * 2.0 ** (k - 2))) for k in range(5)]).sum(0)

    return torch.where(samples > 1, mmd(z, y, weight, kernel), 0.0)
