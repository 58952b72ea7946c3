"""What an engine is: a way to apply one client's function to a cohort."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.client import Client
from tailorfl.core.cohort import Cohort
from tailorfl.data.source import Source

Parts = tuple[TensorDict, ...]
ClientFunction = Callable[[Client, TensorDict, TensorDict], Parts]
"""(client, its state, what it received) -> any number of TensorDicts."""


class Engine(Protocol):
    """Applies client functions to cohorts; every engine returns the same numbers up to float rounding."""

    @property
    def name(self) -> str:
        """What the run's records call it."""

    def map(
        self,
        function: ClientFunction,
        cohort: Cohort,
        states: TensorDict,
        received: TensorDict,
        index: Tensor | None = None,
    ) -> Parts:
        """Returns `function` of every client, stacked: [clients, ...] in the order of `cohort.ids`.

        `states` [clients, ...]; `received` one for all, or with `index` ([clients] or [clients, M]) a table of
        which each client gets the rows that `index` names.
        """

    def predict(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of client i's model on its rows, [rows, outputs]; `models` [clients, ...]."""

    def predict_all(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> Tensor:
        """Returns the outputs of every client's model on the same `rows`, [clients, rows, outputs]."""


class Stacked:
    """Collects the results of clients or chunks of clients into tensors of [clients, ...]."""

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self._parts: list[dict[str, Tensor]] = []

    def put(self, where: int | Tensor, results: Sequence[Mapping[str, Tensor]]) -> None:
        """Writes the tensors of one client (`where` its position) or of several, [len(where), ...]."""
        one = isinstance(where, int)
        if isinstance(where, Tensor) and torch.equal(where, torch.arange(self.clients)):
            self._parts = [dict(part) for part in results]  # everything at once and in order: nothing to copy
            return
        if not self._parts:
            self._parts = [
                {p: t.new_empty(self.clients, *(t.shape if one else t.shape[1:])) for p, t in part.items()}
                for part in results
            ]
        for held, part in zip(self._parts, results, strict=True):
            for path, tensor in part.items():
                held[path][where] = tensor

    def parts(self) -> Parts:
        """Returns the collected TensorDicts."""
        return tuple(tree.nest(part.items(), [self.clients]) for part in self._parts)


def finite_clients(*parts: TensorDict) -> Tensor:
    """Returns which clients have only finite numbers in all `parts` ([clients, ...] each), bool [clients]."""
    clients = parts[0].batch_size[0]
    ok = torch.ones(clients, dtype=torch.bool)
    for part in parts:
        for _, tensor in tree.leaves(part):
            if tensor.is_floating_point():
                ok &= torch.isfinite(tensor.reshape(clients, -1).sum(1))
    return ok
