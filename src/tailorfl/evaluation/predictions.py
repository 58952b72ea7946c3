"""Predictions of deployed models on their clients' own samples, recorded during an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tailorfl.data.source import Source
from tailorfl.partition.rows import Ints


@dataclass(frozen=True)
class Predictions:
    """Outputs and targets of single samples, of one client after another.

    Attributes:
        task: of the source.
        client: int64 [samples], the client of each sample.
        row: int64 [samples], rows of the source.
        y: [samples, ...], the targets.
        outputs: float32 [samples, outputs] of the client's deployed model; logits for classes.
    """

    task: str
    client: Ints
    row: Ints
    y: NDArray[Any]
    outputs: NDArray[np.float32]

    def of(self, client: int) -> Predictions:
        """Return the predictions of one client."""
        return self.at(self.client == client)

    def at(self, samples: Ints | NDArray[np.bool_]) -> Predictions:
        """Return the predictions at some positions, or where a mask is true."""
        client, row = self.client[samples], self.row[samples]
        return Predictions(self.task, client, row, self.y[samples], self.outputs[samples])


class Kept:
    """Records predictions of deployed models on clients' own parts.

    Args:
        deployed: "personal" or "global", the model that clients deploy.
        parts: the recorded parts, of "local" (test) and "val".
    """

    def __init__(self, deployed: str, parts: Sequence[str]) -> None:
        self.deployed, self.parts = deployed, tuple(parts)
        self._found: dict[str, list[Predictions]] = {part: [] for part in self.parts}

    def note(
        self,
        model: str,
        part: str,
        ids: Sequence[int],
        found: Sequence[Tensor],
        source: Source,
        rows: Sequence[Tensor],
    ) -> None:
        """Record every client's outputs on its rows of a part, if the model is deployed and the part is recorded."""
        if model != self.deployed or part not in self.parts:
            return
        for client, outputs, own_rows in zip(ids, found, rows, strict=True):
            if not len(own_rows):
                continue
            flat = outputs.detach().cpu().float().numpy().reshape(len(own_rows), -1)
            y, samples = source.targets(own_rows).cpu().numpy(), own_rows.numpy()
            owners = np.full_like(samples, client)
            self._found[part].append(Predictions(source.task, owners, samples, y, flat))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded yet."""
        return not any(self._found.values())

    def part(self, name: str) -> Predictions:
        """Return the recorded predictions of a part, in the order of clients."""
        noted = sorted(self._found[name], key=lambda predictions: int(predictions.client[0]))
        if not noted:
            none = np.empty(0, dtype=np.int64)
            return Predictions("", none, none, none, np.empty((0, 1), dtype=np.float32))
        columns = zip(*((p.client, p.row, p.y, p.outputs) for p in noted), strict=True)
        return Predictions(noted[0].task, *map(np.concatenate, columns))
