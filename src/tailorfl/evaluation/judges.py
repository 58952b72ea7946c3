"""Evaluation of models on samples: results for every sample, and the loss and metrics computed from them.

A judge works in two steps, so that several clients' samples can be evaluated together and then separated: it computes a
tensor [samples, ...] for a model and rows of a source, and then numbers from any parts of it. The number of clients and
samples in one pass is chosen by memory and speed.
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
"""Largest size in bytes of the models of one portion of clients."""
LAYER_BYTES = 16 * 2**20
"""Largest size in bytes of a layer's outputs in one forward pass. Larger blocks of memory are newly allocated from the
system for every layer, which for a convolution takes twice the time of its arithmetic."""
OUTPUT_BYTES = 64 * 2**20
"""Largest size in bytes of the outputs of one portion of clients on a common test set."""
FEWEST_CLIENTS, MOST_CLIENTS = 4, 2048
"""Limits of the number of clients in one portion."""
EVAL_BATCH_SIZE = 160
"""Samples of a common test set that go through a model in one pass, if its layers' outputs fit."""
PADDING = 2.0
"""Clients are evaluated together if padding increases their samples by at most this factor."""


class Portions:
    """Sizes of portions for the models and data of a simulation."""

    def __init__(self, sim: Simulation) -> None:
        source = sim.federation.source
        self._widths = {id(group.model): _widest_layer(group, source) for group in sim.groups}
        self._largest = max(sum(group.model.sizes.values()) for group in sim.groups)
        self._source = source

    def rows(self, model: Model, clients: int) -> int:
        """Return the number of samples of each of `clients` clients in one pass."""
        return max(1, LAYER_BYTES // (4 * clients * self._widths[id(model)]))

    def clients(self, samples: float, common: int) -> int:
        """Return the number of clients whose models are made and evaluated together.

        `samples` is the mean number of samples of a client, `common` the number of samples of the common sets.
        """
        together = max(1.0, samples)
        fitting = min(
            MODEL_BYTES // (4 * self._largest),
            int(LAYER_BYTES / (4 * together * max(self._widths.values()))),
            int(rows_at_once(self._source) / together),
            OUTPUT_BYTES // (4 * max(1, common) * self._source.outputs),
        )
        if common:
            # Many samples of few models rather than few samples of many, since layers are then fastest.
            block = 4 * min(common, EVAL_BATCH_SIZE) * max(self._widths.values())
            return min(max(min(fitting, LAYER_BYTES // block), 1), MOST_CLIENTS)
        return min(max(fitting, FEWEST_CLIENTS), MOST_CLIENTS)


def _widest_layer(group: Group, source: Source) -> int:
    """Return the most values that a layer with parameters outputs for one sample, after pooling inside the layer."""
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
    """Return lists of positions of clients that are evaluated together: all, or groups of similar size."""
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

    `further` are metrics of `tailorfl.evaluation.calibration.FURTHER`.
    """
    if task == "generation":
        return Texts(engine, generation)
    return (
        Answers(engine, portions, method, further) if method.answers else Outputs(engine, portions, further)
    )


class Outputs:
    """Judges by models' outputs; `models` are [clients, ...] in the order of the cohort, `rows` those of a source."""

    def __init__(self, engine: Engine, portions: Portions, further: Sequence[str] = ()) -> None:
        self.engine, self.portions, self.further = engine, portions, tuple(further)

    def own(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return outputs of every client's model on its own rows of the cohort's source, [rows, outputs] each."""
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
        """Return outputs of ONE model on several lists of rows, [rows, outputs] each."""
        outputs = Outputs.common(self, cohort, model.unsqueeze(0), source, torch.cat(list(rows)))[0]
        return list(torch.split(outputs, [len(r) for r in rows]))

    def numbers(
        self, found: Sequence[Tensor], source: Source, rows: Sequence[Tensor]
    ) -> dict[str, list[float]]:
        """Return the loss and the metrics on several lists of rows of a source: name -> one number for each list.

        They include `rouge1` if the source has credit for answers.
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
        """Return outputs of every client's model on the same rows, [rows, outputs] each, in blocks of similar size."""
        blocks = -(-len(rows) // self.portions.rows(cohort.model, models.batch_size[0]))
        inference = Inference(cohort.model, models, source, rows)
        parts = [replace(inference, rows=part) for part in torch.tensor_split(rows, max(1, blocks))]
        return inference.joined([self.engine.predict(part) for part in parts])


class Answers(Outputs):
    """Judges by a method's answers, computed from the outputs of deployed models and their clients' own samples."""

    def __init__(
        self, engine: Engine, portions: Portions, method: Method, further: Sequence[str] = ()
    ) -> None:
        super().__init__(engine, portions, further)
        self.method = method
        self.known: tuple[TensorDict, list[nn.Module]] | None = None
        """The last models, and the answering module of each."""

    def own(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return every client's answers on its own rows, [rows, outputs] each."""
        return self._answered(cohort, models, super().own(cohort, models, rows), cohort.source, rows)

    def common(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> list[Tensor]:
        """Return every client's answers on the same rows, [rows, outputs] each."""
        outputs = super().common(cohort, models, source, rows)
        return self._answered(cohort, models, outputs, source, [rows] * len(outputs))

    def answering(self, cohort: Cohort, models: TensorDict) -> list[nn.Module]:
        """Return the answering module of every client's model, see `Method.answering`."""
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
        """Return the method's answers on rows of each client, from its model's `outputs`."""
        return [
            answer(found, features(cohort.model, models[k], source, rows[k])) if len(found) else found
            for k, (found, answer) in enumerate(zip(outputs, self.answering(cohort, models), strict=True))
        ]

    def _seen(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[tuple[Shown, Tensor]]:
        """Return (outputs and features, targets) of each client's model on its rows."""
        source = cohort.source
        return [
            (Shown(outputs, features(cohort.model, models[k], source, rows[k])), source.targets(rows[k]))
            for k, outputs in enumerate(super().own(cohort, models, rows))
        ]


def _losses(task: str, outputs: Tensor, y: Tensor, sizes: Sequence[int]) -> list[float]:
    """Return the loss of every part, NaN for an empty one."""
    of_samples = SAMPLE_LOSSES.get(task)
    if of_samples is not None:
        values = of_samples(outputs, y).double().numpy()
        losses: list[float] = part_means(values, np.array(sizes, dtype=np.int64)).tolist()
        return losses
    parts = zip(torch.split(outputs, list(sizes)), torch.split(y, list(sizes)), strict=True)
    return [float(LOSSES[task](f, t, None)) if len(f) else float("nan") for f, t in parts]
