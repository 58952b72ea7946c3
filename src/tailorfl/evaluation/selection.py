"""The personal model of every client's best validation round (`eval.select: val`).

From the evaluated rounds each client keeps the model with its best validation score: the task's primary metric, for
ties the lower loss, then the earlier round. If the metric is not defined on a client's validation part, only the loss
decides; a client without validation samples keeps the last model. Test samples are never used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.engines.state import StateStore
from tailorfl.errors import ConfigError
from tailorfl.evaluation.metrics import LOWER_IS_BETTER, primary
from tailorfl.rounds.groups import by_group
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.train import PrivacyLevel

PREFIX = "selected/"
"""Prefix of the selection's tensors in a checkpoint."""


@dataclass(frozen=True)
class RoundChoice:
    """The model that a client has chosen: its round and validation score."""

    round: int
    value: float
    """The primary metric; NaN if it is not defined."""
    loss: float

    def beats(self, current: RoundChoice, lower_is_better: bool) -> bool:
        """Return whether this model, of a later round, replaces the current one."""
        if math.isnan(self.loss) or math.isnan(current.loss):
            return math.isnan(current.loss)  # no validation samples, or a model that has diverged
        if self.value == current.value or math.isnan(self.value) or math.isnan(current.value):
            return self.loss < current.loss
        return self.value < current.value if lower_is_better else self.value > current.value


def refuse_private(level: PrivacyLevel | None) -> None:
    """Raise ConfigError under sample-level privacy, which a choice by validation samples would break."""
    if level == "sample":
        raise ConfigError(
            "eval.select=val chooses personal models by the validation samples of their client without noise, which "
            "sample-level privacy does not cover; set eval.select=last, or train.dp.level=client, which protects only "
            "what clients send"
        )


class Selection:
    """The models that training clients have chosen so far.

    `folder` is where the models are memory-mapped; None keeps them in memory. `metric` decides, by default the primary
    one.

    Raises:
        ConfigError: sample-level privacy, or no client has validation samples.
    """

    def __init__(self, sim: Simulation, folder: Path | None = None, metric: str | None = None) -> None:
        refuse_private(sim.level)
        if not sim.federation.sizes("val")[: sim.federation.num_clients].any():
            raise ConfigError(
                "eval.select=val needs validation samples, but no client has any; give the validation part a share in "
                "data.split, such as {train: 0.7, val: 0.1, test: 0.2}, or set eval.select=last"
            )
        self.metric = metric or primary(sim.federation.source.task)[0]
        self._groups = sim.groups
        self._models = {g.name: StateStore(g.context.init, folder) for g in sim.groups}
        self.choices: dict[int, RoundChoice] = {}
        """Choice of each client."""

    def update(
        self, ids: Sequence[int], models: TensorDict, scores: Mapping[str, Sequence[float]], round: int
    ) -> TensorDict:
        """Update the choices of clients of one architecture with `models` [clients, ...], and return the chosen models.

        `scores` has the deciding metric and the loss of each client on its validation part.
        """
        lower, better = self.metric in LOWER_IS_BETTER, []
        for k, (client, value, loss) in enumerate(zip(ids, scores[self.metric], scores["loss"], strict=True)):
            new = RoundChoice(round, value, loss)
            if client not in self.choices or new.beats(self.choices[client], lower):
                self.choices[client] = new
                better.append(k)
        self._store(ids).put([ids[k] for k in better], models[torch.tensor(better, dtype=torch.int64)])
        return self.models(ids)

    def models(self, ids: Sequence[int]) -> TensorDict:
        """Return the chosen models of clients of one architecture, [clients, ...]."""
        return self._store(ids).get(ids)

    def _store(self, ids: Sequence[int]) -> StateStore:
        ((group, _),) = by_group(self._groups, ids)
        return self._models[group.name]

    def summary(self) -> dict[str, Any]:
        """Return the data and metric of the choice, and the mean, first and last of the chosen rounds."""
        rounds = [choice.round for choice in self.choices.values()]
        return {
            "by": "val",
            "metric": self.metric,
            "round": sum(rounds) / len(rounds),
            "first": min(rounds),
            "last": max(rounds),
        }

    def csv(self) -> str:
        """Return a CSV table with a row for every client: the chosen round and its validation score."""
        import pandas as pd

        rows = [
            {"client": client, "round": c.round, f"val/{self.metric}": c.value, "val/loss": c.loss}
            for client, c in sorted(self.choices.items())
        ]
        return str(pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))

    # -- checkpoints ----------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Tensor]:
        """Return all choices and models as named tensors, from which `load` continues exactly."""
        chosen = sorted(self.choices.items())
        tensors = {
            f"{PREFIX}clients": torch.tensor([client for client, _ in chosen], dtype=torch.int64),
            f"{PREFIX}rounds": torch.tensor([c.round for _, c in chosen], dtype=torch.int64),
            f"{PREFIX}scores": torch.tensor([[c.value, c.loss] for _, c in chosen], dtype=torch.float64),
        }
        for name, store in self._models.items():
            tensors |= {f"{PREFIX}models/{name}/{p}": t for p, t in store.dump().items()}
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the selection from what `dump` returned; other tensors are ignored."""
        ids, rounds = (tensors[f"{PREFIX}{n}"].tolist() for n in ("clients", "rounds"))
        scores = tensors[f"{PREFIX}scores"].tolist()
        self.choices = {i: RoundChoice(r, *s) for i, r, s in zip(ids, rounds, scores, strict=True)}
        for name, store in self._models.items():
            prefix = f"{PREFIX}models/{name}/"
            store.load({p.removeprefix(prefix): t for p, t in tensors.items() if p.startswith(prefix)})
