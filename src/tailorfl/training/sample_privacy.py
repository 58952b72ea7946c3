"""Sample-level differential privacy of a training step (DP-SGD, Abadi et al., CCS 2016).

    g = (1/B) ( Σ_b clip(g_b, C) + N(0, σ²C²) ),   clip(g, C) = g · min(1, C/‖g‖₂), 0 if g is not finite

Two data sets are neighbours if they are equal, except that one sample contributes nothing in one of them ("zero-out":
the number of a client's samples is public), so the sum changes by at most C. `sampling` defines a batch:

| `sampling` | a batch | B | cost of ⌈n/B⌉ batches for a sample |
|---|---|---|---|
| `poisson` | each sample independently with probability q = B/n | qn | ⌈n/B⌉ Gaussian mechanisms, sampled at rate q |
| `shuffle` | the next samples of a random order | its size | one Gaussian mechanism: it is in only one of the batches |

Noise is drawn from the client's key, so every engine adds the same noise. Every gradient of a round has its own noise,
and every fit its own batches. The privacy spent is in the ledger (`tailorfl.privacy`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from tailorfl.errors import ConfigError, ModelError, check_known
from tailorfl.models.dropout import fold_key
from tailorfl.settings.train import BatchSampling
from tailorfl.training.objective import Loss, Term

LossOf = Callable[
    [dict[str, Tensor], Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, dict[str, Tensor]]
]
"""(values, x, y, weight, dropout key) -> (loss, buffers after the pass)."""


@dataclass(frozen=True)
class ClippedNoise:
    """A bound on a norm, and noise in units of it.

    Raises:
        ConfigError: the clip is not positive, the noise negative, or the clip infinite and the noise, a multiple of
            it, not 0.
    """

    clip: float
    noise: float

    def __post_init__(self) -> None:
        if not (self.clip > 0 and self.noise >= 0):
            raise ConfigError(
                f"privacy needs a positive clip and noise of at least 0; got clip = {self.clip}, noise = {self.noise}"
            )
        if math.isinf(self.clip) and self.noise > 0:
            raise ConfigError(
                f"privacy noise is a multiple of the clip, so clip = {self.clip} needs noise = 0; got noise = "
                f"{self.noise}"
            )


@dataclass(frozen=True)
class SampleDP(ClippedNoise):
    """Clips every sample's gradient to `clip` and adds noise of deviation `noise`·`clip` to a batch's sum."""

    sampling: BatchSampling
    own: tuple[float, ...] = ()
    """σ of every client, by id, instead of `noise` if they differ; `noise` is then the largest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("sampling of batches", self.sampling, get_args(BatchSampling))

    def noise_of(self, client: int) -> float:
        """Return σ of one client."""
        return self.own[client] if client < len(self.own) else self.noise


class GradientRelease(NamedTuple):
    """The release of a private batch's sum as a gradient: (Σ + σC·Z)/B."""

    noise: Tensor
    """σ, [clients] or 0-d for one client."""
    size: Tensor | None = None
    """B, [clients] or 0-d: the expected size of a Poisson batch; None takes each batch's actual size."""

    def of(self, which: int | slice | Tensor) -> GradientRelease:
        """Return the part of some clients, or one client's."""
        return GradientRelease(self.noise[which], None if self.size is None else self.size[which])


def normal(key: Tensor, number: int, shape: torch.Size) -> Tensor:
    """Return standard normal noise, a function of (key, number), float32 of `shape`."""
    count = shape.numel()
    words = fold_key(fold_key(key, number), torch.arange(1, 2 * count + 1, device=key.device))
    return box_muller(words[:count], words[count:]).to(torch.float32).reshape(shape)


def box_muller(radii: Tensor, angles: Tensor) -> Tensor:
    """Return standard normal numbers made from random int64 words of equal shape, float64 (Box and Muller, 1958).

    Both uniforms have 53 bits, the precision of a float64. The smallest is 2^-53, so no number exceeds sqrt(106 ln 2) =
    8.57, beyond which the normal distribution has a probability of 1e-17.
    """
    bits = 53
    radius, angle = (((w >> (64 - bits)) & ((1 << bits) - 1)).to(torch.float64) for w in (radii, angles))
    uniform = (radius + 1.0) / float(1 << bits)  # in (0, 1]
    return (-2.0 * uniform.log()).sqrt() * (angle * (2.0 * math.pi / (1 << bits))).cos()


def check_separable(loss: Loss, batch_buffers: Collection[str], terms: Sequence[Term] = ()) -> None:
    """Check that a batch's loss is a mean over single samples, as clipping per sample needs.

    Raises:
        ModelError: training updates batch statistics (`batch_buffers`), the loss or a term compares samples, or a term
            keeps tensors.
    """
    if batch_buffers:
        raise ModelError(
            f"sample-level privacy cannot train batch norm ('{next(iter(batch_buffers))}' mixes samples); "
            "use group norm, or leave the norm layers out of training"
        )
    if loss.mixes:
        raise ModelError(
            "sample-level privacy cannot use a loss that compares the samples of a batch, as the Cox loss does"
        )
    if any(term.keeps for term in terms):
        raise ModelError(
            "sample-level privacy cannot use a term that keeps values of a batch, such as a running mean, since no "
            "noise covers them; leave the term out, or use client-level privacy"
        )
    if any(term.mixes for term in terms):
        raise ModelError(
            "sample-level privacy cannot use a term of the loss that compares the samples of a batch; use a mean over "
            "samples, or client-level privacy"
        )


def private_gradient(
    loss_of: LossOf,
    values: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    dp: SampleDP,
    noise: Tensor,
    masks: Tensor,
    release: GradientRelease | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the private gradient of the mean loss and the (not private) mean loss of the batch.

    `x` [batch, ...], `y` [batch, ...]; samples with `weight` 0 are padding. A gradient that is not finite counts as
    zero, so that it is not revealed. `noise` is the key of the noise and must differ for every released gradient;
    `masks` is the key of dropout, from which each sample's key is derived; both int64 0-d. `release` is that of this
    client; without it σ is that of `dp`, and B the size of the batch.
    """

    def of_sample(x: Tensor, y: Tensor, mask: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        gradient, (value, _) = grad_and_value(loss_of, has_aux=True)(values, x[None], y[None], None, mask)
        return gradient, value

    gradients, losses = vmap(of_sample)(x, y, fold_key(masks, torch.arange(x.shape[0], device=masks.device)))
    present = torch.ones_like(losses) if weight is None else weight
    rows = [g.reshape(x.shape[0], -1) for g in gradients.values()]
    norms = torch.stack([row.square().sum(1) for row in rows]).sum(0).sqrt()
    usable = norms.isfinite() & (present > 0)
    factor = torch.where(usable, (dp.clip / norms.clamp(min=1e-12)).clamp(max=1.0), 0.0)
    count = present.sum().clamp(min=1.0)
    size = count if release is None or release.size is None else release.size
    sigma = dp.noise if release is None else release.noise
    out = {}
    for number, (name, g) in enumerate(gradients.items()):
        # 0 · ∞ is NaN, so gradients that are not finite are set to zero before weighting.
        counted = torch.where(usable.reshape(-1, *(1,) * (g.ndim - 1)), g, 0.0)
        total = torch.tensordot(factor, counted, dims=1)
        if dp.noise > 0:
            total = total + normal(noise, number, total.shape) * (sigma * dp.clip)
        out[name] = total / size
    return out, torch.where(present > 0, losses, 0.0).sum() / count
