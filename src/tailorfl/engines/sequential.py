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
from tailorfl.engines.base import ClientFunction, InProcess, Parts, Stacked
from tailorfl.engines.devices import HOST, Place
from tailorfl.engines.memory_limits import out_of_memory, too_large

CHUNKS = 64
"""A cohort is cut into so many chunks, or fewer."""


class Sequential(InProcess):
    """Runs clients in a loop; needs the memory of one client at a time.

    Args:
        device: where they calculate.
    """

    name = "sequential"

    def __init__(self, device: torch.device = HOST) -> None:
        super().__init__()
        self.place = Place(device)

    def chunk_of(self, cohort: Cohort) -> int:
        """Returns how many clients make up a chunk: the results do not depend on it, workers share the work so."""
        return -(-len(cohort.ids) // CHUNKS)

    def map(
        self,
        function: ClientFunction,
        cohort: Cohort,
        states: TensorDict,
        received: TensorDict,
        index: Tensor | None = None,
    ) -> Parts:
        """Returns `function` of every client, stacked."""
        out, home = Stacked(len(cohort.ids), self.room), self.place.cohort(cohort)
        everyone = self._moved(received) if index is None else received
        for position in range(len(cohort.ids)):
            client = Client(home, torch.tensor(position))
            mine = everyone if index is None else self._moved(received[index[position]])
            try:
                with self.place.calculating():
                    found = function(client, self._moved(states[position]), mine)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                raise too_large(cohort.part([position]), self.place.device) from error
            out.put(position, [dict(tree.leaves(part)) for part in found])
        return out.parts()

    def _moved(self, part: TensorDict) -> TensorDict:
        """The tensors on the device."""
        if self.place.is_host:
            return part
        moved: TensorDict = tree.nest(self.place.tensors(dict(tree.leaves(part))).items(), part.batch_size)
        return moved

    def predict(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of client i's model on its rows."""
        states, home = self._each(models), self.place.cohort(cohort)
        with self.place.calculating():
            return [
                self._outputs(home, state, r) if len(r) else torch.zeros(0, home.source.outputs, device=HOST)
                for state, r in zip(states, rows, strict=True)
            ]

    def _outputs(self, cohort: Cohort, state: dict[str, Tensor], rows: Tensor) -> Tensor:
        source = cohort.source
        parts = torch.split(rows.to(source.x.device), rows_at_once(source))
        return torch.cat([cohort.model(state, source.take(part)) for part in parts]).to(HOST)

    def predict_all(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> Tensor:
        """Returns the outputs of every client's model on the same rows."""
        states = self._each(models)
        if not len(rows):
            return torch.zeros(len(states), 0, source.outputs)
        source, model = self.place.source(source), self.place.cohort(cohort).model
        found: list[Tensor] = []
        with self.place.calculating():
            for part in torch.split(rows.to(source.x.device), rows_at_once(source)):
                x = source.take(part)  # once for all clients
                found.append(torch.stack([model(state, x) for state in states]).to(HOST))
        return torch.cat(found, dim=1)

    def _each(self, models: TensorDict) -> list[dict[str, Tensor]]:
        """The model of every client, on the device."""
        tensors = self.place.tensors(tree.tensors(models))
        return [{name: t[i] for name, t in tensors.items()} for i in range(models.batch_size[0])]
