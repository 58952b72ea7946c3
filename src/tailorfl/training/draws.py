"""Random numbers of a cohort that are no batches, masks or noise: what a method itself draws on its clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tailorfl.hashing import uniform
from tailorfl.training.cohort import Cohort
from tailorfl.training.operations import where
from tailorfl.training.packing import Dims


class Drawn:
    """Uniform numbers of some shapes, by each client's key of the round."""

    def __init__(
        self, cohort: Cohort, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, purpose: str
    ) -> None:
        self.cohort, self.shapes, self.dtype, self.purpose = cohort, shapes, dtype, f"drawn: {purpose}"

    def run(self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Returns the numbers, [clients, ...] each, or [...] of one client."""
        keys = torch.from_numpy(self.cohort.keys(positions, self.purpose).astype(np.int64))
        device = self.cohort.device
        found = [
            torch.stack([uniform(key, number, torch.Size(shape), device, self.dtype) for key in keys])
            for number, shape in enumerate(self.shapes)
        ]
        return tuple(t[0] if dims is None else t for t in found)

    def where(self, positions: Sequence[int]) -> str:
        return where(self.cohort, positions, self.purpose)
