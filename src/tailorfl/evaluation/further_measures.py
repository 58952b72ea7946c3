"""Further measures of a model, in addition to the metrics of its task: sharpness, and the distance of features.

Sharpness is how steep the loss is around a model, which sharpness-aware methods (FedSAM, PLGU) reduce.

    sharpness(w) = F(w + ρ g/‖g‖₂) − F(w),   g = ∇F(w)

It is the increase of the loss that SAM (Foret et al., ICLR 2021) minimises: to first order the largest within the
radius ρ. F is the mean loss of the task over the samples, in evaluation mode; g is taken over all parameters that may
change, as one vector.

The feature distance is that between a personal model's features and the global model's, which FedOA (2025) reduces.

    the mean over samples of  ‖Φ(personal; x) − Φ(global; x)‖₂

Φ is the input of the head, see `tailorfl.models.functional.Model.outputs_and_features`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.data.source import Source
from tailorfl.models.functional import Model
from tailorfl.training import tree
from tailorfl.training.cohort import rows_at_once
from tailorfl.training.objective import LOSSES


def sharpness(model: Model, state: TensorDict, source: Source, rows: Tensor, rho: float) -> float:
    """Return F(w + ρ g/‖g‖) − F(w) on samples `rows`; NaN without samples, 0 if the gradient is zero."""
    if not len(rows):
        return float("nan")
    leaves = {n: state.get(n).detach().clone().requires_grad_() for n in model.parameters}
    tensors = tree.tensors(state)
    total = torch.zeros(())
    with torch.enable_grad():
        for part, share in _blocks(source, rows):
            value = share * _loss(model, {**tensors, **leaves}, source, part)
            value.backward()  # type: ignore[no-untyped-call]
            total += value.detach()
    gradient = {n: t.grad for n, t in leaves.items() if t.grad is not None}
    norm = torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt()
    if not norm > 0:
        return 0.0 if norm == 0 else float("nan")
    moved = {n: leaves[n].detach() + g * (rho / norm) for n, g in gradient.items()}
    return mean_loss(model, {**tensors, **moved}, source, rows) - float(total)


def mean_loss(model: Model, state: dict[str, Tensor] | TensorDict, source: Source, rows: Tensor) -> float:
    """Return the task's mean loss of one model on samples `rows`, in evaluation mode; NaN without samples."""
    if not len(rows):
        return float("nan")
    tensors = tree.tensors(state) if isinstance(state, TensorDict) else state
    with torch.no_grad():
        return sum(
            float(share * _loss(model, tensors, source, part)) for part, share in _blocks(source, rows)
        )


def _blocks(source: Source, rows: Tensor) -> Iterator[tuple[Tensor, float]]:
    """Yield samples that go through the model together, and their share of all samples.

    The Cox loss compares all samples with each other, so it gets them together.
    """
    size = len(rows) if source.task == "survival" else rows_at_once(source)
    for part in torch.split(rows, size):
        yield part, len(part) / len(rows)


def _loss(model: Model, state: dict[str, Tensor], source: Source, rows: Tensor) -> Tensor:
    return LOSSES[source.task](model(state, source.take(rows)), source.targets(rows), None)


def features(model: Model, state: TensorDict, source: Source, rows: Tensor) -> Tensor:
    """Return the features of one model on samples `rows`, float [rows, width]; [0, 0] without samples."""
    if not len(rows):
        return torch.zeros(0, 0)
    tensors = tree.tensors(state)
    parts = torch.split(rows, rows_at_once(source))
    return torch.cat([model.outputs_and_features(tensors, source.take(part))[1] for part in parts])


def feature_distances(personal: Tensor, shared: Tensor) -> Tensor:
    """Return the distance between two models' features [samples, width] on every sample, [samples]."""
    distances: Tensor = torch.linalg.vector_norm(personal - shared, dim=1)
    return distances
