"""The loss of each kind of task as one mean over the real samples of a batch.

`weight` [batch] is 1 for real samples and 0 for padding, or None when all are real. Every function is
differentiable, has no data-dependent control flow and works under `torch.func.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _mean(per_sample: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return per_sample.mean()
    return (per_sample * weight).sum() / weight.sum().clamp(min=1.0)


def cross_entropy(outputs: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Mean cross entropy of logits [batch, classes] and labels [batch] int64."""
    if weight is None:
        return F.cross_entropy(outputs, y)
    return _mean(F.cross_entropy(outputs, y, reduction="none"), weight)


def binary(outputs: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Mean binary cross entropy of one logit [batch, 1] and labels [batch] in {0, 1}."""
    return _mean(
        F.binary_cross_entropy_with_logits(outputs[:, 0], y.to(outputs.dtype), reduction="none"), weight
    )


def multilabel(outputs: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Binary cross entropy of [batch, labels], mean over labels and samples."""
    return _mean(F.binary_cross_entropy_with_logits(outputs, y, reduction="none").mean(1), weight)


def half_squared_error(outputs: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Mean over samples of half the squared error summed over outputs.

    Its Hessian in a linear model is X'X/n.
    """
    return _mean(0.5 * (outputs - y.reshape(outputs.shape)).square().sum(1), weight)


def cox(outputs: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Negative Cox partial log-likelihood of the batch (Breslow ties), divided by its number of samples.

    `outputs` [batch, 1] log risk; `y` [batch, 2] (event, time). The risk set of a sample is every sample of
    the batch that lives at least as long, as in FLamby's TCGA-BRCA baseline.
    """
    risk, event, time = outputs[:, 0], y[:, 0], y[:, 1]
    at_risk = time[None, :] >= time[:, None]
    if weight is not None:
        at_risk = at_risk & (weight[None, :] > 0)
    lowest = torch.finfo(risk.dtype).min
    log_total = torch.logsumexp(torch.where(at_risk, risk[None, :], lowest), dim=1)
    return _mean((log_total - risk) * event, weight)


LOSSES: dict[str, Loss] = {
    "classification": cross_entropy,
    "binary": binary,
    "multilabel": multilabel,
    "regression": half_squared_error,
    "survival": cox,
}
