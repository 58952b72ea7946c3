"""Sample-level differential privacy of a training step (DP-SGD, Abadi et al., CCS 2016).

    g = (1/B) ( Σ_b clip(g_b, C) + N(0, σ²C²) ),   clip(g, C) = g · min(1, C/‖g‖₂), 0 where g is not finite

Neighbours are two data sets in one of which one sample contributes nothing, all else being equal ("zero-out": how many
samples a client has is public), so the sum changes by C at most. `sampling` says what a batch is:

| `sampling` | a batch | B | what ⌈n/B⌉ batches cost a sample |
|---|---|---|---|
| `poisson` | each sample by itself with probability q = B/n | qn | as many Gaussian mechanisms, sampled with rate q |
| `shuffle` | the next ones of a random order | its size | one Gaussian mechanism: it is in one batch, whichever |

Noise is drawn from the client's key, so every engine adds the same noise; every gradient of a round has noise
of its own, and every training batches of its own. What was spent is in the ledger (`tailorfl.privacy`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from tailorfl.errors import ConfigError, ModelError
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
        ConfigError: the clip is infinite, and the noise is a multiple of it.
    """

    clip: float
    noise: float

    def __post_init__(self) -> None:
        if math.isinf(self.clip) and self.noise > 0:
            raise ConfigError(
                f"privacy noise is a multiple of the clip, so clip = {self.clip} goes with noise = 0 only; got noise = "
                f"{self.noise}"
            )


@dataclass(frozen=True)
class SampleDP(ClippedNoise):
    """Clips every sample to `clip` and adds Gaussian noise of deviation `noise`·`clip` to a batch's sum."""

    sampling: BatchSampling
    own: tuple[float, ...] = ()
    """σ of every client, by id, in place of `noise` where they differ; `noise` is then the largest."""

    def noise_of(self, client: int) -> float:
        """Return σ of one client."""
        return self.own[client] if client < len(self.own) else self.noise


class GradientRelease(NamedTuple):
    """The release of the sum over a private batch as a gradient: (Σ + σC·Z)/B."""

    noise: Tensor
    """σ, [clients] or of one client 0-d."""
    size: Tensor | None = None
    """B, [clients] or 0-d: what is expected of the size of a Poisson batch; None takes each batch's own."""

    def of(self, which: int | slice | Tensor) -> GradientRelease:
        """Return the part of some clients, or one client's."""
        return GradientRelease(self.noise[which], None if self.size is None else self.size[which])


def normal(key: Tensor, number: int, shape: torch.Size) -> Tensor:
    """Return standard normal numbers, a function of (key, number), float32 of `shape`."""
    count = shape.numel()
    words = fold_key(fold_key(key, number), torch.arange(1, 2 * count + 1, device=key.device))
    return box_muller(words[:count], words[count:]).to(torch.float32).reshape(shape)


def box_muller(radii: Tensor, angles: Tensor) -> Tensor:
    """Return the standard normal numbers that random int64 words of equal shape make, float64 (Box and Muller, 1958).

    Both uniforms have the 53 bits that a float64 holds: the smallest is 2^-53, so the numbers end at sqrt(106 ln 2) =
    8.57, beyond which the normal law has a probability of 1e-17.
    """
    bits = 53
    radius, angle = (((w >> (64 - bits)) & ((1 << bits) - 1)).to(torch.float64) for w in (radii, angles))
    uniform = (radius + 1.0) / float(1 << bits)  # in (0, 1]
    return (-2.0 * uniform.log()).sqrt() * (angle * (2.0 * math.pi / (1 << bits))).cos()


def check_separable(loss: Loss, batch_buffers: Collection[str], terms: Sequence[Term] = ()) -> None:
    """Nothing if a batch's loss is a mean of terms that see one sample each, as clipping per sample needs.

    Raises:
        ModelError: the training updates batch statistics (`batch_buffers`), or the loss or a term of it compares
            samples.
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
            "sample-level privacy cannot use a term that keeps something of a batch, such as a running mean, since no "
            "noise covers it; leave the term out, or use client-level privacy"
        )
    if any(term.mixes for term in terms):
        raise ModelError(
            "sample-level privacy cannot use a term of the loss that compares the samples of a batch; use one that is "
            "a mean over samples, or client-level privacy"
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
    zero, whatever else is in the batch: that there was one must not show. `noise` is the key of the noise,
    which must be another one for every gradient that is released; `masks` that of dropout, from which every sample
    gets its own; int64 0-d. `release` is that of this client; without it σ is that of `dp`, and B the batch's own size.
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
        # 0 · ∞ is no number, so what is not finite has to go before it is weighed.
        counted = torch.where(usable.reshape(-1, *(1,) * (g.ndim - 1)), g, 0.0)
        total = torch.tensordot(factor, counted, dims=1)
        if dp.noise > 0:
            total = total + normal(noise, number, total.shape) * (sigma * dp.clip)
        out[name] = total / size
    return out, torch.where(present > 0, losses, 0.0).sum() / count
