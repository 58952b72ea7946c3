"""A training of a cohort as an operation: named tensors in, what moved out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.training.cohort import Cohort
from tailorfl.training.counting import count, note, worked
from tailorfl.training.gradients import Carry, Objective
from tailorfl.training.local_sgd import FitOptions, LocalSGD
from tailorfl.training.operations import where
from tailorfl.training.packing import Arrange, Dims, Form, Packed, Travelled, travelled
from tailorfl.training.plan import BatchPlan
from tailorfl.training.public_term import PublicTerm, public_rows
from tailorfl.training.sample_privacy import Release, SampleDP


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
        return where(self.cohort, positions, self.options.purpose)


def _each(steps: Travelled, clients: int) -> int | tuple[int, ...]:
    """The steps of every client, or of the one there is."""
    if steps.dim is None:
        return int(steps.tensor)
    return tuple(int(n) for n in steps.tensor.reshape(clients).cpu().tolist())


def _by_falling_steps(plan: BatchPlan) -> tuple[Any, Tensor | None]:
    """An order of clients by falling steps, then samples, and the way back; None where they are so already."""
    steps, samples = plan.steps, plan.count.sum(1)
    ahead = steps[:-1] * (samples.max(initial=0) + 1) + samples[:-1]
    behind = steps[1:] * (samples.max(initial=0) + 1) + samples[1:]
    if (ahead >= behind).all():
        return None, None
    order = np.lexsort((-samples, -steps))
    return order, torch.from_numpy(np.argsort(order, kind="stable"))
