"""The flat tensors of a client operation, one client's or a whole cohort's, handed out in turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Dims = Sequence[int | None] | None
"""The client axis of each tensor (None: shared by all clients); None for one client without client axes."""


class Arranged:
    """Hands out the flat tensors of a call in turn, client axis first and clients in the plan's order."""

    def __init__(self, tensors: Sequence[Tensor], dims: Dims, clients: int, order: Tensor | None) -> None:
        self.rest = iter(zip(tensors, dims if dims is not None else [None] * len(tensors), strict=True))
        self.stacked, self.clients, self.order = dims is not None, clients, order

    def own(self) -> Tensor:
        """The next tensor as a copy that may be written to."""
        tensor, dim = next(self.rest)
        if not self.stacked:
            return tensor.detach().clone()
        if dim is None:
            return (
                tensor.detach()
                .expand(self.clients, *tensor.shape)
                .clone(memory_format=torch.contiguous_format)
            )
        moved = tensor.detach().movedim(dim, 0)
        if self.order is not None:
            return moved.index_select(0, self.order)
        return moved.clone(memory_format=torch.contiguous_format)

    def view(self) -> tuple[Tensor, bool]:
        """The next tensor for reading, and whether all clients share it."""
        tensor, dim = next(self.rest)
        if dim is None:
            return tensor.detach(), True
        moved = tensor.detach().movedim(dim, 0)
        return (moved if self.order is None else moved.index_select(0, self.order)), False

    def spread(self) -> Tensor:
        """The next tensor for reading, with a client axis even where all clients share it (no copy then)."""
        tensor, alone = self.view()
        return tensor.expand(self.clients, *tensor.shape) if alone and self.stacked else tensor
