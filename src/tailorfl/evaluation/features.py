"""How far a personal model's features lie from the global model's: what FedOA (2025) pulls together.

    the mean over samples of  ‖Φ(personal; x) − Φ(global; x)‖₂

Φ is the input of the head, see `tailorfl.models.functional.Model.outputs_and_features`.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.cohort import rows_at_once
from tailorfl.data.source import Source
from tailorfl.models.functional import Model


def feature_distances(
    model: Model, personal: TensorDict, shared: TensorDict, source: Source, rows: Tensor
) -> Tensor:
    """Returns the distance of one personal model on every sample, float [rows]; both models are of one architecture."""
    found = [torch.zeros(0)]
    for part in torch.split(rows, rows_at_once(source)):
        x = source.take(part)
        mine, everyones = (model.outputs_and_features(tree.tensors(m), x)[1] for m in (personal, shared))
        found.append(torch.linalg.vector_norm(mine - everyones, dim=1))
    return torch.cat(found)
