"""How models are judged on samples: what is found for every sample, and the loss and metrics that follow from it.

Judging has two steps, so that what is found of several clients' samples together can be taken apart again: a judge
finds a tensor [samples, ...] for a model and rows of a source, and makes numbers of any part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.cohort import Cohort, rows_at_once
from tailorfl.core.objective import LOSSES
from tailorfl.data.source import Source
from tailorfl.data.thinning import thinned
from tailorfl.engines.base import Engine
from tailorfl.evaluation.generation import Generation, earned, teacher_forced
from tailorfl.evaluation.metrics import compute, credited


class Judge(Protocol):
    """What an evaluation asks; `models` are [clients, ...] in the order of the cohort, `rows` rows of a source."""

    def own(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """What is found of every client's model on its own rows of the cohort's source, [rows, ...] each."""

    def common(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> list[Tensor]:
        """What is found of every client's model on the same rows, [rows, ...] each."""

    def shared(
        self, cohort: Cohort, model: TensorDict, source: Source, rows: Sequence[Tensor]
    ) -> list[Tensor]:
        """What is found of ONE model on several lists of rows, [rows, ...] each."""

    def numbers(self, found: Tensor, source: Source, rows: Tensor) -> dict[str, float]:
        """The loss and the metrics of what was found on rows of a source."""


def make_judge(engine: Engine, task: str, generation: Generation) -> Judge:
    """The judge of a task."""
    return Texts(engine, generation) if task == "generation" else Outputs(engine)


class Outputs:
    """Judges by the outputs of models."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def own(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """[rows, outputs] of every client."""
        return self.engine.predict(cohort, models, rows)

    def common(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> list[Tensor]:
        """[rows, outputs] of every client."""
        return list(self.engine.predict_all(cohort, models, source, rows))

    def shared(
        self, cohort: Cohort, model: TensorDict, source: Source, rows: Sequence[Tensor]
    ) -> list[Tensor]:
        """[rows, outputs] of every list."""
        outputs = self.engine.predict_all(cohort, model.unsqueeze(0), source, torch.cat(list(rows)))[0]
        return list(torch.split(outputs, [len(r) for r in rows]))

    def numbers(self, found: Tensor, source: Source, rows: Tensor) -> dict[str, float]:
        """The loss and the task's metrics, and `rouge1` where answers earn credit."""
        y = source.y[rows]
        loss = float(LOSSES[source.task](found, y, None)) if len(found) else float("nan")
        numbers = {"loss": loss, **compute(source.task, found, y)}
        if source.credit is not None:
            numbers["rouge1"] = credited(found, source.credit[rows])
        return numbers


class Texts:
    """Judges a generation task: by each token given the right ones before it, and by the texts that come out.

    The logits of a whole vocabulary for every token of a test set would not fit, so they are dropped batch by batch.
    What is kept of a sample is (loss, right tokens, tokens, ROUGE-1 precision, recall, F1), the last three NaN where no
    text was generated.
    """

    def __init__(self, engine: Engine, settings: Generation) -> None:
        self.engine, self.settings = engine, settings

    def own(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """[rows, 6] of every client."""
        step, source = rows_at_once(cohort.source, len(rows)), cohort.source
        found: list[list[Tensor]] = [[] for _ in rows]
        for start in range(0, max(len(r) for r in rows), step):
            parts = [r[start : start + step] for r in rows]
            outputs = self.engine.predict(cohort, models, parts)
            for mine, some, part in zip(found, outputs, parts, strict=True):
                mine.append(teacher_forced(some, source.y[part]))
        return [
            torch.cat([_joined(mine), self._texts(cohort, models, k, source, r)], dim=1)
            for k, (mine, r) in enumerate(zip(found, rows, strict=True))
        ]

    def common(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> list[Tensor]:
        """[rows, 6] of every client."""
        forced = self._forced(cohort, models, source, rows)
        return [
            torch.cat([mine, self._texts(cohort, models, k, source, rows)], dim=1)
            for k, mine in enumerate(forced)
        ]

    def shared(
        self, cohort: Cohort, model: TensorDict, source: Source, rows: Sequence[Tensor]
    ) -> list[Tensor]:
        """[rows, 6] of every list."""
        models = model.unsqueeze(0)
        forced = self._forced(cohort, models, source, torch.cat(list(rows)))[0]
        parts = torch.split(forced, [len(r) for r in rows])
        return [
            torch.cat([mine, self._texts(cohort, models, 0, source, r)], dim=1)
            for mine, r in zip(parts, rows, strict=True)
        ]

    def numbers(self, found: Tensor, source: Source, rows: Tensor) -> dict[str, float]:
        """The loss and the task's metrics."""
        loss = float(found[:, 0].mean()) if len(found) else float("nan")
        return {"loss": loss, **compute(source.task, found[:, 1:], source.y[rows])}

    def _forced(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> list[Tensor]:
        """[rows, 3] of every client's model."""
        clients = models.batch_size[0]
        found: list[list[Tensor]] = [[] for _ in range(clients)]
        for part in torch.split(rows, rows_at_once(source, clients)):
            outputs = self.engine.predict_all(cohort, models, source, part)
            for mine, some in zip(found, outputs, strict=True):
                mine.append(teacher_forced(some, source.y[part]))
        return [_joined(mine) for mine in found]

    def _texts(self, cohort: Cohort, models: TensorDict, k: int, source: Source, rows: Tensor) -> Tensor:
        """[rows, 3] of the texts of model `k`."""
        found = torch.full((len(rows), 3), float("nan"))
        chosen = torch.tensor(thinned(len(rows), self.settings.samples), dtype=torch.int64)
        if len(chosen):
            state = {name: tensor[k] for name, tensor in tree.tensors(models).items()}
            found[chosen] = earned(cohort.model, state, source, rows[chosen], self.settings)
        return found


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, 3)
