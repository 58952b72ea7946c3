"""How models are judged on samples: what is found for every sample, and the loss and metrics that follow from it.

Judging has two steps, so that what is found of several clients' samples together can be taken apart again: a judge
finds a tensor [samples, ...] for a model and rows of a source, and makes numbers of any parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.core.answers import Memory, Shown
from tailorfl.core.method import Method
from tailorfl.data.source import Source
from tailorfl.engines.base import Engine, Inference
from tailorfl.evaluation.calibration import further_parts
from tailorfl.evaluation.features import features
from tailorfl.evaluation.generation import earned, teacher_forced
from tailorfl.evaluation.metrics import compute_parts, credited
from tailorfl.evaluation.parts import means
from tailorfl.evaluation.portions import Portions, alike
from tailorfl.partition.rows import spread_indices
from tailorfl.settings.eval import GenerationConfig
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort, rows_at_once
from tailorfl.training.objective import LOSSES, SAMPLE_LOSSES


class Judge(Protocol):
    """What an evaluation asks; `models` are [clients, ...] in the order of the cohort, `rows` rows of a source."""

    def own(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return what is found of every client's model on its own rows of the cohort's source, [rows, ...] each."""

    def common(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> list[Tensor]:
        """Return what is found of every client's model on the same rows, [rows, ...] each."""

    def shared(
        self, cohort: Cohort, model: TensorDict, source: Source, rows: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return what is found of ONE model on several lists of rows, [rows, ...] each."""

    def numbers(
        self, outputs: Sequence[Tensor], source: Source, rows: Sequence[Tensor]
    ) -> dict[str, list[float]]:
        """Return the loss and the metrics on several lists of rows of a source, by name one a list."""


def make_judge(
    engine: Engine,
    task: str,
    generation: GenerationConfig,
    portions: Portions,
    method: Method,
    further: Sequence[str] = (),
) -> Judge:
    """Return the judge of a task and a method.

    `further` are metrics out of `tailorfl.evaluation.calibration.FURTHER`.
    """
    if task == "generation":
        return Texts(engine, generation)
    return (
        Answers(engine, portions, method, further) if method.answers else Outputs(engine, portions, further)
    )


class Outputs:
    """Judges by the outputs of models."""

    def __init__(self, engine: Engine, portions: Portions, further: Sequence[str] = ()) -> None:
        self.engine, self.portions, self.further = engine, portions, tuple(further)

    def own(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """[rows, outputs] of every client."""
        together = alike(np.array([len(r) for r in rows], dtype=np.int64))
        if len(together) == 1:
            return self.engine.predict(Inference(cohort.model, models, cohort.source, rows))
        by_client: list[Tensor] = [torch.empty(0)] * len(rows)
        for positions in together:
            own_rows = [rows[k] for k in positions]
            some = Inference(cohort.model, models[torch.from_numpy(positions)], cohort.source, own_rows)
            for k, outputs in zip(positions, self.engine.predict(some), strict=True):
                by_client[k] = outputs
        return by_client

    def shared(
        self, cohort: Cohort, model: TensorDict, source: Source, rows: Sequence[Tensor]
    ) -> list[Tensor]:
        """[rows, outputs] of every list."""
        outputs = Outputs.common(self, cohort, model.unsqueeze(0), source, torch.cat(list(rows)))[0]
        return list(torch.split(outputs, [len(r) for r in rows]))

    def numbers(
        self, found: Sequence[Tensor], source: Source, rows: Sequence[Tensor]
    ) -> dict[str, list[float]]:
        """Return the loss and the task's metrics, and `rouge1` where answers earn credit."""
        sizes = [len(r) for r in rows]
        outputs, y = torch.cat(list(found)), source.targets(torch.cat(list(rows)))
        measured = compute_parts(source.task, outputs, y, sizes)
        measured |= further_parts(source.task, outputs, y, sizes, self.further)
        numbers = {"loss": _losses(source.task, outputs, y, sizes)}
        numbers |= {n: v.tolist() for n, v in measured.items()}
        if source.credit is not None:
            numbers["rouge1"] = [credited(f, source.credit[r]) for f, r in zip(found, rows, strict=True)]
        return numbers

    def common(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> list[Tensor]:
        """[rows, outputs] of every client, the rows in blocks of nearly equal size."""
        blocks = -(-len(rows) // self.portions.rows(cohort.model, models.batch_size[0]))
        inference = Inference(cohort.model, models, source, rows)
        parts = [replace(inference, rows=part) for part in torch.tensor_split(rows, max(1, blocks))]
        return inference.joined([self.engine.predict(part) for part in parts])


class Answers(Outputs):
    """Judges by what a method makes of the outputs of deployed models and of their clients' own samples."""

    def __init__(
        self, engine: Engine, portions: Portions, method: Method, further: Sequence[str] = ()
    ) -> None:
        super().__init__(engine, portions, further)
        self.method = method
        self.known: tuple[TensorDict, list[nn.Module]] | None = None
        """The models that were asked last, and what makes the answers of each."""

    def own(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """[rows, outputs] of every client."""
        return self._answered(cohort, models, super().own(cohort, models, rows), cohort.source, rows)

    def common(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> list[Tensor]:
        """[rows, outputs] of every client."""
        outputs = super().common(cohort, models, source, rows)
        return self._answered(cohort, models, outputs, source, [rows] * len(outputs))

    def answering(self, cohort: Cohort, models: TensorDict) -> list[nn.Module]:
        """Return what makes the answers of every client's model, see `Method.answering`."""
        if self.known is None or self.known[0] is not models:
            of_train, of_val = (
                self._seen(cohort, models, [torch.from_numpy(r) for r in part])
                for part in (cohort.members, cohort.val)
            )
            memories = [Memory(*a, *b) for a, b in zip(of_train, of_val, strict=True)]
            self.known = models, [self.method.answering(memory) for memory in memories]
        return self.known[1]

    def _answered(
        self,
        cohort: Cohort,
        models: TensorDict,
        outputs: Sequence[Tensor],
        source: Source,
        rows: Sequence[Tensor],
    ) -> list[Tensor]:
        """Return what the method answers on rows of each client, of which the models make `outputs`."""
        return [
            answer(found, features(cohort.model, models[k], source, rows[k])) if len(found) else found
            for k, (found, answer) in enumerate(zip(outputs, self.answering(cohort, models), strict=True))
        ]

    def _seen(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[tuple[Shown, Tensor]]:
        """Return what each model makes of rows of its client, and their targets."""
        source = cohort.source
        return [
            (Shown(outputs, features(cohort.model, models[k], source, rows[k])), source.targets(rows[k]))
            for k, outputs in enumerate(super().own(cohort, models, rows))
        ]


def _losses(task: str, outputs: Tensor, y: Tensor, sizes: Sequence[int]) -> list[float]:
    """Return the loss of every part, NaN of an empty one."""
    of_samples = SAMPLE_LOSSES.get(task)
    if of_samples is not None:
        values = of_samples(outputs, y).double().numpy()
        losses: list[float] = means(values, np.array(sizes, dtype=np.int64)).tolist()
        return losses
    parts = zip(torch.split(outputs, list(sizes)), torch.split(y, list(sizes)), strict=True)
    return [float(LOSSES[task](f, t, None)) if len(f) else float("nan") for f, t in parts]


class Texts:
    """Judges a generation task: by each token given the right ones before it, and by the texts that come out.

    The logits of a whole vocabulary for every token of a test set would not fit, so they are dropped batch by batch.
    What is kept of a sample is (loss, right tokens, tokens, ROUGE-1 precision, recall, F1), the last three NaN where no
    text was generated.
    """

    def __init__(self, engine: Engine, settings: GenerationConfig) -> None:
        self.engine, self.settings = engine, settings

    def own(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """[rows, 6] of every client."""
        step, source = rows_at_once(cohort.source, len(rows)), cohort.source
        blocks: list[list[Tensor]] = [[] for _ in rows]
        for start in range(0, max(len(r) for r in rows), step):
            parts = [r[start : start + step] for r in rows]
            outputs = self.engine.predict(Inference(cohort.model, models, source, parts))
            for forced, some, part in zip(blocks, outputs, parts, strict=True):
                forced.append(teacher_forced(some, source.y[part]))
        return [
            torch.cat([_joined(forced), self._texts(cohort, models, k, source, r)], dim=1)
            for k, (forced, r) in enumerate(zip(blocks, rows, strict=True))
        ]

    def common(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> list[Tensor]:
        """[rows, 6] of every client."""
        forced = self._forced(cohort, models, source, rows)
        return [
            torch.cat([tokens, self._texts(cohort, models, k, source, rows)], dim=1)
            for k, tokens in enumerate(forced)
        ]

    def shared(
        self, cohort: Cohort, model: TensorDict, source: Source, rows: Sequence[Tensor]
    ) -> list[Tensor]:
        """[rows, 6] of every list."""
        models = model.unsqueeze(0)
        forced = self._forced(cohort, models, source, torch.cat(list(rows)))[0]
        parts = torch.split(forced, [len(r) for r in rows])
        return [
            torch.cat([tokens, self._texts(cohort, models, 0, source, r)], dim=1)
            for tokens, r in zip(parts, rows, strict=True)
        ]

    def numbers(
        self, by_list: Sequence[Tensor], source: Source, rows: Sequence[Tensor]
    ) -> dict[str, list[float]]:
        """Return the loss and the task's metrics."""
        outputs, sizes = torch.cat(list(by_list)), [len(f) for f in by_list]
        losses = [float(f[:, 0].mean()) if len(f) else float("nan") for f in by_list]
        measured = compute_parts(source.task, outputs[:, 1:], source.targets(torch.cat(list(rows))), sizes)
        return {"loss": losses, **{name: values.tolist() for name, values in measured.items()}}

    def _forced(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> list[Tensor]:
        """[rows, 3] of every client's model."""
        clients = models.batch_size[0]
        blocks: list[list[Tensor]] = [[] for _ in range(clients)]
        for part in torch.split(rows, rows_at_once(source, clients)):
            outputs = self.engine.predict(Inference(cohort.model, models, source, part))
            for of_client, some in zip(blocks, outputs, strict=True):
                of_client.append(teacher_forced(some, source.y[part]))
        return [_joined(of_client) for of_client in blocks]

    def _texts(self, cohort: Cohort, models: TensorDict, k: int, source: Source, rows: Tensor) -> Tensor:
        """[rows, 3] of the texts of model `k`."""
        scores = torch.full((len(rows), 3), float("nan"))
        chosen = torch.tensor(spread_indices(len(rows), self.settings.samples), dtype=torch.int64)
        if len(chosen):
            state = {name: tensor[k] for name, tensor in tree.tensors(models).items()}
            scores[chosen] = earned(cohort.model, state, source, rows[chosen], self.settings)
        return scores


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, 3)
