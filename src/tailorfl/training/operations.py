"""Client operations with a batching rule of their own: one client alone, or a whole cohort's tensors at once.

`torch.autograd.Function` lets an operation say what `torch.func.vmap` does with it: its `vmap` gets the physical
tensors of all clients. So `local` may be mapped over a cohort as pure mathematics of one client, while the training
inside works in place, on contiguous memory, and only on clients that still have batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.data.source import Source
from tailorfl.errors import ClientError, TailorflError
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort, padded, rows_at_once
from tailorfl.training.counting import count, note, worked
from tailorfl.training.gradients import Carry, Objective
from tailorfl.training.local_sgd import FitOptions, LocalSGD
from tailorfl.training.outputs import in_passes
from tailorfl.training.packing import Arrange, Dims, Form, Packed, Travelled, travelled
from tailorfl.training.plan import BatchPlan
from tailorfl.training.public_term import PublicTerm, public_rows
from tailorfl.training.sample_privacy import Release, SampleDP
from tailorfl.training.terms import Seen


class Operation(Protocol):
    """Something that clients do with tensors."""

    def run(self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Returns results of [clients, ...] for the clients at `positions` of the cohort, or of one client."""

    def where(self, positions: Sequence[int]) -> str:
        """Names clients, round and stage for error messages."""


def apply(operation: Operation, position: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the results of an operation of the client at `position`, alone or under `torch.func.vmap`.

    Raises:
        ClientError: it failed; names client, round and stage.
    """
    result: tuple[Tensor, ...] = _CohortFunction.apply(operation, position, *tensors)  # type: ignore[no-untyped-call]
    return result


class _CohortFunction(torch.autograd.Function):
    """A client operation with its own batching rule: one client in `forward`, the whole cohort in `vmap`."""

    @staticmethod
    def forward(operation: Any, position: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _guarded(operation, (int(position),), tensors, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: client operations are not differentiated through."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, operation: Any, position: Tensor, *tensors: Tensor) -> Any:
        if in_dims[1] is None:
            raise TailorflError(
                "a client operation was mapped over something other than clients; loop over it instead"
            )
        out = _guarded(operation, tuple(position.tolist()), tensors, in_dims[2:])
        return out, tuple(0 for _ in out)


def _guarded(
    operation: Any, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Any
) -> tuple[Tensor, ...]:
    try:
        with torch.no_grad():  # the loop writes in place; gradients are recorded where it asks for them
            result: tuple[Tensor, ...] = operation.run(positions, tensors, dims)
    except TailorflError:
        raise
    except Exception as error:
        raise ClientError(f"{operation.where(positions)}: {type(error).__name__}: {error}") from error
    return result


class Inputs(NamedTuple):
    """What goes into a training, by name; every tensor may be one for all clients or each client's own."""

    models: Mapping[str, Mapping[str, Any]]
    """Component, then name: whole states, trained or not."""
    centre: Mapping[str, Mapping[str, Any]] | None
    """Component, then name of a trained tensor: where the proximal pull goes."""
    strength: Any
    """λ of that pull where it is a tensor."""
    rate: Any
    """η where it is a tensor."""
    steps: Any
    """How many, where that is a tensor."""
    given: tuple[Any, ...]
    """Of the direction."""
    terms: tuple[tuple[Any, ...], ...]
    """What each term on private batches is given."""
    public: tuple[tuple[Any, ...], ...]
    """What each term on public samples is given."""


class Fit:
    """One training of a cohort: everything that is not a tensor, and the form of what is."""

    def __init__(self, cohort: Cohort, options: FitOptions, form: Form, moving: tuple[str, ...]) -> None:
        self.cohort, self.options, self.form, self.moving = cohort, options, form, moving

    def run(self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Trains the clients at `positions`: their losses, gradients, and tensors that moved, by component.

        `dims` are the client axes of `tensors`, or None for one client without axis.
        """
        stacked, clients = dims is not None, len(positions)
        cohort, options = self.cohort, self.options
        parts = Packed(travelled(tensors, dims), self.form).parts()
        if parts["steps"].leaves:
            options = replace(options, steps=_each(parts["steps"].leaves[0], clients))
        if cohort.counting:
            return self._counted(options, parts, positions, Arrange(stacked, clients, None))
        poisson = options.dp is not None and options.dp.sampling == "poisson"
        length = (options.batch, options.epochs, options.steps, options.first, options.batches, poisson)
        plan = cohort.plan(positions, options.sequence, *length)
        order, back = _by_falling_steps(plan)
        if order is not None:
            plan = plan.ordered(order)
        by_steps = None if order is None else torch.from_numpy(order).to(cohort.device)
        arrange = Arrange(stacked, clients, by_steps)
        carries = self._carries(parts, arrange)
        centre = [arrange.spread(t) for t in parts["centre"].leaves] or None
        strength, rate = (
            next(map(arrange.spread, parts[name].leaves), None) for name in ("strength", "rate")
        )
        given = parts["given"].map(arrange.spread)
        public = self._public(
            parts["public"], arrange, positions, plan.rows.shape[1] // options.batches, order
        )
        noise = cohort.keys(positions, options.purpose + "/noise").astype(np.int64)
        keys = torch.from_numpy(noise if order is None else noise[order]).to(cohort.device)
        loop = LocalSGD(Objective(cohort.model, cohort.loss, options.terms), cohort.source, options, stacked)
        ranked = positions if order is None else [positions[k] for k in order]
        release = None if options.dp is None else self._release(options.dp, ranked)
        loss = loop.run(carries, plan, centre, strength, rate, given, keys, public, release)
        note(cohort, options, ranked, loop.gradients)
        work = torch.from_numpy(worked(cohort, options, loop.gradients, plan.count)).to(cohort.device)
        out = [loss, work if stacked else work[0]]
        out += [t for c in carries for t in (*c.trained.values(), *c.moving.values())]
        if back is not None and stacked:
            back = back.to(cohort.device)
            out = [t.index_select(0, back) for t in out]
        return tuple(out)

    def _carries(self, parts: Mapping[str, Packed], arrange: Arrange) -> list[Carry]:
        """The tensors of every component, those that are written to as copies."""
        states = parts["models"].unpack()
        terms = tuple(one.map(arrange.spread) for one in parts["terms"].parts().values())
        carries = []
        for names, state in zip(self.options.trained, states.values(), strict=True):
            rest = [n for n in state if n not in {*names, *self.moving}]
            carries.append(
                Carry(
                    {n: arrange.own(state[n]) for n in names},
                    {n: arrange.own(state[n]) for n in self.moving},
                    {n: arrange.view(state[n]) for n in rest},
                    frozenset(n for n in rest if state[n].dim is None),
                    terms,
                )
            )
        return carries

    def _counted(
        self,
        options: FitOptions,
        parts: Mapping[str, Packed],
        positions: tuple[int, ...],
        arrange: Arrange,
    ) -> tuple[Tensor, ...]:
        """Records what would be used and returns what comes of no training: a loss of 0, no gradient, the start."""
        one = (lambda t: arrange.spread(t)[0]) if arrange.stacked else arrange.spread
        states = parts["models"].unpack()
        trained = {
            component: TensorDict({n: one(state[n]) for n in names}, batch_size=[])
            for names, (component, state) in zip(self.options.trained, states.items(), strict=True)
        }
        count(self.cohort, options, positions, trained, parts["given"].map(one).unpack())
        unmoved = [
            arrange.spread(state[n]).clone()
            for names, state in zip(self.options.trained, states.values(), strict=True)
            for n in (*names, *self.moving)
        ]
        loss = torch.zeros(len(positions)) if arrange.stacked else torch.zeros(())
        return (loss, torch.zeros_like(loss), *unmoved)

    def _release(self, dp: SampleDP, positions: Sequence[int]) -> Release:
        """What the private gradients of the clients at `positions` are divided by and made noisy with."""
        cohort, batch = self.cohort, self.options.batch
        noise = torch.tensor([dp.noise_of(cohort.ids[p]) for p in positions], dtype=torch.float32)
        size = None
        if dp.sampling == "poisson":
            samples = cohort.sizes[list(positions)]
            expected = samples if batch <= 0 else np.minimum(samples, batch)
            size = torch.from_numpy(expected).float().clamp(min=1.0).to(cohort.device)
        return Release(noise.to(cohort.device), size)

    def _public(
        self, given: Packed, arrange: Arrange, positions: tuple[int, ...], steps: int, order: Any
    ) -> list[PublicTerm]:
        cohort, source, options = self.cohort, self.cohort.public, self.options
        if source is None:
            return []
        out = []
        for number, (term, part) in enumerate(zip(options.public, given.parts().values(), strict=True)):
            keys = cohort.keys(positions, f"{options.purpose}/public" + (f" {number}" if number else ""))
            keys = keys if order is None else keys[order]
            # A fit by pieces goes on where the piece before it stopped, as on the private batches.
            first, batch = options.first // options.batches, term.public or len(source)
            rows = public_rows(keys, len(source), batch, steps, first).to(source.x.device)
            mine = part.map(arrange.spread)
            out.append(PublicTerm(term, cohort.model, cohort.loss, source, mine, rows, arrange.stacked))
        return out

    def where(self, positions: Sequence[int]) -> str:
        return _where(self.cohort, positions, self.options.purpose)


class Loss:
    """One evaluation of the loss of a cohort."""

    def __init__(self, cohort: Cohort, part: str, names: tuple[str, ...]) -> None:
        self.cohort, self.names = cohort, names
        self.rows = cohort.val if part == "val" else cohort.members
        self.purpose = f"loss on {part}"

    def run(self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        cohort, source = self.cohort, self.cohort.source

        def one(state: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
            return cohort.loss(cohort.model(state, x), y, weight)

        state = dict(zip(self.names, tensors, strict=True))
        if cohort.counting:
            return (torch.zeros(()) if dims is None else torch.zeros(len(positions)),)
        if dims is None:
            rows = torch.from_numpy(self.rows[positions[0]]).to(source.x.device)
            weight = (
                None if len(rows) else torch.zeros(0, device=cohort.device)
            )  # a mean over nothing is 0, as for a client that is all padding
            pieces = self._pieces(rows, 1)
            values = [one(state, source.take(r), source.targets(r), weight) for r in pieces]
            return (_mean_of(values, [torch.tensor(float(len(r))) for r in pieces]),)
        rows, weight = padded([self.rows[p] for p in positions])
        rows, weight = rows.to(source.x.device), weight.to(cohort.device)
        mapped = torch.func.vmap(one, in_dims=(dict(zip(self.names, dims, strict=True)), 0, 0, 0))
        pieces = self._pieces(rows, len(positions))
        weights = torch.split(weight, pieces[0].shape[1], dim=1)
        values = [
            mapped(state, source.take(r), source.targets(r), w) for r, w in zip(pieces, weights, strict=True)
        ]
        return (_mean_of(values, [w.sum(1) for w in weights]),)

    def _pieces(self, rows: Tensor, clients: int) -> tuple[Tensor, ...]:
        """`rows` [..., samples] in pieces that fit a forward pass; as a whole where the loss compares samples."""
        if self.cohort.loss.mixes:
            return (rows,)
        return torch.split(rows, rows_at_once(self.cohort.source, clients), dim=-1)

    def where(self, positions: Sequence[int]) -> str:
        return _where(self.cohort, positions, self.purpose)


class Summed:
    """A sum over each client's training samples, of one model."""

    def __init__(
        self, cohort: Cohort, of: Callable[..., Tensor], form: Form, classes: int | None = None
    ) -> None:
        self.cohort, self.of, self.form, self.classes = cohort, of, form, classes

    def run(self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Returns the sums, [clients, ...] or [...] of one client; with `classes` [clients, classes, ...]."""
        cohort, source = self.cohort, self.cohort.source
        rows, weight = padded([cohort.members[p] for p in positions])
        if cohort.counting:
            rows, weight = rows[:, :0], weight[:, :0]
        rows, weight = rows.to(source.x.device), weight.to(cohort.device)
        length = rows_at_once(source, len(positions))
        pieces = zip(torch.split(rows, length, dim=1), torch.split(weight, length, dim=1), strict=True)
        total: Tensor | None = None
        for some, counted in pieces:
            x, y = source.take(some), source.targets(some)
            if dims is None:
                value = self._one(list(tensors), x[0], y[0], counted[0])
            else:
                value = torch.func.vmap(self._one, in_dims=(list(dims), 0, 0, 0))(
                    list(tensors), x, y, counted
                )
            total = value if total is None else total + value
        assert total is not None  # a table has at least one piece, if an empty one
        return (total,)

    def _one(self, tensors: list[Tensor], x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        state, given = Packed(tensors, self.form).unpack()
        model, loss = self.cohort.model, self.cohort.loss
        outputs, features = model.with_features(state, x)
        own = {n: t for n, t in tree.tensors(state).items() if n not in model.sizes}
        each = self.of(Seen(model, loss, (x, y, weight), outputs, features, own), *given)
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
        return _where(self.cohort, positions, "sum over training samples")


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
        return _where(self.cohort, positions, "predictions on the public set")


def _each(steps: Travelled, clients: int) -> int | tuple[int, ...]:
    """The steps of every client, or of the one there is."""
    if steps.dim is None:
        return int(steps.tensor)
    return tuple(int(n) for n in steps.tensor.reshape(clients).tolist())


def _mean_of(values: Sequence[Tensor], samples: Sequence[Tensor]) -> Tensor:
    """The mean over all samples from the means `values` over pieces of `samples` each, tensors of one shape."""
    if len(values) == 1:
        return values[0]
    total = torch.stack(list(samples)).sum(0).clamp(min=1.0)
    return torch.stack([v * n for v, n in zip(values, samples, strict=True)]).sum(0) / total


def _by_falling_steps(plan: BatchPlan) -> tuple[Any, Tensor | None]:
    """An order of clients by falling steps, then samples, and the way back; None where they are so already."""
    steps, samples = plan.steps, plan.count.sum(1)
    ahead = steps[:-1] * (samples.max(initial=0) + 1) + samples[:-1]
    behind = steps[1:] * (samples.max(initial=0) + 1) + samples[1:]
    if (ahead >= behind).all():
        return None, None
    order = np.lexsort((-samples, -steps))
    return order, torch.from_numpy(np.argsort(order, kind="stable"))


def _where(cohort: Cohort, positions: Sequence[int], stage: str) -> str:
    """Names clients, round and stage for error messages."""
    return f"{who([cohort.ids[p] for p in positions])}, round {cohort.round + 1}, stage '{stage}'"


def who(ids: Sequence[int]) -> str:
    """Names clients for error messages."""
    return f"client {ids[0]}" if len(ids) == 1 else f"one of the clients {', '.join(map(str, ids))}"
