"""Inference of a cohort on samples, without training: losses, sums over samples, outputs, and the Fisher information.

Of the empirical Fisher information it is the trace, from the batches of one pass over a client's training samples:

    F = Σ over the batches  ‖∇ mean loss of the batch‖²         over what the split does not freeze

Models are in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.source import Source
from tailorfl.errors import TailorflError
from tailorfl.models.functional import Model
from tailorfl.models.layouts import laid_out
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort, padded, rows_at_once
from tailorfl.training.keys import generator
from tailorfl.training.operations import where
from tailorfl.training.packing import Dims, Form, Packed
from tailorfl.training.plan import Rows
from tailorfl.training.terms import Seen

CACHED_FLOATS, FEWEST_IMAGES = 40_000, 20
"""A network of convolutions alone sees inputs of so many numbers at once, 50 images of 28 x 28, or so many images."""

FISHER = "fisher"
"""Names the random sequence of the batches."""
Told = TypeVar("Told")


class MeanLoss:
    """One evaluation of the loss of a cohort."""

    def __init__(self, cohort: Cohort, part: str, names: tuple[str, ...]) -> None:
        self.cohort, self.names = cohort, names
        self.rows = cohort.val if part == "val" else cohort.members
        self.purpose = f"loss on {part}"

    def run(self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        cohort, source = self.cohort, self.cohort.source

        def one(
            state: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor | None, classes: Tensor | None
        ) -> Tensor:
            return cohort.loss.weighed(classes)(cohort.model(state, x), y, weight)

        state = dict(zip(self.names, tensors, strict=True))
        if cohort.counting:
            return (torch.zeros(()) if dims is None else torch.zeros(len(positions)),)
        classes = cohort.weights_of_classes(positions)
        if dims is None:
            own = None if classes is None else classes[0]
            rows = torch.from_numpy(self.rows[positions[0]]).to(source.x.device)
            weight = (
                None if len(rows) else torch.zeros(0, device=cohort.device)
            )  # a mean over nothing is 0, as for a client that is all padding
            pieces = self._pieces(rows, 1)
            values = [one(state, source.take(r), source.targets(r), weight, own) for r in pieces]
            return (_mean_of(values, [torch.tensor(float(len(r))) for r in pieces]),)
        rows, weight = padded([self.rows[p] for p in positions])
        rows, weight = rows.to(source.x.device), weight.to(cohort.device)
        at = None if classes is None else 0
        mapped = torch.func.vmap(one, in_dims=(dict(zip(self.names, dims, strict=True)), 0, 0, 0, at))
        pieces = self._pieces(rows, len(positions))
        weights = torch.split(weight, pieces[0].shape[1], dim=1)
        values = [
            mapped(state, source.take(r), source.targets(r), w, classes)
            for r, w in zip(pieces, weights, strict=True)
        ]
        return (_mean_of(values, [w.sum(1) for w in weights]),)

    def _pieces(self, rows: Tensor, clients: int) -> tuple[Tensor, ...]:
        """`rows` [..., samples] in pieces that fit a forward pass; as a whole where the loss compares samples."""
        if self.cohort.loss.mixes:
            return (rows,)
        return torch.split(rows, rows_at_once(self.cohort.source, clients), dim=-1)

    def where(self, positions: Sequence[int]) -> str:
        return where(self.cohort, positions, self.purpose)


class Summed:
    """A sum over each client's training samples, of one model."""

    def __init__(
        self,
        cohort: Cohort,
        of: Callable[..., Tensor],
        form: Form,
        classes: int | None = None,
        most: int | None = None,
    ) -> None:
        self.cohort, self.of, self.form, self.classes, self.most = cohort, of, form, classes, most

    def run(self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Returns the sums, [clients, ...] or [...] of one client; with `classes` [clients, classes, ...]."""
        cohort, source = self.cohort, self.cohort.source
        rows, weight = padded(self._rows(positions))
        if cohort.counting:
            rows, weight = rows[:, :0], weight[:, :0]
        rows, weight = rows.to(source.x.device), weight.to(cohort.device)
        length = rows_at_once(source, len(positions))
        pieces = zip(torch.split(rows, length, dim=1), torch.split(weight, length, dim=1), strict=True)
        classes, total = cohort.weights_of_classes(positions), None
        for some, counted in pieces:
            x, y = source.take(some), source.targets(some)
            if dims is None:
                own = None if classes is None else classes[0]
                value = self._one(list(tensors), x[0], y[0], counted[0], own)
            else:
                at = None if classes is None else 0
                mapped = torch.func.vmap(self._one, in_dims=(list(dims), 0, 0, 0, at))
                value = mapped(list(tensors), x, y, counted, classes)
            total = value if total is None else total + value
        assert total is not None  # a table has at least one piece, if an empty one
        return (total,)

    def _rows(self, positions: Sequence[int]) -> list[Rows]:
        """The samples of each client that are summed: all, or `most` that are drawn by its key."""
        members = [self.cohort.members[p] for p in positions]
        if self.most is None:
            return members
        keys = self.cohort.keys(positions, "some training samples")
        drawn = [generator(int(key)).permutation(len(m)) for key, m in zip(keys, members, strict=True)]
        return [m[np.sort(order[: self.most])] for m, order in zip(members, drawn, strict=True)]

    def _one(
        self, tensors: list[Tensor], x: Tensor, y: Tensor, weight: Tensor, classes: Tensor | None
    ) -> Tensor:
        state, given = Packed(tensors, self.form).unpack()
        model, loss = self.cohort.model, self.cohort.loss.weighed(classes)
        each = self.of(Seen.evaluated(model, loss, (x, y, weight), tree.tensors(state)), *given)
        if each.shape[:1] != weight.shape:
            raise TailorflError(
                f"what is summed over samples has one entry a sample, [{len(weight)}, ...], but is of shape "
                f"{list(each.shape)}"
            )
        if self.classes is None:
            summed: Tensor = torch.tensordot(weight.to(each.dtype), each, dims=1)
            return summed
        member = torch.nn.functional.one_hot(y, self.classes).to(each.dtype) * weight[:, None]
        by_class: Tensor = torch.tensordot(member.T, each, dims=1)
        return by_class

    def where(self, positions: Sequence[int]) -> str:
        return where(self.cohort, positions, "sum over training samples")


class PublicOutputs:
    """The outputs of a cohort's models on the public set."""

    def __init__(self, cohort: Cohort, source: Source, names: tuple[str, ...]) -> None:
        self.cohort, self.source, self.names = cohort, source, names

    def run(self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Returns the outputs, [clients, P, outputs] or [P, outputs] of one client."""
        model, source = self.cohort.model, self.source
        state = dict(zip(self.names, tensors, strict=True))
        own = dims is not None and any(d is not None for d in dims)
        where = dict(zip(self.names, dims or (), strict=own))
        if self.cohort.counting and own:  # one client stands for all of them
            state = {n: t if (d := where[n]) is None else t.select(d, 0) for n, t in state.items()}
            own = False
        every = torch.arange(len(source), device=source.x.device)
        if not own:
            found = in_passes(partial(model, state), source, every)
            return (found if dims is None else found.expand(len(positions), *found.shape).clone(),)
        models = partial(torch.func.vmap(model, in_dims=(where, None)), state)
        return (in_passes(models, source, every, len(positions), dim=1),)

    def where(self, positions: Sequence[int]) -> str:
        return where(self.cohort, positions, "predictions on the public set")


class Fisher:
    """One pass over the training samples of a cohort, in batches of the run's size."""

    def __init__(self, cohort: Cohort, names: tuple[str, ...]) -> None:
        self.cohort, self.names = cohort, names
        trainable = set(cohort.split.trainable)
        self.learned = tuple([n for n in cohort.model.parameters if n in trainable])

    def run(self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Returns F, [clients] or 0-d of one client."""
        cohort, source = self.cohort, self.cohort.source
        state = dict(zip(self.names, tensors, strict=True))
        like = state[self.learned[0]]
        if cohort.counting:
            return (like.new_zeros(() if dims is None else len(positions)),)
        plan = cohort.plan(positions, FISHER, cohort.config.batch_size, 1, None, 0)
        total, classes = like.new_zeros(len(positions)), cohort.weights_of_classes(positions)
        axes = dict.fromkeys(self.names) if dims is None else dict(zip(self.names, dims, strict=True))
        own, rest = self._parts(axes)
        mapped = torch.func.vmap(self._one, in_dims=(own, rest, 0, 0, 0, None if classes is None else 0))
        for step in range(plan.rows.shape[1]):
            # As wide as need be: a client alone has no padding, and the same bits whoever is planned with it.
            widest = max(int(plan.count[:, step].max()), 1)
            rows = torch.from_numpy(plan.rows[:, step, :widest]).to(source.x.device)
            counted = torch.arange(widest) < torch.from_numpy(plan.count[:, step])[:, None]
            weight = counted.to(cohort.device, torch.float32)
            x, y = source.take(rows), source.targets(rows)
            total = total + mapped(*self._parts(state), x, y, weight, classes)
        return (total[0] if dims is None else total,)

    def _parts(self, named: dict[str, Told]) -> tuple[dict[str, Told], dict[str, Told]]:
        """What is told of every tensor, of those that are differentiated and of the others."""
        learned = {n: named[n] for n in self.learned}
        return learned, {n: told for n, told in named.items() if n not in learned}

    def _one(
        self,
        learned: dict[str, Tensor],
        rest: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        classes: Tensor | None,
    ) -> Tensor:
        """‖∇ mean loss‖² of one client's batch; 0 of one that is all padding."""
        loss = self.cohort.loss.weighed(classes)

        def mean_loss(parameters: dict[str, Tensor]) -> Tensor:
            return loss(self.cohort.model({**rest, **parameters}, x), y, weight)

        gradient = torch.func.grad(mean_loss)(learned)
        return torch.stack([g.square().sum() for g in gradient.values()]).sum()

    def where(self, positions: Sequence[int]) -> str:
        return where(self.cohort, positions, FISHER)


def in_passes(
    answer: Callable[[Tensor], Tensor], source: Source, rows: Tensor, models: int = 1, dim: int = 0
) -> Tensor:
    """Returns what `answer` makes of the inputs of `rows`, as many at once as fit for so many models.

    `rows` int64 [rows] or [models, rows]; `dim` is the axis of the rows in what `answer` returns.
    """
    parts = torch.split(rows.to(source.x.device), rows_at_once(source, models), dim=-1)
    return torch.cat([answer(source.take(part)) for part in parts], dim=dim)


def one_by_one(
    model: Model, states: Mapping[str, Tensor], count: int, device: torch.device
) -> list[Callable[[Tensor], Tensor]]:
    """Returns what gives the outputs of each of `count` models `states` [models, ...] on inputs [rows, ...].

    Convolutions run with channels last where that is faster, on so few images that a layer finds in the cache what the
    layer before has made.
    """
    each = [{name: tensor[i] for name, tensor in states.items()} for i in range(count)]
    if not model.channels_last(device):
        return [partial(model, state) for state in each]
    return [
        partial(_in_cache, model, {name: laid_out(t, True) for name, t in state.items()}) for state in each
    ]


def _in_cache(model: Model, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
    few = max(FEWEST_IMAGES, CACHED_FLOATS // max(1, x[0].numel()))
    return torch.cat([model(state, laid_out(part, True)) for part in torch.split(x, few)])


def _mean_of(values: Sequence[Tensor], samples: Sequence[Tensor]) -> Tensor:
    """The mean over all samples from the means `values` over pieces of `samples` each, tensors of one shape."""
    if len(values) == 1:
        return values[0]
    total = torch.stack(list(samples)).sum(0).clamp(min=1.0)
    return torch.stack([v * n for v, n in zip(values, samples, strict=True)]).sum(0) / total
