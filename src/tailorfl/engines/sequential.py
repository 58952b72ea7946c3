"""The reference engine: one client after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client, Cohort
from tailorfl.engines.base import ROW_BUDGET, ClientFunction, Parts, stack


class Sequential:
    """Runs clients in a loop; needs the memory of one client at a time."""

    name = "sequential"

    def map(
        self, function: ClientFunction, cohort: Cohort, states: TensorDict, received: TensorDict, each: bool = False
    ) -> Parts:
        """Returns `function` of every client, stacked."""
        results = []
        for position in range(len(cohort.ids)):
            client = Client(cohort, torch.tensor(position))
            results.append(function(client, states[position], received[position] if each else received))
        return stack(results)

    def predict(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of client i's model on its rows."""
        take = cohort.source.take
        return [self._outputs(cohort, models, i, take(r)) for i, r in enumerate(rows)]

    def predict_all(self, cohort: Cohort, models: TensorDict, x: Tensor) -> Tensor:
        """Returns the outputs of every client's model on the same inputs."""
        return torch.stack([self._outputs(cohort, models, i, x) for i in range(models.batch_size[0])])

    @staticmethod
    def _outputs(cohort: Cohort, models: TensorDict, position: int, x: Tensor) -> Tensor:
        state = {name: tensor[position] for name, tensor in models.items()}
        if not len(x):
            return torch.zeros(0, cohort.source.outputs)
        at_once = max(1, ROW_BUDGET // (4 * max(1, x[0].numel())) // 16)
        return torch.cat([cohort.model(state, part) for part in x.split(at_once)])
