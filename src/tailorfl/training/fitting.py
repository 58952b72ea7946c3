"""A training of a cohort as an operation: named tensors in, what moved out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.models.layouts import laid_out
from tailorfl.training.active import ActiveClients
from tailorfl.training.cohort import Cohort
from tailorfl.training.counting import account, count
from tailorfl.training.gradients import Carry, LocalObjective
from tailorfl.training.local_sgd import FitOptions, LocalSGD
from tailorfl.training.operations import where
from tailorfl.training.packing import Dims, Form, Layout, Packed
from tailorfl.training.plan import BatchPlan
from tailorfl.training.public_term import PublicTerm, public_rows
from tailorfl.training.sample_privacy import Release, SampleDP
from tailorfl.training.terms import Given


class Inputs(NamedTuple):
    """What goes into a training, by name; every tensor may be one for all clients or each client's own."""

    steps: Tensor | None
    """How many, where that is a tensor; it comes first, since the order of the clients depends on it."""
    trained: Mapping[str, Mapping[str, Tensor]]
    """Component, then name: what training moves along gradients."""
    moving: Mapping[str, Mapping[str, Tensor]]
    """The same of the running statistics that it updates."""
    fixed: Mapping[str, Mapping[str, Tensor]]
    """The same of the rest of each state."""
    centre: Mapping[str, Mapping[str, Tensor]] | None
    """Where the proximal pull goes, as `trained`."""
    strength: Tensor | None
    """λ of that pull where it is a tensor."""
    rate: Tensor | None
    """η where it is a tensor."""
    given: tuple[Given, ...]
    """Of the direction."""
    terms: tuple[tuple[Given, ...], ...]
    """What each term on private batches is given; last, of the balanced softmax, (γ log n_c,)."""
    public: tuple[tuple[Given, ...], ...]
    """What each term on public samples is given."""


@dataclass(frozen=True)
class Fit:
    """One training of a cohort: everything that is not a tensor, and the form of what is."""

    cohort: Cohort
    options: FitOptions
    form: Form
    """Of `Inputs`."""

    def run(self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Trains the clients at `positions`: their losses, gradients, and tensors that moved, by component.

        `dims` are the client axes of `tensors`, or None for one client without axis.
        """
        stacked, clients = dims is not None, len(positions)
        cohort, options = self.cohort, self.options
        if self.form.parts[0].size:
            options = replace(options, steps=_each(tensors[0], dims, clients))
        if cohort.counting:
            return self._counted(options, tensors, positions, Layout(dims, clients))
        poisson = options.dp is not None and options.dp.sampling == "poisson"
        length = (options.batch, options.epochs, options.steps, options.first, options.batches, poisson)
        plan = cohort.plan(positions, options.sequence, *length, self._drawn)
        order, back = _by_falling_steps(plan) if clients > 1 else (None, None)
        if order is not None:
            plan = plan.ordered(order)
        by_steps = None if order is None else torch.from_numpy(order).to(cohort.device)
        inputs = self._arranged(tensors, Layout(dims, clients, by_steps))
        ranked = positions if order is None else tuple(positions[k] for k in order)
        # A client alone may have a faster order of memory; what comes out has the usual one.
        alone = not stacked and options.direction is None and options.dp is None
        last = alone and cohort.model.channels_last(cohort.device)
        carries = [
            Carry(
                {n: laid_out(t, last) for n, t in own.items()},
                inputs["moving"][name],
                {n: t.tensor for n, t in inputs["fixed"][name].items() if t.by_client},
                {n: t.tensor for n, t in inputs["fixed"][name].items() if not t.by_client},
                inputs["terms"],
            )
            for name, own in inputs["trained"].items()
        ]
        centre = inputs["centre"]
        params = [t for carry in carries for t in carry.trained.values()]
        active = ActiveClients(
            carries,
            params,
            inputs["given"],
            None if centre is None else [t for own in centre.values() for t in own.values()],
            inputs["strength"],
            inputs["rate"],
            self._keys(plan),
            None if options.dp is None else self._release(options.dp, ranked),
            cohort.weights_of_classes(ranked),
            [torch.zeros_like(p) for _ in range(options.rule.memories) for p in params],
        )
        public = self._public(inputs["public"], ranked, plan.rows.shape[1] // options.batches, stacked)
        objective = LocalObjective(cohort.model, cohort.loss, options.terms, cohort.config.balanced)
        loop = LocalSGD(objective, cohort.source, options, stacked)
        loss, gradients = loop.run(active, plan, public)
        work = account(cohort, options, ranked, gradients, plan.count)
        out = [loss, work if stacked else work[0]]
        out += [t for c in carries for t in (*c.trained.values(), *c.moving.values())]
        if last:
            out = [t.contiguous() for t in out]
        if back is not None and stacked:
            back = back.to(cohort.device)
            out = [t.index_select(0, back) for t in out]
        return tuple(out)

    def _arranged(self, tensors: Sequence[Tensor], layout: Layout) -> dict[str, Any]:
        """The tensors by the fields of `Inputs`, with copies of what training writes to."""
        return layout.arranged(tensors, self.form, ("trained", "moving"), ("fixed",), ("given", "terms"))

    @property
    def _drawn(self) -> str | None:
        """The purpose of the keys of dropout masks, changed images and privacy noise; None where none is drawn."""
        draws = self.cohort.model.has_dropout or self.cohort.source.augment != "none" or self.options.dp
        return f"{self.options.purpose}/noise" if draws else None

    def _keys(self, plan: BatchPlan) -> Tensor:
        """Those keys, int64 [clients]; 0 where nothing is drawn."""
        keys = np.zeros(len(plan.count), dtype=np.int64) if plan.keys is None else plan.keys
        return torch.from_numpy(keys).to(self.cohort.device)

    def _counted(
        self,
        options: FitOptions,
        tensors: Sequence[Tensor],
        positions: tuple[int, ...],
        layout: Layout,
    ) -> tuple[Tensor, ...]:
        """Records what would be used; returns a loss of 0, the gradients that training would take, and the start."""
        stacked, inputs = layout.dims is not None, self._arranged(tensors, layout)

        def one(tensor: Tensor) -> Tensor:
            return tensor[0] if stacked else tensor

        trained = {
            name: TensorDict({n: one(t) for n, t in inputs["trained"][name].items()}, batch_size=[])
            for name in options.components
        }
        work = count(self.cohort, options, positions, trained, inputs["given"].map(one).unpack())
        unmoved = [
            t
            for name in options.components
            for t in (*inputs["trained"][name].values(), *inputs["moving"][name].values())
        ]
        loss = torch.zeros(len(positions)) if stacked else torch.zeros(())
        return (loss, work if stacked else work[0], *unmoved)

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
        self, given: Sequence[Any], positions: tuple[int, ...], steps: int, stacked: bool
    ) -> list[PublicTerm]:
        cohort, source, options = self.cohort, self.cohort.public, self.options
        if source is None:
            return []
        out = []
        for number, (term, own) in enumerate(zip(options.public, given, strict=True)):
            keys = cohort.keys(positions, f"{options.purpose}/public" + (f" {number}" if number else ""))
            # A fit by pieces goes on where the piece before it stopped, as on the private batches.
            first, batch = options.first // options.batches, term.public or len(source)
            rows = public_rows(keys, len(source), batch, steps, first).to(source.x.device)
            out.append(PublicTerm(term, cohort.model, cohort.loss, source, Packed.of(own), rows, stacked))
        return out

    def where(self, positions: Sequence[int]) -> str:
        return where(self.cohort, positions, self.options.purpose)


def _each(steps: Tensor, dims: Dims, clients: int) -> int | tuple[int, ...]:
    """The steps of every client, or of the one there is."""
    if dims is None or dims[0] is None:
        return int(steps)
    return tuple(int(n) for n in steps.reshape(clients).cpu().tolist())


def _by_falling_steps(plan: BatchPlan) -> tuple[Any, Tensor | None]:
    """An order of clients by falling steps, then samples, and the way back; None where they are so already."""
    steps, samples = plan.steps, plan.count.sum(1)
    ahead = steps[:-1] * (samples.max(initial=0) + 1) + samples[:-1]
    behind = steps[1:] * (samples.max(initial=0) + 1) + samples[1:]
    if (ahead >= behind).all():
        return None, None
    order = np.lexsort((-samples, -steps))
    return order, torch.from_numpy(np.argsort(order, kind="stable"))
