"""Sample-level differential privacy of a training step (DP-SGD, Abadi et al., CCS 2016).

    g = (1/B) ( Σ_b clip(g_b, C) + N(0, σ²C²) ),   clip(g, C) = g · min(1, C/‖g‖₂)

Noise is drawn from the client's key, so every engine adds the same noise; every gradient of a round has noise
of its own, and every training batches of its own. What was spent is in the ledger (`tailorfl.core.ledger`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from tailorfl.core.feature_pull import TOGETHER, FeaturePull
from tailorfl.core.objective import Loss, cox
from tailorfl.errors import ConfigError, ModelError
from tailorfl.models.dropout import fold_key

Level = Literal["sample", "client"]
"""What a guarantee hides: one sample of a client, or all of them."""
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


def normal(key: Tensor, number: int, shape: torch.Size) -> Tensor:
    """Returns standard normal numbers, a function of (key, number), float32 of `shape` (Box-Muller)."""
    count = shape.numel()
    stream = fold_key(key, number)
    words = fold_key(stream, torch.arange(1, 2 * count + 1, device=key.device))
    uniform = ((words >> 40) & 0xFFFFFF).to(torch.float64).add(0.5) / float(1 << 24)
    radius = (-2.0 * uniform[:count].log()).sqrt()
    return (radius * (2.0 * math.pi * uniform[count:]).cos()).to(torch.float32).reshape(shape)


def check_separable(loss: Loss, batch_buffers: Collection[str], pull: FeaturePull | None = None) -> None:
    """Nothing if a batch's loss is a mean of terms that see one sample each, as clipping per sample needs.

    Raises:
        ModelError: the training updates batch statistics (`batch_buffers`), or the loss or the `pull` of features
            compares samples.
    """
    if batch_buffers:
        raise ModelError(
            f"sample-level privacy cannot train batch norm ('{next(iter(batch_buffers))}' mixes samples); "
            "use group norm, or leave the norm layers out of training"
        )
    if loss is cox:
        raise ModelError(
            "sample-level privacy cannot use the Cox loss: its terms compare the samples of a batch"
        )
    if pull is not None and pull.distance in TOGETHER:
        raise ModelError(
            f"sample-level privacy cannot use the feature distance {pull.distance}: it sees the samples of a batch "
            "together; use mean_l2 or cosine"
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
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the private gradient of the mean loss and the (not private) mean loss of the batch.

    `x` [batch, ...], `y` [batch, ...]; samples with `weight` 0 are padding. `noise` is the key of the noise,
    which must be another one for every gradient that is released; `masks` that of dropout, from which every
    sample gets its own. int64 0-d.
    """

    def of_sample(x: Tensor, y: Tensor, mask: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        gradient, (value, _) = grad_and_value(loss_of, has_aux=True)(values, x[None], y[None], None, mask)
        return gradient, value

    gradients, losses = vmap(of_sample)(x, y, fold_key(masks, torch.arange(x.shape[0], device=masks.device)))
    present = torch.ones_like(losses) if weight is None else weight
    rows = [g.reshape(x.shape[0], -1) for g in gradients.values()]
    norms = torch.stack([row.square().sum(1) for row in rows]).sum(0).sqrt()
    factor = present * (dp.clip / norms.clamp(min=1e-12)).clamp(max=1.0)
    size = present.sum().clamp(min=1.0)
    out = {}
    for number, (name, g) in enumerate(gradients.items()):
        total = torch.tensordot(factor, g, dims=1)
        if dp.noise > 0:
            total = total + normal(noise, number, total.shape) * (dp.noise * dp.clip)
        out[name] = total / size
    return out, (losses * present).sum() / size
