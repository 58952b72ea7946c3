"""LocalSGD: the one loop in which all local training happens, for one client or a whole cohort at once.

    for every batch:   g = ∇F(p; batch)                       or the method's own direction (SAM, APFL, ...)
                       g = g + ∇D(p; public batch)             pull of the predictions on public data
                       g = g + λ(p − centre)                   proximal pull, penalty (λ/2)‖p − centre‖²
                       p = p − η · SGD(g)                      momentum and weight decay as in torch.optim.SGD

Tensors are physical here (no vmap wrapper): a cohort carries a leading client axis and is ordered by falling
number of steps, so the clients still active at a step are a prefix and an idle client is never touched.
Updates are in place on tensors this loop owns. The gradient of a cohort is the gradient of the SUM of its
clients' losses, since clients share no variable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tailorfl.core.distill import PublicTerm
from tailorfl.core.gradients import Batch, Carry, Directed, Direction, Objective, Rebuild, sum_gradient
from tailorfl.core.plan import BatchPlan
from tailorfl.core.privacy import SampleDP
from tailorfl.data.source import Source


class Step(NamedTuple):
    """One step, or the part of it that clients with batches of equal sizes take together."""

    number: int
    active: int
    chosen: Tensor | None
    """Positions of the clients; None for all active ones."""
    batches: Sequence[tuple[Tensor, Tensor | None]]
    """(rows, weights of samples) of each of its batches."""


@dataclass(frozen=True)
class FitOptions:
    """What one call of `Client.fit` does; the same for every client of a cohort."""

    trained: tuple[tuple[str, ...], ...]
    """Names of the trained parameters of each component (one unless several models train together)."""
    components: tuple[str, ...] = ("",)
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    repeat: int = 1
    batches: int = 1
    prox: float | None = None
    direction: Direction | None = None
    dp: SampleDP | None = None
    number: int = 0
    """Which fit of its client this is: fits may share batches and dropout masks, never privacy noise."""


class LocalSGD:
    """The loop over a batch plan; `stacked` tells whether tensors have the leading client axis."""

    def __init__(self, objective: Objective, source: Source, options: FitOptions, stacked: bool) -> None:
        self.objective, self.source, self.options, self.stacked = objective, source, options, stacked
        self.directed: Directed | None = None
        if options.direction is not None or options.dp is not None:
            self.directed = Directed(
                objective, options.components, options.direction, options.dp, options.number
            )

    def run(
        self,
        carries: Sequence[Carry],
        plan: BatchPlan,
        centre: Sequence[Tensor] | None,
        strength: Tensor | None,
        rate: Tensor | None,
        given: Sequence[Tensor],
        rebuild: Rebuild,
        keys: Tensor,
        public: PublicTerm | None = None,
    ) -> Tensor:
        """Trains in place and returns the mean training loss of each client, [clients] (0-d for one client).

        `plan` is ordered by falling steps; `centre` is the proximal centre, in the order of the trained
        tensors, `strength` λ and `rate` η where they are tensors ([clients]); `given` are extra inputs of the
        direction, which `rebuild` makes its arguments; `keys` [clients] int64; `public` adds a term of the loss on
        public data.
        """
        options = self.options
        params = [t for carry in carries for t in carry.trained.values()]
        velocity = [torch.zeros_like(p) for p in params] if options.momentum else []
        if self.directed is None:
            # Leaves once, not once a step: they are updated in place where gradients are not recorded.
            for leaf in params:
                leaf.requires_grad_()
        clients = len(plan.count)
        total = torch.zeros(clients)
        for step in self._steps(plan):
            index = slice(0, step.active) if step.chosen is None else step.chosen
            cut = _Cut(index, clients, self.stacked)
            part = carries if cut.whole else [cut.carry(carry) for carry in carries]
            p, v, extra = cut.take(params), cut.take(velocity), cut.take(given)
            pull = None if centre is None else cut.take(centre)
            force, pace = (t if t is None or not self.stacked else t[cut.index] for t in (strength, rate))
            loaded = [(self.source.take(r), self.source.targets(r), weight) for r, weight in step.batches]
            own = keys if cut.whole else keys[cut.index]
            first = step.number * options.batches
            for again in range(options.repeat):
                batches = [
                    Batch(x, y, weight, own + ((first + j) * options.repeat + again))
                    for j, (x, y, weight) in enumerate(loaded)
                ]
                value, gradient = self._gradient(part, p, batches, extra, rebuild)
                if public is not None:
                    torch._foreach_add_(gradient, public.gradient(part[0], p, step.number, cut.index))
                self._update(p, v, gradient, pull, force, pace)
                if cut.whole:
                    total += value
                else:
                    total[cut.index] += value
            cut.put(params, p)
            cut.put(velocity, v)
            for carry, piece in zip(carries, part, strict=True):
                cut.put(list(carry.moving.values()), list(piece.moving.values()))
        for leaf in params:
            leaf.requires_grad_(False)
        mean = total / torch.from_numpy(plan.steps // options.batches).clamp(min=1) / options.repeat
        return mean if self.stacked else mean[0]

    def _steps(self, plan: BatchPlan) -> list[Step]:
        """Every step in order.

        Batches of unequal size are padded, except where a batch counts as a whole (batch norm): there the
        clients with equal sizes of all batches of a step are batched together.
        """
        rows = torch.from_numpy(plan.rows)
        out: list[Step] = []
        active_at, widest = (plan.count > 0).sum(0).tolist(), plan.count.max(0, initial=0).tolist()
        uneven = ((plan.count > 0) & (plan.count < plan.count.max(0, initial=0))).any(0).tolist()
        apart, n = self.objective.model.has_batch_statistics, self.options.batches
        for number in range(len(widest) // n):
            at = range(number * n, (number + 1) * n)
            active = active_at[at[0]]
            if not (apart and any(uneven[k] for k in at)):
                batches = [(rows[:active, k, : widest[k]], _weights(plan, active, k, uneven[k])) for k in at]
                out.append(Step(number, active, None, batches))
                continue
            counts = plan.count[:active, at[0] : at[0] + n]
            for sizes in sorted(set(map(tuple, counts.tolist()))):
                chosen = torch.from_numpy((counts == sizes).all(1).nonzero()[0])
                whole = [(rows[chosen, k, :size], None) for k, size in zip(at, sizes, strict=True)]
                out.append(Step(number, active, chosen, whole))
        return out

    def _gradient(
        self,
        carries: Sequence[Carry],
        params: list[Tensor],
        batches: Sequence[Batch],
        given: list[Tensor],
        rebuild: Rebuild,
    ) -> tuple[Tensor, list[Tensor]]:
        if self.directed is not None:
            return self.directed.gradient(carries, params, batches, given, rebuild, self.stacked)
        # A slice of a leaf calls itself a leaf too, but autograd does not see it used.
        leaves = [p if p.requires_grad and p._base is None else p.detach().requires_grad_() for p in params]
        return sum_gradient(self.objective, carries[0], leaves, batches[0], self.stacked)

    def _update(
        self,
        params: list[Tensor],
        velocity: list[Tensor],
        gradient: list[Tensor],
        centre: list[Tensor] | None,
        strength: Tensor | None,
        rate: Tensor | None,
    ) -> None:
        options = self.options
        if centre is not None:
            pull = torch._foreach_sub(params, centre)
            if strength is None:
                assert options.prox is not None
                torch._foreach_add_(gradient, pull, alpha=options.prox)
            else:
                torch._foreach_add_(gradient, [_along(strength, d) * d for d in pull])
        if options.clip is not None:
            self._clip(gradient, options.clip)
        if options.weight_decay:
            torch._foreach_add_(gradient, params, alpha=options.weight_decay)
        if velocity:
            torch._foreach_mul_(velocity, options.momentum)
            torch._foreach_add_(velocity, gradient)
            gradient = velocity
        if rate is None:
            torch._foreach_add_(params, gradient, alpha=-options.lr)
        else:
            torch._foreach_sub_(params, [_along(rate, g) * g for g in gradient])

    def _clip(self, gradient: list[Tensor], limit: float) -> None:
        """Scales each client's whole gradient to norm `limit` at most, as torch's clip_grad_norm_ does."""
        first = 1 if self.stacked else 0
        squares = sum(g.square().flatten(first).sum(-1) if g.ndim > first else g.square() for g in gradient)
        assert isinstance(squares, Tensor)
        scale = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for g in gradient:
            g.mul_(_along(scale, g))


class _Cut:
    """The part of a cohort's tensors that takes a step.

    A prefix is views, chosen clients are copies that `put` writes back.
    """

    def __init__(self, index: slice | Tensor, clients: int, stacked: bool) -> None:
        self.index, self.stacked = index, stacked
        self.whole = not stacked or (isinstance(index, slice) and index.stop == clients)

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The active part of each tensor."""
        return list(tensors) if self.whole else [t[self.index] for t in tensors]

    def carry(self, carry: Carry) -> Carry:
        """The active part of a carry; its trained tensors only lend their names."""
        fixed = {n: t if n in carry.shared else t[self.index] for n, t in carry.fixed.items()}
        return Carry(carry.trained, {n: t[self.index] for n, t in carry.moving.items()}, fixed, carry.shared)

    def put(self, tensors: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Writes chosen clients back; views have been written already."""
        if not self.whole and isinstance(self.index, Tensor):
            for tensor, value in zip(tensors, new, strict=True):
                tensor[self.index] = value


def _weights(plan: BatchPlan, active: int, at: int, uneven: bool) -> Tensor | None:
    """Returns 1 for real samples and 0 for padding, float [clients, widest]; None where nothing is padded."""
    if not uneven:
        return None
    counts = plan.count[:active, at]
    return (torch.arange(int(counts.max()))[None, :] < torch.from_numpy(counts)[:, None]).float()


def _along(scale: Tensor, like: Tensor) -> Tensor:
    """`scale` [clients] (or 0-d) shaped to multiply `like` [clients, ...]."""
    return scale.reshape(scale.shape + (1,) * (like.ndim - scale.ndim))
