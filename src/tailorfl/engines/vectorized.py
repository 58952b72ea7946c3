"""The vectorized engine: a chunk of clients trains together under `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.func import vmap

from tailorfl.core import tree
from tailorfl.core.client import Client
from tailorfl.core.cohort import Cohort, padded, rows_at_once
from tailorfl.core.ledger import Record
from tailorfl.data.source import Source
from tailorfl.engines.base import ClientFunction, InProcess, Parts, Stacked, largest_first
from tailorfl.engines.devices import HOST, Place
from tailorfl.engines.memory_limits import COPIES, Peak, fitting, halved, out_of_memory, release

CHUNK_BYTES = 16 * 2**20
"""Bytes of the parameters of one chunk, when the chunk size is chosen here: what a large cache holds."""
FEWEST, MOST = 4, 1024
"""Clients of a chunk whose size is chosen here."""
SHARED = 4
"""The chunks of a cohort that is cut here come to a multiple of this, so that 2 or 4 workers have equal shares."""
PROBE = 2
"""Clients of the first chunk on a GPU, whose memory is measured."""

Found = list[dict[str, Tensor]]


class Vectorized(InProcess):
    """Cuts a cohort into chunks of clients of similar size and maps each chunk at once.

    Args:
        chunk: clients a chunk; None chooses by the size of the model and the memory.
        device: where they calculate.

    Attribute `most` is how many clients fit into memory at once, where it turned out that more do not.
    """

    name = "vectorized"

    def __init__(self, chunk: int | None = None, device: torch.device = HOST) -> None:
        super().__init__()
        self.chunk, self.place = chunk, Place(device)
        self.most: int | None = None

    def chunk_of(self, cohort: Cohort) -> int:
        """Returns how many clients train together."""
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

    def map(
        self,
        function: ClientFunction,
        cohort: Cohort,
        states: TensorDict,
        received: TensorDict,
        index: Tensor | None = None,
    ) -> Parts:
        """Returns `function` of every client, stacked."""
        state_leaves, received_leaves = dict(tree.leaves(states)), dict(tree.leaves(received))
        left = largest_first(cohort)
        out, home, move = Stacked(len(left), self.room), self.place.cohort(cohort), self.place.tensors
        everyone = move(received_leaves) if index is None else {}

        def run(part: Cohort, chosen: Tensor) -> Found:
            mine = move({p: t.index_select(0, chosen) for p, t in state_leaves.items()})
            if index is None:
                return _apply(function, part, mine, everyone, each=False)
            theirs = move({p: t[index[chosen]] for p, t in received_leaves.items()})
            return _apply(function, part, mine, theirs, each=True)

        while len(left):
            chosen = self.next_chunk(cohort, left)
            # A chunk that does not fit is run again, so what it notes counts once it has run to its end.
            part = replace(home.part(chosen.tolist()), record=None if cohort.record is None else Record())
            found = self._attempt(cohort, part, partial(run, part, chosen))
            if found is None:
                release(self.place.device)
                continue
            out.put(chosen, found)
            if cohort.record is not None and part.record is not None:
                cohort.record.merge(part.record)
            left = left[len(chosen) :]
        return out.parts()

    def _attempt(self, cohort: Cohort, part: Cohort, run: Callable[[], Found]) -> Found | None:
        """Returns what `run` makes of a part of the cohort, or None where memory was not enough for so many clients.

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
            self.place.bytes_each[cohort.model] = max(each, self.place.bytes_each.get(cohort.model, 0.0))
        return found

    def predict(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of client i's model on its rows."""
        table, _ = padded([r.numpy() for r in rows])
        if not table.numel():
            return [torch.zeros(0, cohort.source.outputs) for _ in rows]
        home = self.place.cohort(cohort)
        state, table = self.place.tensors(tree.tensors(models)), table.to(home.source.x.device)
        parts = torch.split(table, rows_at_once(home.source, len(rows)), dim=1)
        with self.place.calculating():
            found = [vmap(home.model)(state, home.source.take(part)).to(HOST) for part in parts]
        outputs = torch.cat(found, dim=1)
        return [outputs[i, : len(r)] for i, r in enumerate(rows)]

    def predict_all(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> Tensor:
        """Returns the outputs of every client's model on the same rows."""
        if not len(rows):
            return torch.zeros(models.batch_size[0], 0, source.outputs)
        source, model = self.place.source(source), self.place.cohort(cohort).model
        state = self.place.tensors(tree.tensors(models))
        parts = torch.split(rows.to(source.x.device), rows_at_once(source, models.batch_size[0]))
        with self.place.calculating():
            found = [vmap(model, in_dims=(0, None))(state, source.take(part)).to(HOST) for part in parts]
        return torch.cat(found, dim=1)


def _apply(
    function: ClientFunction,
    cohort: Cohort,
    states: dict[str, Tensor],
    received: dict[str, Tensor],
    each: bool,
) -> list[dict[str, Tensor]]:
    parts = 0

    def one(position: Tensor, state: dict[str, Tensor], message: dict[str, Tensor]) -> dict[str, Tensor]:
        nonlocal parts
        found = function(Client(cohort, position), tree.nest(state.items()), tree.nest(message.items()))
        parts = len(found)
        # The position is returned too, so that a function with nothing to return is still mapped.
        return {
            "position": position,
            **{f"{i}:{p}": t for i, part in enumerate(found) for p, t in tree.leaves(part)},
        }

    positions = torch.arange(len(cohort.ids), device=HOST)  # looked at, not calculated with
    flat = vmap(one, in_dims=(0, 0 if states else None, 0 if each else None))(positions, states, received)
    out: list[dict[str, Tensor]] = [{} for _ in range(parts)]
    for key, tensor in flat.items():
        part, colon, path = key.partition(":")
        if colon:
            out[int(part)][path] = tensor
    return out
