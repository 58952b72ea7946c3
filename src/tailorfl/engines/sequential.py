"""The reference engine: one client after another."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.engines.base import CohortTask, Inference, Stored
from tailorfl.engines.devices import HOST
from tailorfl.engines.in_process import InProcessEngine, cut, evenly
from tailorfl.engines.memory import out_of_memory, too_large
from tailorfl.engines.results import CohortUpdates, Parts, Stacked, all_finite
from tailorfl.engines.state import StateStore
from tailorfl.training import tree
from tailorfl.training.cohort import PLAN_BLOCK, Cohort, rows_at_once
from tailorfl.training.inference import in_passes, one_by_one

CHUNKS = 64
"""A cohort is cut into so many chunks, or fewer."""
PIECE_BYTES = 16 * 2**20
"""In one process clients are taken together, so that their batches are planned at once, while their models fit into
this."""
SHARES = 8
"""Into so many parts the models of an evaluation are cut where several processes share them."""


class Sequential(InProcessEngine):
    """Runs clients in a loop; needs the memory of one client at a time."""

    kind = "sequential"

    def chunk_of(self, cohort: Cohort) -> int:
        """Return how many clients make up a chunk: the results do not depend on it, workers share the work so."""
        return -(-len(cohort.ids) // CHUNKS)

    def train(self, task: CohortTask, store: StateStore) -> CohortUpdates:
        """Run the function on every client; what a client returns goes straight to its place among all."""
        out = Stacked(len(task.cohort.ids), self.room, task.unlike)
        for positions in self._pieces(task.cohort):
            part = task.part(positions)
            new = Stacked(len(positions), self.room, part.unlike)
            results = self._results(part, Stored(store).of(part.cohort.ids))
            for k, (at, (state, reply, metrics)) in enumerate(zip(positions.tolist(), results, strict=True)):
                new.put(k, [state])
                out.put(at, [reply, metrics, {"finite": all_finite(state, reply)}])
            store.stage(part.cohort.ids, *new.parts())
        return out.updates()

    def _pieces(self, cohort: Cohort) -> Iterator[Tensor]:
        """Yield the positions of clients whose batches are planned at once, int64: more than a chunk of small ones."""
        fitting = PIECE_BYTES // (4 * max(sum(cohort.model.sizes.values()), 1))
        most = min(max(fitting, 1), PLAN_BLOCK)
        return cut(cohort, lambda remaining: remaining[: evenly(len(remaining), most)])

    def run(self, task: CohortTask, states: TensorDict) -> Parts:
        """Return what the function makes of every client, stacked."""
        out = Stacked(len(task.cohort.ids), self.room, task.unlike)
        for position, results in enumerate(self._results(task, states)):
            out.put(position, results)
        return out.parts()

    def _results(self, task: CohortTask, states: TensorDict) -> Iterator[list[dict[str, Tensor]]]:
        """Yield what the function makes of one client after another, by path."""
        cohort, received, index = task.cohort, task.received, task.index
        home = self.place.cohort(cohort)
        everyone = self._moved(received) if index is None else received
        for position in range(len(cohort.ids)):
            client = Client(home, torch.tensor(position))
            message = everyone if index is None else self._moved(received[index[position]])
            try:
                with self.place.calculating():
                    results = task.function(client, self._moved(states[position]), message)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                raise too_large(cohort.part([position]), self.place.device) from error
            yield [dict(tree.leaves(part)) for part in results]

    def _moved(self, part: TensorDict) -> TensorDict:
        """Return the tensors on the device."""
        if self.place.is_host:
            return part
        moved: TensorDict = tree.nest(self.place.tensors(dict(tree.leaves(part))).items(), part.batch_size)
        return moved

    def outputs(self, task: Inference) -> list[Tensor]:
        """Return the outputs of each model on its rows."""
        models = one_by_one(task.model, tree.tensors(task.states), task.models, task.source.x.device)

        def of_all(x: Tensor) -> Tensor:
            return torch.stack([model(x) for model in models]).to(HOST)

        if isinstance(task.rows, Tensor):  # a pass takes its samples once for all models
            return list(in_passes(of_all, task.source, task.rows, dim=1))
        return [
            in_passes(model, task.source, rows).to(HOST)
            if len(rows)
            else torch.zeros(0, task.source.outputs, device=HOST)
            for model, rows in zip(models, task.rows, strict=True)
        ]

    def shares(self, task: Inference) -> list[Inference]:
        """Return some models each; of one model on many samples, passes over some samples each."""
        if task.models == 1:
            return task.of_rows(rows_at_once(task.source))
        return task.of_models(-(-task.models // SHARES))
