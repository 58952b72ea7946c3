"""What an engine is: a way to apply one client's function to a cohort."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.client import Client, Cohort

Parts = tuple[TensorDict, ...]
ClientFunction = Callable[[Client, TensorDict, TensorDict], Parts]
"""(client, its state, what it received) -> any number of TensorDicts."""

ROW_BUDGET = 64 * 2**20
"""Bytes of inputs that one forward pass of an evaluation may hold."""


class Engine(Protocol):
    """Applies client functions to cohorts; every engine returns the same numbers up to float rounding."""

    @property
    def name(self) -> str:
        """What the run's records call it."""

    def map(
        self, function: ClientFunction, cohort: Cohort, states: TensorDict, received: TensorDict, each: bool = False
    ) -> Parts:
        """Returns `function` of every client, stacked: TensorDicts of [clients, ...] in the order of `cohort.ids`.

        `states` [clients, ...]; `received` one for all, or with `each` one a client, [clients, ...].
        """

    def predict(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of client i's model on its rows, [rows of i, outputs] each; `models` [clients, ...]."""

    def predict_all(self, cohort: Cohort, models: TensorDict, x: Tensor) -> Tensor:
        """Returns the outputs of every client's model on the same inputs `x` [samples, ...]: [clients, samples, outputs]."""


def stack(results: Sequence[Parts]) -> Parts:
    """Returns the results of single clients stacked along a leading client axis."""
    return tuple(
        tree.nest(
            [
                (path, torch.stack(values))
                for path, values in _columns([dict(tree.leaves(r[part])) for r in results]).items()
            ],
            [len(results)],
        )
        for part in range(len(results[0]))
    )


def _columns(rows: Sequence[dict[str, Tensor]]) -> dict[str, list[Tensor]]:
    return {path: [row[path] for row in rows] for path in rows[0]}


def finite_clients(*parts: TensorDict) -> Tensor:
    """Returns which clients have only finite numbers in all `parts` ([clients, ...] each), bool [clients]."""
    clients = parts[0].batch_size[0]
    ok = torch.ones(clients, dtype=torch.bool)
    for part in parts:
        for _, tensor in tree.leaves(part):
            if tensor.is_floating_point():
                ok &= torch.isfinite(tensor.reshape(clients, -1).sum(1))
    return ok
