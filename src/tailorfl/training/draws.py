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
    """Uniform numbers in the shapes of some tensors, by each client's key of the round."""

    def __init__(self, cohort: Cohort, like: Sequence[Tensor], purpose: str) -> None:
        self.cohort, self.like, self.purpose = cohort, like, f"drawn: {purpose}"

    def run(self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Returns the numbers, [clients, ...] each, or [...] of one client."""
        keys = torch.from_numpy(self.cohort.keys(positions, self.purpose).astype(np.int64))
        found = [
            torch.stack([uniform(key, number, like.shape, self.cohort.device, like.dtype) for key in keys])
            for number, like in enumerate(self.like)
        ]
        return tuple(t[0] if dims is None else t for t in found)

    def where(self, positions: Sequence[int]) -> str:
        return where(self.cohort, positions, self.purpose)
