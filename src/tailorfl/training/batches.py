"""The clients of a fit, with their tensors laid out for training, and the batches of every step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tailorfl.models.skeleton import laid_out
from tailorfl.training.gradients import Batch, Component, PublicTerm, public_rows
from tailorfl.training.objective import class_prior
from tailorfl.training.operations import NOTHING, CohortLayout, Layout, Mapped, Packed
from tailorfl.training.plan import BatchPlan, Rows, Steps, runs
from tailorfl.training.request import FitRequest
from tailorfl.training.sample_privacy import GradientRelease, SampleDP

Which = slice | Tensor
"""Positions of clients; a slice gives views of their tensors, an index copies that `put` writes back."""


@dataclass(frozen=True)
class ActiveClients:
    """The tensors of the clients that take a step: [clients, ...], or of one client without that axis."""

    components: Sequence[Component]
    params: list[Tensor]
    """The trained tensors of all components, in order."""
    memory: list[Tensor]
    """The optimizer's memory: zeros at first, in the shapes of `params`, `UpdateRule.memories` times."""
    keys: Tensor
    """int64 [clients]."""
    given: Packed = NOTHING
    """The inputs of a direction."""
    centre: list[Tensor] | None = None
    """The centre of the proximal pull, in the order of `params`."""
    strength: Tensor | None = None
    """λ of that pull if it is a tensor, [clients]."""
    rate: Tensor | None = None
    """η if it is a tensor, [clients]."""
    release: GradientRelease | None = None
    """The release of private sums as gradients."""
    classes: Tensor | None = None
    """[clients, classes] class weights in the loss."""
    prior: Tensor | None = None
    """[clients, outputs] γ log n_c, by which the balanced softmax shifts outputs."""
    channels_last: bool = field(default=False, kw_only=True)
    """Whether images and convolutions have the channels-last memory format."""

    def of(self, which: Which) -> ActiveClients:
        """Return the part of some clients; the object itself if they are all."""
        if not self.keys.ndim or (isinstance(which, slice) and which == slice(0, len(self.keys))):
            return self

        def cut(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor[which]

        return ActiveClients(
            [component.of(which) for component in self.components],
            [p[which] for p in self.params],
            [m[which] for m in self.memory],
            self.keys[which],
            self.given.map(lambda t: t[which]),
            None if self.centre is None else [t[which] for t in self.centre],
            cut(self.strength),
            cut(self.rate),
            None if self.release is None else self.release.of(which),
            cut(self.classes),
            cut(self.prior),
        )

    def put(self, which: Which, part: ActiveClients) -> None:
        """Write back the part of clients chosen by index; views need no writing."""
        if isinstance(which, slice):
            return
        for component, chosen in zip(self.components, part.components, strict=True):
            for name, buffer in chosen.moving.items():
                component.moving[name][which] = buffer
        for tensor, value in zip((*self.params, *self.memory), (*part.params, *part.memory), strict=True):
            tensor[which] = value


def steps_of_clients(request: FitRequest, inputs: dict[str, Any], clients: int) -> Steps | None:
    """Return the steps of a fit, one number for all clients or one for each; None if its length is in epochs."""
    steps = inputs.get("steps", request.steps)
    if isinstance(steps, Mapped) and steps.axis is not None:
        return tuple(int(n) for n in steps.tensor.reshape(clients).cpu().tolist())
    return None if steps is None else int(steps.tensor if isinstance(steps, Mapped) else steps)


def ordered_plan(
    request: FitRequest, positions: tuple[int, ...], inputs: dict[str, Any], stacked: bool
) -> tuple[BatchPlan, tuple[int, ...], Layout]:
    """Return the batch plan of `positions`, the positions in its order, and the layout of the clients' tensors."""
    cohort, length, clients = request.cohort, request.length, len(positions)
    draws = cohort.model.has_dropout or cohort.source.augment != "none" or request.dp is not None
    plan = cohort.plan(
        positions,
        request.sequence,
        request.batch,
        request.epochs,
        steps_of_clients(request, inputs, clients),
        length.first,
        length.batches,
        request.poisson,
        f"{request.purpose}/noise" if draws else None,
    )
    if not stacked:
        return plan, positions, Layout()
    order = by_falling_steps(plan) if clients > 1 else None
    if order is None:
        return plan, positions, CohortLayout(clients)
    layout = CohortLayout(clients, torch.from_numpy(order).to(cohort.device))
    return plan.ordered(order), tuple(positions[k] for k in order), layout


def by_falling_steps(plan: BatchPlan) -> Rows | None:
    """Return an order of clients by falling steps, then samples; None if they are in such an order already."""
    steps, samples = plan.steps, plan.count.sum(1)
    rank = steps * (samples.max(initial=0) + 1) + samples
    return None if (rank[:-1] >= rank[1:]).all() else np.lexsort((-samples, -steps))


def active_clients(
    request: FitRequest, inputs: dict[str, Any], layout: Layout, plan: BatchPlan, positions: tuple[int, ...]
) -> ActiveClients:
    """Return the clients of a plan, with copies of the tensors that training writes to."""
    cohort, config, device = request.cohort, request.cohort.config, request.cohort.device
    plain = request.direction is None and request.dp is None
    # A single client may use a faster memory format; results have the usual one.
    last = plain and not layout.stacked and cohort.model.channels_last(device)
    inputs_given = Packed(layout.views(inputs["given"]), request.given.form)
    terms = Packed(layout.views(inputs["terms"]), request.given_terms.form)
    components = []
    for name, state in inputs["start"].items():
        trained = layout.copies(state, request.trained[name])
        if last:
            trained = {n: laid_out(t, last) for n, t in trained.items()}
        moving = layout.copies(state, () if name in request.beside else request.moving)
        fixed = {n: t for n, t in state.items() if n not in trained and n not in moving}
        components.append(Component(trained, moving, *layout.parts(fixed), terms))
    params = [t for component in components for t in component.trained.values()]
    if plain:
        # Made leaves once, not at each step: updates happen without recording gradients.
        for param in params:
            param.requires_grad_()
    keys = np.zeros(len(plan.count), dtype=np.int64) if plan.keys is None else plan.keys
    classes, prior = cohort.weights_of_classes(positions), None
    if config.balanced:
        prior = class_prior(cohort.label_counts[list(positions)], config.gamma).to(device)
    if not layout.stacked:
        classes, prior = (None if t is None else t[0] for t in (classes, prior))
    return ActiveClients(
        components,
        params,
        [torch.zeros_like(p) for _ in range(request.rule.memories) for p in params],
        torch.from_numpy(keys).to(device) if layout.stacked else torch.tensor(int(keys[0]), device=device),
        inputs_given,
        centre=layout.views([t for centre in inputs["centre"].values() for t in centre.values()])
        if "centre" in inputs
        else None,
        strength=layout.views([inputs["strength"]])[0] if "strength" in inputs else None,
        rate=layout.views([inputs["rate"]])[0] if "rate" in inputs else None,
        release=None if request.dp is None else _release(request, request.dp, positions),
        classes=classes,
        prior=prior,
        channels_last=last,
    )


def _release(request: FitRequest, dp: SampleDP, positions: Sequence[int]) -> GradientRelease:
    """Return the noise and divisors of the private gradients of the clients at `positions`."""
    cohort, batch = request.cohort, request.batch
    noise = torch.tensor([dp.noise_of(cohort.ids[p]) for p in positions], dtype=torch.float32)
    size = None
    if request.poisson:
        samples = cohort.sizes[list(positions)]
        expected = samples if batch <= 0 else np.minimum(samples, batch)
        size = torch.from_numpy(expected).float().clamp(min=1.0).to(cohort.device)
    return GradientRelease(noise.to(cohort.device), size)


def public_terms(
    request: FitRequest, inputs: dict[str, Any], layout: Layout, plan: BatchPlan, positions: tuple[int, ...]
) -> list[PublicTerm]:
    """Return the terms on public samples, with the samples of every step."""
    cohort, source, length = request.cohort, request.cohort.public, request.length
    if source is None:
        return []
    out, steps = [], plan.rows.shape[1] // length.batches
    for number, (term, packed) in enumerate(zip(request.public, request.given_public, strict=True)):
        term_inputs = Packed(layout.views(inputs["public"][number]), packed.form)
        keys = cohort.keys(positions, f"{request.purpose}/public" + (f" {number}" if number else ""))
        # A fit in several pieces continues where the last piece stopped, as on private batches.
        first, batch = length.first // length.batches, term.public or len(source)
        rows = public_rows(keys, len(source), batch, steps, first).to(source.x.device)
        bare = replace(term, given=())
        out.append(PublicTerm(bare, cohort.model, cohort.loss, source, term_inputs, rows, layout.stacked))
    return out


GATHERED_BYTES = 2**20
"""Size of the inputs that are gathered at once for one client's next steps: small enough to stay in the cache."""


class Step(NamedTuple):
    """One step, or a part of it that clients with batches of equal size take together."""

    number: int
    """Number of the step within the fit, from 0."""
    at: int
    """Number of its batches within the fit, from 0: repeated steps share their batches."""
    who: Which
    """Positions of the clients."""
    batches: list[Batch]
    """One, unless the direction uses several."""


def steps_of(request: FitRequest, clients: ActiveClients, plan: BatchPlan, stacked: bool) -> Iterator[Step]:
    """Yield every step of a fit in order, with its batches.

    Image augmentation depends on the number of the batch, so fits of one purpose see equal images, however often they
    repeat them; all other random draws differ from step to step.
    """
    first, several, repeat = request.length.first, request.length.batches, request.length.repeat
    draws, keys = plan.keys is not None, clients.keys
    loaded = _of_cohort(request, clients, plan) if stacked else _of_client(request, clients, plan)
    for at, clients_at, tensors in loaded:
        begin = first + at * several
        for repetition in range(repeat):
            batches = []
            for number, (x, y, weight) in enumerate(tensors, start=begin):
                key = keys[clients_at] if stacked else keys
                key = key + (number * repeat + repetition) if draws else key
                classes, prior = clients.classes, clients.prior
                if stacked:
                    classes, prior = (None if t is None else t[clients_at] for t in (classes, prior))
                batches.append(Batch(x, y, weight, key, classes, prior))
            yield Step(at * repeat + repetition, at, clients_at, batches)


Loaded = tuple[int, Which, list[tuple[Tensor, Tensor, Tensor | None]]]
"""(number of the step, its clients, (x, y, weight) of each of its batches)."""


def _of_client(request: FitRequest, clients: ActiveClients, plan: BatchPlan) -> Iterator[Loaded]:
    """Yield the batches of one client, without an axis of clients; several steps' batches are gathered at once."""
    source, several, only = request.cohort.source, request.length.batches, slice(0, 1)
    last, key = clients.channels_last, clients.keys
    # A Poisson batch may be empty: it is then one sample of padding.
    sizes, empty = plan.count[0].clip(min=1), torch.zeros(1, device=key.device)
    rows = torch.from_numpy(plan.rows[0][np.arange(plan.rows.shape[2]) < sizes[:, None]]).to(source.x.device)
    weights = [None if real else empty for real in plan.count[0].tolist()]
    sizes = sizes.tolist()

    def samples() -> Iterator[tuple[Tensor, Tensor]]:
        if source.augment != "none":
            for number, part in enumerate(torch.split(rows, sizes), start=request.length.first):
                x, y = source.batch(part, key + number)
                yield laid_out(x, True) if last else x, y
            return
        bytes_of_one = 4 * math.prod(source.input_shape) * max(sizes, default=1)
        at_once, begin = max(GATHERED_BYTES // max(bytes_of_one, 1), 1), 0
        for start in range(0, len(sizes), at_once):
            some = sizes[start : start + at_once]
            x, y = source.batch(rows[begin : begin + sum(some)], key)
            begin += sum(some)
            x = laid_out(x, True) if last else x
            yield from zip(torch.split(x, some), torch.split(y, some), strict=True)

    remaining = ((x, y, weight) for (x, y), weight in zip(samples(), weights, strict=True))
    for at in range(len(sizes) // several):
        yield at, only, list(islice(remaining, several))


def _of_cohort(request: FitRequest, clients: ActiveClients, plan: BatchPlan) -> Iterator[Loaded]:
    """Yield the batches of a cohort that is ordered by falling steps.

    Batches of unequal size are padded if that costs little (`runs`). With batch norm, which depends on the whole batch,
    only clients whose batches of a step all have equal sizes are batched together.
    """
    source, several, keys = request.cohort.source, request.length.batches, clients.keys
    rows = torch.from_numpy(plan.rows).to(source.x.device)
    # Poisson batches are for privacy, which does not train batch norm; empty ones are all padding.
    by_size = request.cohort.model.has_batch_statistics and not plan.poisson
    uneven = ((plan.count > 0) & (plan.count < plan.count.max(0))).any(0).tolist()
    cuts = runs(plan) if len(plan.count) > 1 else [[(0, 1)]] * plan.count.shape[1]

    def loaded(number: int, which: Which, parts: Sequence[tuple[Tensor, Tensor | None]]) -> Loaded:
        batches = []
        for k, (part, weight) in enumerate(parts, start=request.length.first + number * several):
            x, y = source.batch(part, keys[which] + k)
            batches.append((x, y, None if weight is None else weight.to(keys.device)))
        return number, which, batches

    for number in range(len(uneven) // several):
        at = range(number * several, (number + 1) * several)
        if not (by_size and any(uneven[k] for k in at)):
            # All batches of one step belong to the same clients.
            for a, b in cuts[at[0]] if several == 1 else [(0, cuts[at[0]][-1][1])]:
                widest = plan.count[a:b, at[0] : at[-1] + 1].max(0).clip(min=1)
                parts = [
                    (rows[a:b, k, :wide], _weights(plan, a, b, k)) for k, wide in zip(at, widest, strict=True)
                ]
                yield loaded(number, slice(a, b), parts)
            continue
        active = cuts[at[0]][-1][1]
        counts = plan.count[:active, at[0] : at[0] + several]
        for sizes in sorted(set(map(tuple, counts.tolist()))):
            chosen = torch.from_numpy((counts == sizes).all(1).nonzero()[0])
            yield loaded(
                number, chosen, [(rows[chosen, k, :size], None) for k, size in zip(at, sizes, strict=True)]
            )


def _weights(plan: BatchPlan, first: int, end: int, at: int) -> Tensor | None:
    """Return 1 for real samples and 0 for padding, float [clients, widest]; None without padding."""
    counts = plan.count[first:end, at]
    if (counts == counts[0]).all() and counts[0] > 0:
        return None
    return (torch.arange(max(int(counts.max()), 1))[None, :] < torch.from_numpy(counts)[:, None]).float()
