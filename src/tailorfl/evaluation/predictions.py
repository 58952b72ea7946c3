"""What deployed models say of their clients' own samples, noted while an evaluation looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tailorfl.data.rows import Ints
from tailorfl.data.source import Source


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
        mine = self.client == client
        return Predictions(self.task, self.client[mine], self.row[mine], self.y[mine], self.outputs[mine])


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
        for client, outputs, mine in zip(ids, found, rows, strict=True):
            if not len(mine):
                continue
            said = outputs.detach().cpu().float().numpy().reshape(len(mine), -1)
            whose = np.full(len(mine), client, dtype=np.int64)
            self._found[part].append(
                Predictions(source.task, whose, mine.numpy(), source.targets(mine).cpu().numpy(), said)
            )

    @property
    def is_empty(self) -> bool:
        """Whether nothing was noted yet."""
        return not any(self._found.values())

    def part(self, name: str) -> Predictions:
        """Return what was noted of a part, in the order of clients."""
        found = sorted(self._found[name], key=lambda one: int(one.client[0]))
        if not found:
            none = np.empty(0, dtype=np.int64)
            return Predictions("", none, none, none, np.empty((0, 1), dtype=np.float32))
        client, row, y, outputs = zip(
            *((one.client, one.row, one.y, one.outputs) for one in found), strict=True
        )
        return Predictions(found[0].task, *map(np.concatenate, (client, row, y, outputs)))
