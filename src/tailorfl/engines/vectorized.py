"""The vectorized engine: a chunk of clients trains together under `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.func import vmap

from tailorfl.core.client import Client
from tailorfl.engines.base import CohortTask, Inference
from tailorfl.engines.devices import HOST
from tailorfl.engines.in_process import InProcessEngine, largest_first
from tailorfl.engines.memory import COPIES, Peak, fitting, halved, out_of_memory, release
from tailorfl.engines.results import Parts, Stacked
from tailorfl.models.functional import Model
from tailorfl.privacy.ledger import PrivacyRecord
from tailorfl.settings.experiment import DEFAULT
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort, padded, rows_at_once
from tailorfl.training.inference import in_passes, one_by_one

CHUNK_BYTES = 16 * 2**20
"""Bytes of the parameters of one chunk, when the chunk size is chosen here: what a large cache holds."""
FEWEST, MOST = 4, 1024
"""Clients of a chunk whose size is chosen here."""
SHARED = 4
"""The chunks of a cohort that is cut here come to a multiple of this, so that 2 or 4 workers have equal shares."""
PROBE = 2
"""Clients of the first chunk on a GPU, whose memory is measured."""

Found = list[dict[str, Tensor]]


class Vectorized(InProcessEngine):
    """Cuts a cohort into chunks of clients of similar size and maps each chunk at once.

    Args:
        chunk: clients a chunk; None chooses by the size of the model and the memory.
        device: where they calculate.
        precision: what networks multiply in.

    Attribute `most` is how many clients fit into memory at once, where it turned out that more do not.
    """

    kind = "vectorized"

    def __init__(
        self, chunk: int | None = None, device: torch.device = HOST, precision: str = DEFAULT.engine.precision
    ) -> None:
        super().__init__(device, precision)
        self.chunk = chunk
        self.most: int | None = None

    def chunk_of(self, cohort: Cohort) -> int:
        """Return how many clients train together."""
        size = self.chunk if self.chunk is not None else self._fitting(cohort)
        return size if self.most is None else min(size, self.most)

    def _fitting(self, cohort: Cohort) -> int:
        model, device = cohort.model, self.place.device
        if device.type == "cuda":
            client_bytes = self.place.bytes_each.get(model)
            return PROBE if client_bytes is None else min(MOST, fitting(device, client_bytes))
        # A frozen backbone is not copied for each client, but what it computes in between is.
        scalars = model.scalars + model.held_scalars
        size = int(np.clip(CHUNK_BYTES // (4 * scalars), FEWEST, MOST))
        clients = len(cohort.ids)
        if clients > size:
            chunks = -(-clients // size // SHARED) * SHARED
            size = max(-(-clients // chunks), FEWEST)
        return min(size, fitting(device, COPIES * 4 * model.scalars))

    def run(self, task: CohortTask, states: TensorDict) -> Parts:
        """Return what the function makes of every client, stacked."""
        cohort, move = task.cohort, self.place.tensors
        state_leaves, received_leaves = dict(tree.leaves(states)), dict(tree.leaves(task.received))
        remaining, out = largest_first(cohort), Stacked(len(cohort.ids), self.room, task.unlike)
        home = replace(task, cohort=self.place.cohort(cohort))
        everyone = move(received_leaves) if task.index is None else {}

        def apply(part: CohortTask, chosen: Tensor) -> Found:
            chosen_states = move({p: t.index_select(0, chosen) for p, t in state_leaves.items()})
            if part.index is None:
                return _apply(part, chosen_states, everyone)
            return _apply(part, chosen_states, move({p: t[part.index] for p, t in received_leaves.items()}))

        while len(remaining):
            chosen = self.next_chunk(cohort, remaining)
            # A chunk that does not fit is run again, so what it notes counts once it has run to its end.
            part = home.part(chosen)
            record = None if cohort.record is None else PrivacyRecord()
            part = replace(part, cohort=replace(part.cohort, record=record))
            results = self._attempt(cohort.model, part.cohort, partial(apply, part, chosen))
            if results is None:
                release(self.place.device)
                continue
            out.put(chosen, results)
            if cohort.record is not None and record is not None:
                cohort.record.merge(record)
            remaining = remaining[len(chosen) :]
        return out.parts()

    def _attempt(self, model: Model, part: Cohort, run: Callable[[], Found]) -> Found | None:
        """Return what `run` makes of a part of the cohort, or None where memory was not enough for so many clients.

        Raises:
            MemoryLimitError: it was not enough for a single one.
        """
        device = self.place.device
        peak = Peak(device) if device.type == "cuda" else None
        try:
            with self.place.calculating():
                results = run()
        except Exception as error:
            if not out_of_memory(error):
                raise
            self.most = halved(part, device, error)
            return None
        if peak is not None:
            client_bytes = peak.bytes() / len(part.ids)
            self.place.bytes_each[model] = max(client_bytes, self.place.bytes_each.get(model, 0.0))
        return results

    def outputs(self, task: Inference) -> list[Tensor]:
        """Return the outputs of each model on its rows."""
        rows, states, common = task.rows, tree.tensors(task.states), isinstance(task.rows, Tensor)
        table = rows if isinstance(rows, Tensor) else padded([r.numpy() for r in rows])[0]
        device = task.source.x.device
        if common and task.model.channels_last(device):
            # One network after another on a few images: nothing is common to them but these.
            models_alone = one_by_one(task.model, states, task.models, device)
            return list(
                in_passes(
                    lambda x: torch.stack([m(x) for m in models_alone]),
                    task.source,
                    table,
                    task.models,
                    dim=1,
                )
            )
        models = vmap(task.model, in_dims=(0, None if common else 0))
        table_outputs = in_passes(
            lambda x: models(states, x).to(HOST), task.source, table, task.models, dim=1
        )
        return (
            list(table_outputs)
            if common
            else [of_model[: len(r)] for of_model, r in zip(table_outputs, rows, strict=True)]
        )

    def shares(self, task: Inference) -> list[Inference]:
        """Return all models on some samples each, as they go through them in one process."""
        return task.of_rows(rows_at_once(task.source, task.models))


def _apply(task: CohortTask, states: dict[str, Tensor], received: dict[str, Tensor]) -> Found:
    """Map the function over `states` [clients, ...] and what is received, [clients, ...] where there is an index."""
    parts = 0

    def one(position: Tensor, state: dict[str, Tensor], message: dict[str, Tensor]) -> dict[str, Tensor]:
        nonlocal parts
        results = task.function(
            Client(task.cohort, position), tree.nest(state.items()), tree.nest(message.items())
        )
        parts = len(results)
        # The position is returned too, so that a function with nothing to return is still mapped.
        return {
            "position": position,
            **{f"{i}:{p}": t for i, part in enumerate(results) for p, t in tree.leaves(part)},
        }

    positions = torch.arange(len(task.cohort.ids), device=HOST)  # looked at, not calculated with
    message_axis = None if task.index is None else 0
    flat = vmap(one, in_dims=(0, 0 if states else None, message_axis))(positions, states, received)
    out: list[dict[str, Tensor]] = [{} for _ in range(parts)]
    for key, tensor in flat.items():
        part, colon, path = key.partition(":")
        if colon:
            out[int(part)][path] = tensor
    return out
