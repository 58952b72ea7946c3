"""Client operations with a batching rule of their own: one client alone, or a whole cohort's tensors at once.

`torch.autograd.Function` lets an operation say what `torch.func.vmap` does with it: its `vmap` gets the physical
tensors of all clients. So `local` may be mapped over a cohort as pure mathematics of one client, while the training
inside works in place, on contiguous memory, and only on clients that still have batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tailorfl.errors import ClientError, TailorflError
from tailorfl.hashing import uniform
from tailorfl.training.cohort import Cohort
from tailorfl.training.packing import Dims


class Operation(Protocol):
    """Something that clients do with tensors."""

    def run(self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Returns results of [clients, ...] for the clients at `positions` of the cohort, or of one client."""

    def where(self, positions: Sequence[int]) -> str:
        """Names clients, round and stage for error messages."""


def apply(operation: Operation, position: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the results of an operation of the client at `position`, alone or under `torch.func.vmap`.

    Raises:
        ClientError: it failed; names client, round and stage.
    """
    if not torch._C._are_functorch_transforms_active():
        # Of one client there is nothing to map, and torch looks at the function longer than a small step takes.
        return _guarded(operation, (int(position),), tensors, None)
    result: tuple[Tensor, ...] = _CohortFunction.apply(operation, position, *tensors)  # type: ignore[no-untyped-call]
    return result


class _CohortFunction(torch.autograd.Function):
    """A client operation with its own batching rule: one client in `forward`, the whole cohort in `vmap`."""

    @staticmethod
    def forward(operation: Any, position: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _guarded(operation, (int(position),), tensors, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: client operations are not differentiated through."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, operation: Any, position: Tensor, *tensors: Tensor) -> Any:
        if in_dims[1] is None:
            raise TailorflError(
                "a client operation was mapped over something other than clients; loop over it instead"
            )
        out = _guarded(operation, tuple(position.tolist()), tensors, in_dims[2:])
        return out, tuple(0 for _ in out)


def _guarded(
    operation: Any, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Any
) -> tuple[Tensor, ...]:
    try:
        with torch.no_grad():  # the loop writes in place; gradients are recorded where it asks for them
            result: tuple[Tensor, ...] = operation.run(positions, tensors, dims)
    except TailorflError:
        raise
    except Exception as error:
        raise ClientError(f"{operation.where(positions)}: {type(error).__name__}: {error}") from error
    return result


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


def where(cohort: Cohort, positions: Sequence[int], stage: str) -> str:
    """Names clients, round and stage for error messages."""
    return f"{who([cohort.ids[p] for p in positions])}, round {cohort.round + 1}, stage '{stage}'"


def who(ids: Sequence[int]) -> str:
    """Names clients for error messages."""
    return f"client {ids[0]}" if len(ids) == 1 else f"one of the clients {', '.join(map(str, ids))}"
