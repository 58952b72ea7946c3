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
        wanted = self.chunk if self.chunk is not None else self._fitting(cohort)
        return wanted if self.most is None else min(wanted, self.most)

    def _fitting(self, cohort: Cohort) -> int:
        model, device = cohort.model, self.place.device
        if device.type == "cuda":
            each = self.place.bytes_each.get(model)
            return PROBE if each is None else min(MOST, fitting(device, each))
        # A frozen backbone is not copied for each client, but what it computes in between is.
        scalars = model.scalars + model.held_scalars
        wanted = int(np.clip(CHUNK_BYTES // (4 * scalars), FEWEST, MOST))
        clients = len(cohort.ids)
        if clients > wanted:
            chunks = -(-clients // wanted // SHARED) * SHARED
            wanted = max(-(-clients // chunks), FEWEST)
        return min(wanted, fitting(device, COPIES * 4 * model.scalars))

    def run(self, task: CohortTask, states: TensorDict) -> Parts:
        """Return what the function makes of every client, stacked."""
        cohort, move = task.cohort, self.place.tensors
        state_leaves, received_leaves = dict(tree.leaves(states)), dict(tree.leaves(task.received))
        left, out = largest_first(cohort), Stacked(len(cohort.ids), self.room, task.unlike)
        home = replace(task, cohort=self.place.cohort(cohort))
        everyone = move(received_leaves) if task.index is None else {}

        def apply(part: CohortTask, chosen: Tensor) -> Found:
            mine = move({p: t.index_select(0, chosen) for p, t in state_leaves.items()})
            if part.index is None:
                return _apply(part, mine, everyone)
            return _apply(part, mine, move({p: t[part.index] for p, t in received_leaves.items()}))

        while len(left):
            chosen = self.next_chunk(cohort, left)
            # A chunk that does not fit is run again, so what it notes counts once it has run to its end.
            part = home.part(chosen)
            record = None if cohort.record is None else PrivacyRecord()
            part = replace(part, cohort=replace(part.cohort, record=record))
            found = self._attempt(cohort.model, part.cohort, partial(apply, part, chosen))
            if found is None:
                release(self.place.device)
                continue
            out.put(chosen, found)
            if cohort.record is not None and record is not None:
                cohort.record.merge(record)
            left = left[len(chosen) :]
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
                found = run()
        except Exception as error:
            if not out_of_memory(error):
                raise
            self.most = halved(part, device, error)
            return None
        if peak is not None:
            each = peak.bytes() / len(part.ids)
            self.place.bytes_each[model] = max(each, self.place.bytes_each.get(model, 0.0))
        return found

    def outputs(self, asked: Inference) -> list[Tensor]:
        """Return the outputs of each model on its rows."""
        rows, states, common = asked.rows, tree.tensors(asked.states), isinstance(asked.rows, Tensor)
        table = rows if isinstance(rows, Tensor) else padded([r.numpy() for r in rows])[0]
        device = asked.source.x.device
        if common and asked.model.channels_last(device):
            # One network after another on a few images: nothing is common to them but these.
            alone = one_by_one(asked.model, states, asked.models, device)
            return list(
                in_passes(
                    lambda x: torch.stack([m(x) for m in alone]), asked.source, table, asked.models, dim=1
                )
            )
        models = vmap(asked.model, in_dims=(0, None if common else 0))
        every = in_passes(lambda x: models(states, x).to(HOST), asked.source, table, asked.models, dim=1)
        return list(every) if common else [own[: len(r)] for own, r in zip(every, rows, strict=True)]

    def shares(self, asked: Inference) -> list[Inference]:
        """Return all models on some samples each, as they go through them in one process."""
        return asked.of_rows(rows_at_once(asked.source, asked.models))


def _apply(task: CohortTask, states: dict[str, Tensor], received: dict[str, Tensor]) -> Found:
    """Map the function over `states` [clients, ...] and what is received, [clients, ...] where there is an index."""
    parts = 0

    def one(position: Tensor, state: dict[str, Tensor], message: dict[str, Tensor]) -> dict[str, Tensor]:
        nonlocal parts
        found = task.function(
            Client(task.cohort, position), tree.nest(state.items()), tree.nest(message.items())
        )
        parts = len(found)
        # The position is returned too, so that a function with nothing to return is still mapped.
        return {
            "position": position,
            **{f"{i}:{p}": t for i, part in enumerate(found) for p, t in tree.leaves(part)},
        }

    positions = torch.arange(len(task.cohort.ids), device=HOST)  # looked at, not calculated with
    each = None if task.index is None else 0
    flat = vmap(one, in_dims=(0, 0 if states else None, each))(positions, states, received)
    out: list[dict[str, Tensor]] = [{} for _ in range(parts)]
    for key, tensor in flat.items():
        part, colon, path = key.partition(":")
        if colon:
            out[int(part)][path] = tensor
    return out
