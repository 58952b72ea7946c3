"""What deployed models say of their clients' own samples, noted while an evaluation looks at them."""

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
    """Outputs and targets of single samples, of many clients behind one another.

    Attributes:
        task: of the source.
        client: int64 [samples], whose they are.
        row: int64 [samples], which samples of the source.
        y: [samples, ...], the targets.
        outputs: float32 [samples, outputs], of the client's deployed model: of classes logits.
    """

    task: str
    client: Ints
    row: Ints
    y: NDArray[Any]
    outputs: NDArray[np.float32]

    def of(self, client: int) -> Predictions:
        """Return those of one client."""
        return self.at(self.client == client)

    def at(self, samples: Ints | NDArray[np.bool_]) -> Predictions:
        """Return those at some places, or where a mask is true."""
        client, row = self.client[samples], self.row[samples]
        return Predictions(self.task, client, row, self.y[samples], self.outputs[samples])


class Kept:
    """Notes what deployed models say of clients' own parts.

    Args:
        deployed: "personal" or "global", the records' model that clients deploy.
        parts: which of "local" (test) and "val" are noted.
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
        """Take what was found of every client on its rows of a part, where it is of deployed models and wanted."""
        if model != self.deployed or part not in self.parts:
            return
        for client, outputs, own_rows in zip(ids, found, rows, strict=True):
            if not len(own_rows):
                continue
            flat = outputs.detach().cpu().float().numpy().reshape(len(own_rows), -1)
            owners = np.full(len(own_rows), client, dtype=np.int64)
            y = source.targets(own_rows).cpu().numpy()
            self._found[part].append(Predictions(source.task, owners, own_rows.numpy(), y, flat))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was noted yet."""
        return not any(self._found.values())

    def part(self, name: str) -> Predictions:
        """Return what was noted of a part, in the order of clients."""
        noted = sorted(self._found[name], key=lambda predictions: int(predictions.client[0]))
        if not noted:
            none = np.empty(0, dtype=np.int64)
            return Predictions("", none, none, none, np.empty((0, 1), dtype=np.float32))
        columns = zip(*((p.client, p.row, p.y, p.outputs) for p in noted), strict=True)
        return Predictions(noted[0].task, *map(np.concatenate, columns))
