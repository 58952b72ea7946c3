"""Client operations with a batching rule of their own: one client alone, or a whole cohort's tensors at once.

`torch.autograd.Function` lets an operation say what `torch.func.vmap` does with it: its `vmap` gets the physical
tensors of all clients. So `local` may be mapped over a cohort as pure mathematics of one client, while the training
inside works in place, on contiguous memory, and only on clients that still have batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.arranged import Arranged, Dims
from tailorfl.core.cohort import Cohort, padded, rows_at_once
from tailorfl.core.counting import counted, note, worked
from tailorfl.core.distill import Distill, PublicTerm, public_rows
from tailorfl.core.feature_pull import FeaturePull
from tailorfl.core.gradients import Carry, Objective
from tailorfl.core.local_sgd import FitOptions, LocalSGD
from tailorfl.core.objective import cox
from tailorfl.core.plan import BatchPlan
from tailorfl.core.privacy import Release, SampleDP
from tailorfl.data.source import Source
from tailorfl.errors import ClientError, TailorflError


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


class Fit:
    """One `fit` of a cohort: everything that is not a tensor."""

    def __init__(
        self,
        cohort: Cohort,
        options: FitOptions,
        purpose: str,
        batch: int,
        epochs: int | None,
        steps: int | None,
        first: int,
    ) -> None:
        self.cohort, self.options = cohort, options
        self.purpose, self.batch, self.epochs, self.steps, self.first = purpose, batch, epochs, steps, first
        self.moving_names: tuple[str, ...] = ()
        self.fixed_names: tuple[str, ...] = ()
        self.centred = False
        self.strong = False
        self.rated = False
        self.given_paths: list[tuple[str, ...] | None] = []
        self.public: Distill | None = None
        self.pull: FeaturePull | None = None
        self.anchor_names: tuple[str, ...] = ()

    def run(self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Trains the clients at `positions`.

        `dims` are the client axes of `tensors`, or None for one client without axis.
        """
        stacked = dims is not None
        cohort, options = self.cohort, self.options
        if cohort.counting:
            return counted(self, Arranged(tensors, dims, len(positions), None), positions)
        dp = options.dp
        poisson = dp is not None and dp.sampling == "poisson"
        length = (self.batch, self.epochs, self.steps, self.first, options.batches, poisson)
        plan = cohort.plan(positions, self.sequence, *length)
        order, back = _by_falling_steps(plan)
        if order is not None:
            plan = plan.ordered(order)
        clients = len(positions)
        by_steps = None if order is None else torch.from_numpy(order).to(cohort.device)
        arranged = Arranged(tensors, dims, clients, by_steps)
        carries = []
        for names in options.trained:
            trained = {n: arranged.own() for n in names}
            moving = {n: arranged.own() for n in self.moving_names}
            shared = set()
            fixed = {}
            for n in self.fixed_names:
                fixed[n], alone = arranged.view()
                if alone:
                    shared.add(n)
            carries.append(Carry(trained, moving, fixed, frozenset(shared)))
        centre = [arranged.spread() for names in options.trained for _ in names] if self.centred else None
        strength = arranged.spread() if self.strong else None
        rate = arranged.spread() if self.rated else None
        given = [arranged.spread() for paths in self.given_paths for _ in (("",) if paths is None else paths)]
        for n in self.anchor_names:
            carries[0].anchor[n] = arranged.spread()
        public = self._public(arranged, positions, plan.rows.shape[1] // options.batches, order)
        noise = cohort.keys(positions, self.purpose + "/noise").astype(np.int64)
        keys = torch.from_numpy(noise if order is None else noise[order]).to(cohort.device)
        objective = Objective(cohort.model, cohort.loss, self.pull)
        loop = LocalSGD(objective, cohort.source, options, stacked, self.first)
        ranked = positions if order is None else [positions[k] for k in order]
        release = None if dp is None else self._release(dp, ranked)
        loss = loop.run(carries, plan, centre, strength, rate, given, self.given, keys, public, release)
        note(self, ranked, loop.gradients)
        work = torch.from_numpy(worked(self, loop.gradients, plan.count)).to(cohort.device)
        out = [loss, work if stacked else work[0]]
        out += [t for c in carries for t in (*c.trained.values(), *c.moving.values())]
        if back is not None and stacked:
            back = back.to(cohort.device)
            out = [t.index_select(0, back) for t in out]
        return tuple(out)

    def _release(self, dp: SampleDP, positions: Sequence[int]) -> Release:
        """What the private gradients of the clients at `positions` are divided by and made noisy with."""
        cohort = self.cohort
        noise = torch.tensor([dp.noise_of(cohort.ids[p]) for p in positions], dtype=torch.float32)
        size = None
        if dp.sampling == "poisson":
            samples = cohort.sizes[list(positions)]
            expected = samples if self.batch <= 0 else np.minimum(samples, self.batch)
            size = torch.from_numpy(expected).float().clamp(min=1.0).to(cohort.device)
        return Release(noise.to(cohort.device), size)

    @property
    def sequence(self) -> str:
        """Which random sequence of batches this is.

        With privacy noise every fit of a round draws batches of its own: two gradients of one batch cost more privacy
        than those of two batches. Without noise the fits of a purpose share theirs.
        """
        dp, number = self.options.dp, self.options.number
        return self.purpose if dp is None or dp.noise == 0 or number == 0 else f"{self.purpose}/fit {number}"

    def _public(
        self, arranged: Arranged, positions: tuple[int, ...], steps: int, order: Any
    ) -> PublicTerm | None:
        source = self.cohort.public
        if self.public is None or source is None:
            return None
        keys = self.cohort.keys(positions, self.purpose + "/public")
        keys = keys if order is None else keys[order]
        # A fit by pieces goes on where the piece before it stopped, as on the private batches.
        first = self.first // self.options.batches
        rows = public_rows(keys, len(source), self.public.batch_size, steps, first).to(source.x.device)
        model, strength, targets = self.cohort.model, self.public.strength, arranged.spread()
        return PublicTerm(model, source, strength, targets, rows, arranged.stacked)

    def given(self, flat: Sequence[Tensor]) -> tuple[Any, ...]:
        rest = iter(flat)
        return tuple(
            next(rest) if paths is None else tree.nest([(p, next(rest)) for p in paths])
            for paths in self.given_paths
        )

    def rebuild(self, start: Mapping[str, TensorDict], tensors: Sequence[Tensor], single: bool) -> Any:
        rest = iter(tensors)
        out = {}
        for (name, state), names in zip(start.items(), self.options.trained, strict=True):
            new = {n: next(rest) for n in (*names, *self.moving_names)}
            out[name] = TensorDict({n: new.get(n, t) for n, t in state.items()}, batch_size=[])
        return out[""] if single else out

    def where(self, positions: Sequence[int]) -> str:
        return _where(self.cohort, positions, self.purpose)


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
        if self.cohort.loss is cox:
            return (rows,)
        return torch.split(rows, rows_at_once(self.cohort.source, clients), dim=-1)

    def where(self, positions: Sequence[int]) -> str:
        return _where(self.cohort, positions, self.purpose)


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
        parts = torch.split(every, rows_at_once(source, len(positions) if own else 1))
        if not own:
            found = torch.cat([model(state, source.take(rows)) for rows in parts])
            return (found if dims is None else found.expand(len(positions), *found.shape).clone(),)
        mapped = torch.func.vmap(model, in_dims=(where, None))
        return (torch.cat([mapped(state, source.take(rows)) for rows in parts], dim=1),)

    def where(self, positions: Sequence[int]) -> str:
        return _where(self.cohort, positions, "predictions on the public set")


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
    return f"{_who([cohort.ids[p] for p in positions])}, round {cohort.round + 1}, stage '{stage}'"


def _who(ids: Sequence[int]) -> str:
    return f"client {ids[0]}" if len(ids) == 1 else f"one of the clients {', '.join(map(str, ids))}"
