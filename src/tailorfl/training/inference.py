"""Inference of a cohort on samples, without training: losses, sums over samples, outputs, and Fisher information.

The trace of the empirical Fisher information is computed from the batches of one pass over a client's training samples:

    F = Σ over the batches  ‖∇ mean loss of the batch‖²         over parameters that the split does not freeze

Models are in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F
from torch.utils._pytree import TreeSpec

from tailorfl.data.source import Source
from tailorfl.errors import TailorflError
from tailorfl.models.functional import Model
from tailorfl.models.skeleton import laid_out
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort, padded, rows_at_once
from tailorfl.training.keys import generator
from tailorfl.training.objective import Seen
from tailorfl.training.operations import Operation, Packed
from tailorfl.training.plan import Rows

CACHED_FLOATS, FEWEST_IMAGES = 40_000, 20
"""A convolutional network processes images of `CACHED_FLOATS` numbers at once (50 of 28 x 28), or `FEWEST_IMAGES`."""


Pieces = Iterator[tuple[Tensor, Tensor | None]]
"""(rows of the source [clients, samples], 1 for real ones or None if all are); one client has no first axis."""


@dataclass(eq=False)
class ClientInference(Operation[Tensor]):
    """One evaluation of a cohort's models as an operation: a function of one client, over pieces of its samples.

    Attributes:
        cohort: the clients that run together.
        stage: its name in messages.
        value: (the client's tensors, x, y, weight, class weights) -> tensor.
        pieces: (positions, stacked) -> the samples of each forward pass.
        join: (values, weights of the samples) of all pieces -> the result.
        number: whether the result is one number a client, which is 0 if the cohort only counts.
        alone: whether a single client is evaluated without a map.
    """

    cohort: Cohort
    stage: str
    value: Callable[..., Tensor]
    pieces: Callable[[Sequence[int], bool], Pieces]
    join: Callable[[list[Tensor], list[Tensor]], Tensor]
    number: bool = True
    alone: bool = True

    def run(self, positions: tuple[int, ...], inputs: Any, stacked: bool) -> Tensor:
        """Return the results, [clients, ...] or one client's."""
        cohort, source = self.cohort, self.cohort.source
        tensors, axes = _parted(inputs, stacked)
        classes, value, mapped = cohort.weights_of_classes(positions), self.value, stacked or not self.alone
        if mapped:
            value = vmap(self.value, in_dims=(axes, 0, 0, 0, None if classes is None else 0))
        elif classes is not None:
            classes = classes[0]
        values, weights = [], []
        for rows, weight in () if cohort.counting and self.number else self.pieces(positions, stacked):
            rows = rows.to(source.x.device)
            values.append(value(tensors, source.take(rows), source.targets(rows), weight, classes))
            weights.append(torch.ones(rows.shape) if weight is None else weight)
        if not values:
            shape = (len(positions),) if stacked else ()
            return torch.zeros(shape, dtype=cohort.dtype, device=cohort.device)
        result = self.join(values, weights)
        return result[0] if mapped and not stacked else result


def mean_loss(cohort: Cohort, part: str) -> ClientInference:
    """Return the evaluation of each client's mean loss on its `part` of the samples, train or val."""
    members = cohort.val if part == "val" else cohort.members

    def value(
        state: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor | None, classes: Tensor | None
    ) -> Tensor:
        return cohort.loss.weighed(classes)(cohort.model(state, x), y, weight)

    def pieces(positions: Sequence[int], stacked: bool) -> Pieces:
        rows, weight = padded([members[p] for p in positions])
        if not rows.shape[1]:  # the mean without samples is 0; not every network can read an empty batch
            return
        if stacked:
            yield from zip(_cut(cohort, rows), _cut(cohort, weight.to(cohort.device)), strict=True)
        else:
            yield from ((piece, None) for piece in _cut(cohort, rows[0]))

    return ClientInference(cohort, f"loss on {part}", value, pieces, _mean_of)


def sample_sum(
    cohort: Cohort, of: Callable[..., Tensor], form: TreeSpec, classes: int | None, most: int | None
) -> ClientInference:
    """Return the evaluation of a sum over each client's training samples; with `classes`, a sum for each class.

    Args:
        cohort: the clients that run together.
        of: `of(seen, *given)` returns an entry for each sample.
        form: tree structure of (state, given), whose tensors are the inputs.
        classes: number of classes; None sums over all samples.
        most: largest number of samples, drawn by each client's key.
    """

    def value(
        tensors: list[Tensor], x: Tensor, y: Tensor, weight: Tensor, weights_of_classes: Tensor | None
    ) -> Tensor:
        state, given = Packed(tensors, form).unpack()
        loss = cohort.loss.weighed(weights_of_classes)
        entries = of(Seen.evaluated(cohort.model, loss, (x, y, weight), tree.tensors(state)), *given)
        if entries.shape[:1] != weight.shape:
            raise TailorflError(
                f"a sum over samples needs one entry per sample, [{len(weight)}, ...], but the function returned shape "
                f"{list(entries.shape)}"
            )
        member = weight.to(entries.dtype)
        if classes is not None:
            member = (F.one_hot(y, classes).to(entries.dtype) * weight[:, None]).T
        total: Tensor = torch.tensordot(member, entries, dims=1)
        return total

    def pieces(positions: Sequence[int], stacked: bool) -> Pieces:
        rows, weight = padded(_drawn(cohort, positions, most))
        if cohort.counting:
            rows, weight = rows[:, :0], weight[:, :0]
        rows, weight = (rows, weight) if stacked else (rows[0], weight[0])
        length = rows_at_once(cohort.source, len(positions))
        weights = torch.split(weight.to(cohort.device), length, dim=-1)
        yield from zip(torch.split(rows, length, dim=-1), weights, strict=True)

    return ClientInference(cohort, "sum over training samples", value, pieces, _sum_of, number=False)


def fisher_trace(cohort: Cohort) -> ClientInference:
    """Return the evaluation of Σ ‖∇ mean loss of a batch‖² over one pass, in batches of the run's size."""
    trainable = set(cohort.split.trainable)
    names = [n for n in cohort.model.parameters if n in trainable]

    def value(
        state: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor, classes: Tensor | None
    ) -> Tensor:
        loss = cohort.loss.weighed(classes)

        def of(parameters: dict[str, Tensor]) -> Tensor:
            return loss(cohort.model({**state, **parameters}, x), y, weight)

        gradient = torch.func.grad(of)({n: state[n] for n in names})
        return torch.stack([g.square().sum() for g in gradient.values()]).sum()

    def pieces(positions: Sequence[int], stacked: bool) -> Pieces:
        plan = cohort.plan(tuple(positions), "fisher", cohort.config.batch_size, 1, None, 0)
        for step in range(plan.rows.shape[1]):
            # No wider than needed: a single client has no padding, and bit-identical results in any cohort.
            count = torch.from_numpy(plan.count[:, step])
            widest = max(int(count.max()), 1)
            weight = (torch.arange(widest) < count[:, None]).to(cohort.device, torch.float32)
            yield torch.from_numpy(plan.rows[:, step, :widest]), weight

    return ClientInference(cohort, "fisher", value, pieces, _sum_of, alone=False)


class PublicOutputs(Operation[Tensor]):
    """The outputs of a cohort's models on the public set, as an operation."""

    stage = "predictions on the public set"

    def __init__(self, cohort: Cohort, source: Source) -> None:
        self.cohort, self.source = cohort, source

    def run(self, positions: tuple[int, ...], inputs: Any, stacked: bool) -> Tensor:
        """Return the outputs, [clients, P, outputs], or [P, outputs] for one client."""
        model, source = self.cohort.model, self.source
        state, axes = _parted(inputs, stacked)
        differ = any(axis is not None for axis in axes.values())
        if self.cohort.counting and differ:  # one client stands for all of them
            state = {n: t if (axis := axes[n]) is None else t.select(axis, 0) for n, t in state.items()}
            differ = False
        all_rows = torch.arange(len(source), device=source.x.device)
        if not differ:
            outputs = in_passes(partial(model, state), source, all_rows)
            return outputs.expand(len(positions), *outputs.shape).clone() if stacked else outputs
        models = partial(vmap(model, in_dims=(axes, None)), state)
        return in_passes(models, source, all_rows, len(positions), dim=1)


def in_passes(
    answer: Callable[[Tensor], Tensor], source: Source, rows: Tensor, models: int = 1, dim: int = 0
) -> Tensor:
    """Return `answer` of the inputs of `rows`, computed in passes that fit `models` models.

    `rows` int64 [rows] or [models, rows]; `dim` is the axis of the rows in the result of `answer`.
    """
    parts = torch.split(rows.to(source.x.device), rows_at_once(source, models), dim=-1)
    return torch.cat([answer(source.take(part)) for part in parts], dim=dim)


def one_by_one(
    model: Model, states: Mapping[str, Tensor], count: int, device: torch.device
) -> list[Callable[[Tensor], Tensor]]:
    """Return a function for each of `count` models `states` [models, ...] from inputs [rows, ...] to outputs.

    Convolutions run with channels last if that is faster, on so few images at once that outputs of a layer stay in the
    cache for the next.
    """
    of_models = [{name: tensor[i] for name, tensor in states.items()} for i in range(count)]
    if not model.channels_last(device):
        return [partial(model, state) for state in of_models]
    return [
        partial(_in_cache, model, {name: laid_out(t, True) for name, t in state.items()})
        for state in of_models
    ]


def _in_cache(model: Model, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
    few = max(FEWEST_IMAGES, CACHED_FLOATS // max(1, x[0].numel()))
    return torch.cat([model(state, laid_out(part, True)) for part in torch.split(x, few)])


def _parted(inputs: Any, stacked: bool) -> tuple[Any, Any]:
    """Return (the tensors of a dict or list, their axes of clients); all axes are None for one client."""
    if isinstance(inputs, dict):
        tensors, axes = _parted(list(inputs.values()), stacked)
        return dict(zip(inputs, tensors, strict=True)), dict(zip(inputs, axes, strict=True))
    if not stacked:
        return inputs, [None] * len(inputs)
    return [mapped.tensor for mapped in inputs], [mapped.axis for mapped in inputs]


def _cut(cohort: Cohort, table: Tensor) -> tuple[Tensor, ...]:
    """Return a table [..., samples] in pieces that fit a forward pass; whole if the loss compares samples."""
    if cohort.loss.mixes:
        return (table,)
    clients = len(table) if table.ndim > 1 else 1
    return torch.split(table, rows_at_once(cohort.source, clients), dim=-1)


def _drawn(cohort: Cohort, positions: Sequence[int], most: int | None) -> list[Rows]:
    """Return the training samples of each client: all, or at most `most`, drawn by its key."""
    members = [cohort.members[p] for p in positions]
    if most is None:
        return members
    keys = cohort.keys(positions, "some training samples")
    drawn = [generator(int(key)).permutation(len(m)) for key, m in zip(keys, members, strict=True)]
    return [m[np.sort(order[:most])] for m, order in zip(members, drawn, strict=True)]


def _sum_of(values: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the sum of values, from the first to the last."""
    return reduce(torch.add, values)


def _mean_of(values: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the mean over all samples, from the means `values` of pieces with the given sample weights."""
    if len(values) == 1:
        return values[0]
    samples = [weight.sum(-1) for weight in weights]
    total = torch.stack(samples).sum(0).clamp(min=1.0)
    return torch.stack([v * n for v, n in zip(values, samples, strict=True)]).sum(0) / total
