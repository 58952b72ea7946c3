"""The reference engine: one client after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.client import Client
from tailorfl.core.cohort import Cohort, rows_at_once
from tailorfl.data.source import Source
from tailorfl.engines.base import ClientFunction, Parts, Stacked


class Sequential:
    """Runs clients in a loop; needs the memory of one client at a time."""

    name = "sequential"

    def map(
        self,
        function: ClientFunction,
        cohort: Cohort,
        states: TensorDict,
        received: TensorDict,
        index: Tensor | None = None,
    ) -> Parts:
        """Returns `function` of every client, stacked."""
        out = Stacked(len(cohort.ids))
        for position in range(len(cohort.ids)):
            client = Client(cohort, torch.tensor(position))
            mine = received if index is None else received[index[position]]
            found = function(client, states[position], mine)
            out.put(position, [dict(tree.leaves(part)) for part in found])
        return out.parts()

    def predict(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of client i's model on its rows."""
        return [self._outputs(cohort, models, i, cohort.source, r) for i, r in enumerate(rows)]

    def predict_all(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> Tensor:
        """Returns the outputs of every client's model on the same rows."""
        return torch.stack(
            [self._outputs(cohort, models, i, source, rows) for i in range(models.batch_size[0])]
        )

    @staticmethod
    def _outputs(cohort: Cohort, models: TensorDict, position: int, source: Source, rows: Tensor) -> Tensor:
        state = {name: tensor[position] for name, tensor in tree.tensors(models).items()}
        if not len(rows):
            return torch.zeros(0, source.outputs)
        return torch.cat(
            [cohort.model(state, source.take(part)) for part in torch.split(rows, rows_at_once(source))]
        )
