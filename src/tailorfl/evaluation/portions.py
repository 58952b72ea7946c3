"""How many clients and samples an evaluation looks at together: what memory holds, and is fastest."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from tailorfl.data.source import Source
from tailorfl.models.functional import Model
from tailorfl.partition.rows import Ints, Rows
from tailorfl.rounds.groups import Group
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.cohort import rows_at_once

MODEL_BYTES = 32 * 2**20
"""Bytes of the models of one portion of clients."""
LAYER_BYTES = 16 * 2**20
"""Bytes that a layer's outputs may take in one forward pass. Memory in larger pieces comes fresh from the system for
every layer, which for a convolution costs twice its arithmetic."""
OUTPUT_BYTES = 64 * 2**20
"""Bytes of the outputs of one portion of clients on a common test set."""
FEWEST, MOST = 4, 2048
EVAL_BATCH_SIZE = 160
"""Samples of a common test set that go through a model in one pass, as long as its layers fit."""
PADDING = 2.0
"""Clients are looked at together as long as padding makes this many times their samples at most."""


class Portions:
    """Sizes of portions for the models and data of a simulation."""

    def __init__(self, sim: Simulation) -> None:
        source = sim.federation.source
        self._widths = {id(group.model): _widest_layer(group, source) for group in sim.groups}
        self._largest = max(sum(group.model.sizes.values()) for group in sim.groups)
        self._source = source

    def rows(self, model: Model, clients: int) -> int:
        """How many samples of each of `clients` clients go through their models in one pass."""
        return max(1, LAYER_BYTES // (4 * clients * self._widths[id(model)]))

    def clients(self, samples: float, common: int) -> int:
        """How many clients' models are made and looked at together.

        `own` is the mean number of samples of a client, `common` the number of those that all models see.
        """
        together = max(1.0, samples)
        fitting = min(
            MODEL_BYTES // (4 * self._largest),
            int(LAYER_BYTES / (4 * together * max(self._widths.values()))),
            int(rows_at_once(self._source) / together),
            OUTPUT_BYTES // (4 * max(1, common) * self._source.outputs),
        )
        if common:
            # Many samples of few models rather than few samples of many: layers are at their best there.
            block = 4 * min(common, EVAL_BATCH_SIZE) * max(self._widths.values())
            return min(max(min(fitting, LAYER_BYTES // block), 1), MOST)
        return min(max(fitting, FEWEST), MOST)


def _widest_layer(group: Group, source: Source) -> int:
    """Return the most numbers that a layer with parameters hands on of one sample, pooled where it pools them."""
    widths = [1]

    def note(_: nn.Module, __: object, output: object) -> None:
        if isinstance(output, Tensor):
            widths.append(output.numel())

    sample = source.take(torch.zeros(1, dtype=torch.int64))
    with torch.no_grad(), group.model.bound(tree.tensors(group.context.init)) as module:
        hooks = [m.register_forward_hook(note) for m in module.modules() if m._parameters]
        try:
            module(sample)
        finally:
            for hook in hooks:
                hook.remove()
    return max(widths)


def alike(sizes: Ints) -> list[Ints]:
    """Positions of clients that can be looked at together without much padding, all of them where that is none."""
    if len(sizes) * sizes.max(initial=0) <= PADDING * sizes.sum():
        return [np.arange(len(sizes))]
    order = np.argsort(-sizes, kind="stable")
    out, start = [], 0
    so_far = np.concatenate([[0], np.cumsum(sizes[order])])
    for end in range(1, len(order) + 1):
        if end == len(order) or (end + 1 - start) * sizes[order[start]] > PADDING * (
            so_far[end + 1] - so_far[start]
        ):
            out.append(order[start:end])
            start = end
    return out


def tensors(rows: Rows) -> list[Tensor]:
    """Return the rows of every client as a tensor."""
    return [torch.from_numpy(own_rows) for own_rows in rows]
