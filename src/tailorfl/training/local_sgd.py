"""LocalSGD: the one loop in which all local training happens, for one client or a whole cohort at once.

    for every batch:   g = ∇F(p; batch)                       or the method's own direction (SAM, APFL, ...)
                       g = g + ∇T(p; public batch)             terms on public samples
                       g = g + λ(p − centre)                   proximal pull, penalty (λ/2)‖p − centre‖²
                       p moves along g by the rule of an optimizer   SGD or AdamW, see `tailorfl.training.update`

Tensors are physical here (no vmap wrapper): a cohort carries a leading client axis and is ordered by falling
number of steps, so the clients still active at a step are a prefix and an idle client is never touched.
Updates are in place on tensors this loop owns. The gradient of a cohort is the gradient of the SUM of its
clients' losses, since clients share no variable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailorfl.data.source import Source
from tailorfl.models.cohort_layers import WeightStep
from tailorfl.training.active import ActiveClients
from tailorfl.training.alone import descend
from tailorfl.training.custom_gradient import Directed, Directions, Passes
from tailorfl.training.gradients import (
    Batch,
    Carry,
    LocalObjective,
    single_users,
    sum_gradient,
)
from tailorfl.training.plan import BatchPlan, Steps, runs
from tailorfl.training.public_term import PublicTerm
from tailorfl.training.sample_privacy import SampleDP
from tailorfl.training.terms import Term
from tailorfl.training.update import Moment, Update, UpdateRule, along, clip_norm

PublicGradient = Callable[[Carry, list[Tensor]], list[Tensor]]
"""The gradient of a term on public samples at the parameters given."""


class Step(NamedTuple):
    """One step, or the part of it that clients with batches of equal sizes take together."""

    number: int
    who: slice | Tensor
    """Positions of the clients."""
    batches: Sequence[tuple[Tensor, Tensor | None]]
    """(rows, weights of samples) of each of its batches."""


@dataclass(frozen=True)
class FitOptions:
    """What one call of `Client.fit` does; the same for every client of a cohort."""

    trained: tuple[tuple[str, ...], ...]
    """Names of the trained parameters of each component (one unless several models train together)."""
    rule: UpdateRule
    components: tuple[str, ...] = ("",)
    clip: float | None = None
    clip_each: bool = False
    """Whether every gradient that the direction asks for is clipped, and not what is made of them."""
    repeat: int = 1
    batches: int = 1
    prox: float | None = None
    direction: Directions | None = None
    terms: tuple[Term, ...] = ()
    """Of the loss on private batches; what they are given travels apart."""
    public: tuple[Term, ...] = ()
    dp: SampleDP | None = None
    number: int = 0
    """Which fit of its client this is: fits may share batches and dropout masks, never privacy noise."""
    purpose: str = "train"
    """What it is for."""
    sequence: str = "train"
    """Which random sequence of batches: that of its purpose, or with privacy noise one of its own."""
    batch: int = 0
    """Samples of a batch; 0: all of the client's."""
    epochs: float | None = None
    steps: Steps | None = None
    """Where it is the same for all clients; else each client's travels with what differs between them."""
    first: int = 0
    """How many batches of its sequence it skips."""


@dataclass
class LocalSGD:
    """The loop over a batch plan.

    `stacked` tells whether tensors have the leading client axis.
    """

    objective: LocalObjective
    source: Source
    options: FitOptions
    stacked: bool
    _single_users: dict[frozenset[str], tuple[bool, ...]] = field(default_factory=dict)

    def run(
        self, every: ActiveClients, plan: BatchPlan, public: Sequence[PublicTerm] = ()
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Trains in place and returns the mean training loss of each client, [clients] (0-d for one client).

        Beside it how many gradients were taken of each batch of the plan, [clients, batches]. `plan` is ordered by
        falling steps; `every` has all clients of the plan; `public` are terms on public samples.
        """
        options, keys = self.options, every.keys
        taken = torch.from_numpy(plan.steps // options.batches).to(keys.device)
        update = Update(options.rule, taken * options.repeat, self.stacked)
        directed = self._directed()
        if directed is None and not self.stacked:
            return self._alone(every, plan, update, public), options.repeat * (plan.count > 0).astype(
                np.int64
            )
        if directed is None:
            # Leaves once, not once a step: they are updated in place where gradients are not recorded.
            for leaf in every.params:
                leaf.requires_grad_()
        clients = len(plan.count)
        total = torch.zeros(clients, device=keys.device)
        gradients = np.zeros(plan.count.shape, dtype=np.int64)
        for step in self._steps(plan):
            whole = isinstance(step.who, slice) and (step.who.start, step.who.stop) == (0, clients)
            now = every if whole else every.of(step.who)
            loaded, at = self._loaded(step, now.keys), step.number * options.batches
            for again in range(options.repeat):
                batches = [
                    Batch(x, y, w, now.keys + (of * options.repeat + again), now.release, now.classes)
                    for of, x, y, w in loaded
                ]
                moment = Moment(step.number * options.repeat + again, step.who, now.rate)
                pushed = [partial(term.gradient, step=step.number, who=step.who) for term in public]
                value, asked = self._step(now, batches, moment, update, pushed, directed)
                gradients[step.who, at : at + options.batches] += asked
                total[step.who] += value
            if not whole:
                every.put(step.who, now)
        for leaf in every.params:
            leaf.requires_grad_(False)
        mean = total / taken.clamp(min=1) / options.repeat
        return mean if self.stacked else mean[0], gradients

    def _alone(
        self, every: ActiveClients, plan: BatchPlan, update: Update, public: Sequence[PublicTerm]
    ) -> Tensor:
        """Trains one client along its gradient and returns its mean loss, 0-d."""
        options, who = self.options, slice(0, 1)
        bare = not public and every.centre is None and options.clip is None and options.rule.own == 1.0

        def move(batch: int, step: int, gradient: list[Tensor]) -> None:
            moment = Moment(step, who, every.rate)
            if bare:
                update.apply(moment, every.params, every.memory, gradient)
                return
            pushed = [partial(term.gradient, step=batch, who=who) for term in public]
            self._move(every, options.components, gradient, moment, update, pushed)

        losses = descend(self.objective, self.source, every, plan, options.first, options.repeat, move)
        return torch.stack(losses).mean().float() if losses else torch.zeros((), device=every.keys.device)

    def _directed(self) -> Directed | None:
        """How to find what to descend along, where that is not simply the gradient."""
        options = self.options
        if options.direction is None and options.dp is None:
            return None
        return Directed(
            self.objective,
            options.components,
            options.direction,
            options.dp,
            options.number,
            options.clip if options.clip_each else None,
        )

    def _step(
        self,
        now: ActiveClients,
        batches: Sequence[Batch],
        moment: Moment,
        update: Update,
        public: Sequence[PublicGradient],
        directed: Directed | None,
    ) -> tuple[Tensor, list[int]]:
        """Takes a step and returns each client's loss, and how many gradients of each batch that took."""
        if directed is None:
            # A public term is taken at the parameters before the step, so they must all wait for it.
            shares = {} if public else self._shares(now, batches, moment, update)
            leaves = _leaves(now.params)
            value, found = sum_gradient(self.objective, now.carries[0], leaves, batches[0], shares)
            self._move(now, self.options.components, found, moment, update, public)
            return value, [1]
        passes = Passes(directed, now.carries, batches)
        for turn in directed.turns:
            along = passes.along(turn, now.params, now.given, self.stacked)
            self._move(now, turn, along, moment, update, public)
        return passes.close(), passes.taken

    def _move(
        self,
        now: ActiveClients,
        turn: Sequence[str],
        gradient: Sequence[Tensor | None],
        moment: Moment,
        update: Update,
        public: Sequence[PublicGradient],
    ) -> None:
        """Moves the components of `turn` along their gradient, which is None where a tensor has moved already."""
        options, every = self.options, self._places(turn)
        where = [k for places in every for k in places]
        rest = [k for k, g in zip(where, gradient, strict=True) if g is not None]
        slope = {k: g for k, g in zip(where, gradient, strict=True) if g is not None}
        for gradient_of in public:
            torch._foreach_add_(list(slope.values()), gradient_of(now.carries[0], now.params))
        if not rest:
            return
        if now.centre is not None:
            params, along = [now.params[k] for k in rest], list(slope.values())
            self._pull(params, along, [now.centre[k] for k in rest], now.strength)
        if options.clip is not None and not options.clip_each:
            for places in (part for one in every for part in self._by_owner(one) if part):
                clip_norm([slope[k] for k in places], options.clip, self.stacked)
        of_model, of_own = (rest, []) if options.rule.own == 1 else self._by_owner(rest)
        for places, share in ((of_model, 1.0), (of_own, options.rule.own)):
            if places:
                copies = range(0, len(now.memory), len(now.params))
                held = [now.memory[first + k] for first in copies for k in places]
                params, along = [now.params[k] for k in places], [slope[k] for k in places]
                update.apply(moment, params, held, along, share)

    def _by_owner(self, places: Sequence[int]) -> tuple[list[int], list[int]]:
        """Places of tensors of the model, and of those that only terms use: clipped and paced apart."""
        names, known = [n for own in self.options.trained for n in own], self.objective.model.sizes
        of_model = [k for k in places if names[k] in known]
        return of_model, [k for k in places if names[k] not in known]

    def _places(self, turn: Sequence[str]) -> list[range]:
        """Where the trained tensors of each of these components are among those of all."""
        found, first = {}, 0
        for name, names in zip(self.options.components, self.options.trained, strict=True):
            found[name] = range(first, first + len(names))
            first += len(names)
        return [found[name] for name in turn]

    def _steps(self, plan: BatchPlan) -> list[Step]:
        """Every step in order.

        Batches of unequal size are padded where that costs little (`runs`), except where a batch counts as a whole
        (batch norm): there the clients with equal sizes of all batches of a step are batched together.
        """
        rows, n = torch.from_numpy(plan.rows).to(self.source.x.device), self.options.batches
        # Poisson batches are for privacy, which trains no batch norm; there empty ones are all padding.
        apart = self.objective.model.has_batch_statistics and plan.taken is None
        uneven = ((plan.count > 0) & (plan.count < plan.count.max(0))).any(0).tolist()
        cuts = runs(plan) if len(plan.count) > 1 else [[(0, 1)]] * plan.count.shape[1]
        out: list[Step] = []
        for number in range(len(uneven) // n):
            at = range(number * n, (number + 1) * n)
            if not (apart and any(uneven[k] for k in at)):
                # The batches of one step are those of the same clients.
                for a, b in cuts[at[0]] if n == 1 else [(0, cuts[at[0]][-1][1])]:
                    widest = plan.count[a:b, at[0] : at[-1] + 1].max(0).clip(min=1)
                    batches = [
                        (rows[a:b, k, :wide], _weights(plan, a, b, k))
                        for k, wide in zip(at, widest, strict=True)
                    ]
                    out.append(Step(number, slice(a, b), batches))
                continue
            active = cuts[at[0]][-1][1]
            counts = plan.count[:active, at[0] : at[0] + n]
            for sizes in sorted(set(map(tuple, counts.tolist()))):
                chosen = torch.from_numpy((counts == sizes).all(1).nonzero()[0])
                whole = [(rows[chosen, k, :size], None) for k, size in zip(at, sizes, strict=True)]
                out.append(Step(number, chosen, whole))
        return out

    def _loaded(self, step: Step, keys: Tensor) -> list[tuple[int, Tensor, Tensor, Tensor | None]]:
        """(number within the sequence, x, y, weight) of each batch of a step; `keys` are those of its clients.

        Images are augmented by that number, so that fits of one purpose see equal images, however often they repeat.
        """
        first = self.options.first + step.number * self.options.batches
        return [
            (
                number,
                *self.source.batch(rows, keys + number),
                None if weight is None else weight.to(keys.device),
            )
            for number, (rows, weight) in enumerate(step.batches, start=first)
        ]

    def _shares(
        self, now: ActiveClients, batches: Sequence[Batch], moment: Moment, update: Update
    ) -> dict[int, WeightStep]:
        """What happens to each parameter that may take its step inside the backward pass, by its place in memory.

        That is for cohorts and plain gradient descent, where nothing has to see the gradient first.
        """
        options = self.options
        if options.clip is not None or options.rule.memories or options.rule.own != 1:
            return {}
        carry, model = now.carries[0], self.objective.model
        # A term may use a weight once more, so what is known of one fit says nothing of another.
        known = self._single_users if options.terms else model.single_users
        if carry.names not in known:
            known[carry.names] = single_users(self.objective, carry, _leaves(now.params), batches[0])
        pace = update.pace(moment)
        pull: float | Tensor = 0.0
        if now.centre is not None:
            pull = pace * (now.strength if now.strength is not None else float(options.prox or 0.0))
        keep = 1.0 - pace * options.rule.weight_decay - pull
        return {
            p.data_ptr(): WeightStep(pace, keep, pull, None if now.centre is None else now.centre[k])
            for k, (p, single) in enumerate(zip(now.params, known[carry.names], strict=True))
            if single
        }

    def _pull(
        self, params: list[Tensor], gradient: list[Tensor], centre: list[Tensor], strength: Tensor | None
    ) -> None:
        """Adds the gradient of the proximal penalty."""
        pull = torch._foreach_sub(params, centre)
        if strength is None:
            assert self.options.prox is not None
            torch._foreach_add_(gradient, pull, alpha=self.options.prox)
        else:
            torch._foreach_add_(gradient, [along(strength, d) * d for d in pull])


def _leaves(params: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that gradients are taken of: a slice of a leaf calls itself a leaf too, but autograd does not see it
    used.
    """
    return [p if p.requires_grad and p._base is None else p.detach().requires_grad_() for p in params]


def _weights(plan: BatchPlan, first: int, end: int, at: int) -> Tensor | None:
    """Returns 1 for real samples and 0 for padding, float [clients, widest]; None where nothing is padded."""
    counts = plan.count[first:end, at]
    if (counts == counts[0]).all() and counts[0] > 0:
        return None
    return (torch.arange(max(int(counts.max()), 1))[None, :] < torch.from_numpy(counts)[:, None]).float()
