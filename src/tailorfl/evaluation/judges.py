"""How models are judged on samples: what is found for every sample, and the loss and metrics that follow from it.

Judging has two steps, so that what is found of several clients' samples together can be taken apart again: a judge
finds a tensor [samples, ...] for a model and rows of a source, and makes numbers of any parts of it. How many clients
and samples are looked at together is what memory holds, and is fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.core.answers import Memory, Shown
from tailorfl.core.method import Method
from tailorfl.data.source import Source
from tailorfl.engines.base import Engine, Inference
from tailorfl.evaluation.calibration import further_parts
from tailorfl.evaluation.further_measures import features
from tailorfl.evaluation.generation import Texts
from tailorfl.evaluation.metrics import compute_parts, credited, part_means
from tailorfl.models.functional import Model
from tailorfl.partition.rows import Ints
from tailorfl.rounds.groups import Group
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.eval import GenerationConfig
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort, rows_at_once
from tailorfl.training.objective import LOSSES, SAMPLE_LOSSES

MODEL_BYTES = 32 * 2**20
"""Bytes of the models of one portion of clients."""
LAYER_BYTES = 16 * 2**20
"""Bytes that a layer's outputs may take in one forward pass. Memory in larger pieces comes fresh from the system for
every layer, which for a convolution costs twice its arithmetic."""
OUTPUT_BYTES = 64 * 2**20
"""Bytes of the outputs of one portion of clients on a common test set."""
FEWEST_CLIENTS, MOST_CLIENTS = 4, 2048
"""Of one portion."""
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

        `samples` is the mean number of samples of a client, `common` the number of those that all models see.
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
            return min(max(min(fitting, LAYER_BYTES // block), 1), MOST_CLIENTS)
        return min(max(fitting, FEWEST_CLIENTS), MOST_CLIENTS)


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


def make_judge(
    engine: Engine,
    task: str,
    generation: GenerationConfig,
    portions: Portions,
    method: Method,
    further: Sequence[str] = (),
) -> Outputs | Texts:
    """Return the judge of a task and a method.

    `further` are metrics out of `tailorfl.evaluation.calibration.FURTHER`.
    """
    if task == "generation":
        return Texts(engine, generation)
    return (
        Answers(engine, portions, method, further) if method.answers else Outputs(engine, portions, further)
    )


class Outputs:
    """Judges by the outputs of models; `models` are [clients, ...] in the order of the cohort, `rows` of a source."""

    def __init__(self, engine: Engine, portions: Portions, further: Sequence[str] = ()) -> None:
        self.engine, self.portions, self.further = engine, portions, tuple(further)

    def own(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return what is found of every client's model on its own rows of the cohort's source, [rows, outputs] each."""
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
        """Return what is found of ONE model on several lists of rows, [rows, outputs] each."""
        outputs = Outputs.common(self, cohort, model.unsqueeze(0), source, torch.cat(list(rows)))[0]
        return list(torch.split(outputs, [len(r) for r in rows]))

    def numbers(
        self, found: Sequence[Tensor], source: Source, rows: Sequence[Tensor]
    ) -> dict[str, list[float]]:
        """Return the loss and the metrics on several lists of rows of a source, by name one a list.

        `rouge1` is among them where answers earn credit.
        """
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
        """Return what is found of every client's model on the same rows, [rows, outputs] each, in blocks alike."""
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
        losses: list[float] = part_means(values, np.array(sizes, dtype=np.int64)).tolist()
        return losses
    parts = zip(torch.split(outputs, list(sizes)), torch.split(y, list(sizes)), strict=True)
    return [float(LOSSES[task](f, t, None)) if len(f) else float("nan") for f, t in parts]
