"""How far a personal model's features lie from the global model's: what FedOA (2025) pulls together.

    the mean over samples of  ‖Φ(personal; x) − Φ(global; x)‖₂

Φ is the input of the head, see `tailorfl.models.functional.Model.outputs_and_features`.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.data.source import Source
from tailorfl.models.functional import Model
from tailorfl.training import tree
from tailorfl.training.cohort import rows_at_once


def features(model: Model, state: TensorDict, source: Source, rows: Tensor) -> Tensor:
    """Return the features of one model on samples `rows`, float [rows, width]; [0, 0] without samples."""
    if not len(rows):
        return torch.zeros(0, 0)
    tensors = tree.tensors(state)
    parts = torch.split(rows, rows_at_once(source))
    return torch.cat([model.outputs_and_features(tensors, source.take(part))[1] for part in parts])


def feature_distances(personal: Tensor, shared: Tensor) -> Tensor:
    """Return the distance of features [samples, width] of two models on every sample, [samples]."""
    distances: Tensor = torch.linalg.vector_norm(personal - shared, dim=1)
    return distances
