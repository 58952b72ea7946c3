"""The vectorized engine: a chunk of clients trains together under `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.func import vmap

from tailorfl.core import tree
from tailorfl.core.client import Client
from tailorfl.core.cohort import Cohort, padded, rows_at_once
from tailorfl.data.source import Source
from tailorfl.engines.base import ClientFunction, Parts, Stacked

CHUNK_BYTES = 8 * 2**20
"""Bytes of the parameters of one chunk, when the chunk size is chosen here: what memory holds comfortably."""


class Vectorized:
    """Cuts a cohort into chunks of clients of similar size and maps each chunk at once.

    Args:
        chunk: clients a chunk; None chooses by the size of the model.
    """

    name = "vectorized"

    def __init__(self, chunk: int | None = None) -> None:
        self.chunk = chunk

    def chunk_of(self, cohort: Cohort) -> int:
        """Returns how many clients train together."""
        if self.chunk is not None:
            return self.chunk
        # A frozen backbone is not copied for each client, but what it computes in between is.
        scalars = cohort.model.scalars + cohort.model.held_scalars
        return int(np.clip(CHUNK_BYTES // (4 * scalars), 4, 128))

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
        order = np.argsort(-cohort.sizes, kind="stable")
        out = Stacked(len(order))
        for start in range(0, len(order), self.chunk_of(cohort)):
            positions = order[start : start + self.chunk_of(cohort)]
            chosen = torch.from_numpy(positions)
            part = cohort.part(positions.tolist())
            mine = {p: t.index_select(0, chosen) for p, t in state_leaves.items()}
            theirs = received_leaves
            if index is not None:
                theirs = {p: t[index[chosen]] for p, t in received_leaves.items()}
            out.put(chosen, _apply(function, part, mine, theirs, index is not None))
        return out.parts()

    def predict(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs of client i's model on its rows."""
        table, _ = padded([r.numpy() for r in rows])
        if not table.numel():
            return [torch.zeros(0, cohort.source.outputs) for _ in rows]
        state = tree.tensors(models)
        parts = torch.split(table, rows_at_once(cohort.source, len(rows)), dim=1)
        outputs = torch.cat([vmap(cohort.model)(state, cohort.source.take(part)) for part in parts], dim=1)
        return [outputs[i, : len(r)] for i, r in enumerate(rows)]

    def predict_all(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> Tensor:
        """Returns the outputs of every client's model on the same rows."""
        if not len(rows):
            return torch.zeros(models.batch_size[0], 0, source.outputs)
        state = tree.tensors(models)
        parts = torch.split(rows, rows_at_once(source, models.batch_size[0]))
        return torch.cat(
            [vmap(cohort.model, in_dims=(0, None))(state, source.take(part)) for part in parts], dim=1
        )


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

    positions = torch.arange(len(cohort.ids))
    flat = vmap(one, in_dims=(0, 0 if states else None, 0 if each else None))(positions, states, received)
    out: list[dict[str, Tensor]] = [{} for _ in range(parts)]
    for key, tensor in flat.items():
        part, colon, path = key.partition(":")
        if colon:
            out[int(part)][path] = tensor
    return out
