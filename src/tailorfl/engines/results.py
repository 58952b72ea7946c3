"""Results of a cohort, collected from chunks of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.engines.memory import Room
from tailorfl.training import tree

Parts = tuple[TensorDict, ...]


@dataclass(frozen=True)
class CohortUpdates:
    """The result of training a cohort, beside the new states, which are staged in their store."""

    replies: TensorDict
    """[clients, ...]"""
    metrics: TensorDict
    """[clients]"""
    finite: Tensor
    """Clients whose new state and reply hold only finite numbers, bool [clients]."""


class Stacked:
    """Collects the results of clients or chunks of clients into tensors of [clients, ...] in host memory.

    `unlike(position, first, what)` makes the error for a client whose results differ in structure from the first ones.
    """

    def __init__(self, clients: int, room: Room, unlike: Callable[[int, int, str], Exception]) -> None:
        self.clients, self._room, self._unlike = clients, room, unlike
        self._parts: list[dict[str, Tensor]] = []
        self._shapes: list[tree.Shapes] = []
        self._first = 0

    def put(self, rows: int | Tensor, parts: Sequence[TensorDict | Mapping[str, Tensor]]) -> None:
        """Write the tensors of one client (`rows` its position) or of several, [len(rows), ...]."""
        results: list[Mapping[str, Tensor]]
        results = [dict(tree.leaves(part)) if isinstance(part, TensorDict) else part for part in parts]
        is_single = isinstance(rows, int)
        at = int(rows if is_single else rows[0])  # type: ignore[index]
        if isinstance(rows, Tensor) and torch.equal(rows, torch.arange(self.clients)):
            # Everything at once and in order: nothing to copy within host memory.
            self._parts = [{p: t.cpu() for p, t in part.items()} for part in results]
            return
        shapes = [tree.shapes(part.items(), axes=0 if is_single else 1) for part in results]
        if not self._parts:
            self._first, self._shapes = at, shapes
            self._parts = [
                {
                    p: self._room.empty((self.clients, *(t.shape if is_single else t.shape[1:])), t.dtype)
                    for p, t in part.items()
                }
                for part in results
            ]
        for shape, expected in zip(shapes, self._shapes, strict=True):
            if shape != expected:
                raise self._unlike(at, self._first, tree.unlike(shape, expected))
        for stacked, part in zip(self._parts, results, strict=True):
            for path, tensor in part.items():
                stacked[path][rows] = tensor.cpu()  # values that are put must be where they are put to

    def updates(self) -> CohortUpdates:
        """Return what came out of the training of all."""
        replies, metrics, flags = self.parts()
        return CohortUpdates(replies, metrics, flags["finite"])

    def parts(self) -> Parts:
        """Return the collected TensorDicts."""
        return tuple(tree.nest(part.items(), [self.clients]) for part in self._parts)


def all_finite(*parts: Mapping[str, Tensor]) -> Tensor:
    """Return whether one client has only finite numbers in all `parts`, bool 0-d."""
    sums = (float(t.sum()) for part in parts for t in part.values() if t.is_floating_point())
    return torch.tensor(all(map(math.isfinite, sums)))


def finite_clients(*parts: TensorDict) -> Tensor:
    """Return which clients have only finite numbers in all `parts` ([clients, ...] each), bool [clients]."""
    clients = parts[0].batch_size[0]
    ok = torch.ones(clients, dtype=torch.bool)
    for part in parts:
        for _, tensor in tree.leaves(part):
            if tensor.is_floating_point():
                ok &= torch.isfinite(tensor.reshape(clients, -1).sum(1))
    return ok
