"""The part of a cohort's tensors that takes a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tailorfl.training.gradients import Carry
from tailorfl.training.packing import Packed


class Cut:
    """The part of a cohort's tensors that takes a step.

    Neighbours are views, chosen clients are copies that `put` writes back.
    """

    def __init__(self, index: slice | Tensor, clients: int, stacked: bool) -> None:
        self.index, self.stacked = index, stacked
        self.whole = not stacked or (isinstance(index, slice) and (index.start, index.stop) == (0, clients))

    def of(self, tensor: Tensor) -> Tensor:
        """The active part of a tensor."""
        return tensor if self.whole else tensor[self.index]

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The active part of each tensor."""
        return [self.of(t) for t in tensors]

    def carry(self, carry: Carry) -> Carry:
        """The active part of a carry; its trained tensors only lend their names."""
        fixed = {n: t if n in carry.shared else t[self.index] for n, t in carry.fixed.items()}
        moving = {n: t[self.index] for n, t in carry.moving.items()}
        given = tuple(one.map(self.of) for one in carry.given)
        return Carry(carry.trained, moving, fixed, carry.shared, given)

    def put(self, tensors: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Writes chosen clients back; views have been written already."""
        if not self.whole and isinstance(self.index, Tensor):
            for tensor, value in zip(tensors, new, strict=True):
                tensor[self.index] = value


@dataclass(frozen=True)
class Active:
    """The clients that take a step, by their part of all tensors."""

    carries: Sequence[Carry]
    params: list[Tensor]
    memory: list[Tensor]
    given: Packed
    centre: list[Tensor] | None
    strength: Tensor | None
