"""Gradient descent inside the backward pass.

The gradient of a weight is a product Gᵀ X, and the step of plain gradient descent subtracts it from the weight. Done
apart, the gradient is written to memory and read again: most of the time of a step where batches are small and weights
are not. Inside `descending` a layer does both at once, as soon as its backward pass has used the weight:

    W = keep · W + pull · C − rate · Gᵀ X          keep = 1 − η δ − η λ,  pull = η λ,  rate = η

with weight decay δ and the proximal centre C of strength λ. That is the same step, summed in another order. It is right
only for a weight that one layer uses once in a forward pass; whoever opens the block names those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Share:
    """What happens to one weight, [clients, ...]."""

    rate: float | Tensor
    """η, one for all or [clients]."""
    keep: float | Tensor = 1.0
    pull: float | Tensor = 0.0
    centre: Tensor | None = None

    def subtract_product(self, weight: Tensor, g: Tensor, x: Tensor) -> None:
        """Takes the step along Gᵀ X; `g` [clients, batch, out], `x` [clients, batch, in]."""
        if isinstance(self.rate, Tensor):
            g, scale = g * self.rate[:, None, None], -1.0
        else:
            scale = -self.rate
        if isinstance(self.keep, Tensor):
            weight.mul_(self.keep.reshape(-1, *[1] * (weight.dim() - 1)))
        keep = 1.0 if isinstance(self.keep, Tensor) else self.keep
        flat = weight.flatten(2)
        flat.baddbmm_(g.transpose(1, 2), x, beta=keep, alpha=scale)
        if self.centre is not None:
            if isinstance(self.pull, Tensor):
                weight.add_(self.centre * self.pull.reshape(-1, *[1] * (weight.dim() - 1)))
            else:
                weight.add_(self.centre, alpha=self.pull)

    def subtract(self, weight: Tensor, client: int, gradient: Tensor) -> None:
        """Takes one client's step along a gradient."""
        own = weight[client]
        rate, keep, pull = (
            float(t[client]) if isinstance(t, Tensor) else t for t in (self.rate, self.keep, self.pull)
        )
        if keep != 1.0:
            own.mul_(keep)
        own.add_(gradient, alpha=-rate)
        if self.centre is not None:
            own.add_(self.centre[client], alpha=pull)


@dataclass
class Descent:
    """A forward pass whose layers may take their steps in its backward pass."""

    shares: Mapping[int, Share]
    """What happens to the weight that begins at an address of memory."""
    taken: set[int] = field(default_factory=set)
    """Addresses of the weights whose layers will do that."""


_OPEN: ContextVar[Descent | None] = ContextVar("tailorfl_descent", default=None)


@contextmanager
def descending(shares: Mapping[int, Share]) -> Iterator[Descent]:
    """Opens a block in which layers of a forward pass take on what `shares` says."""
    descent = Descent(shares)
    token = _OPEN.set(descent)
    try:
        yield descent
    finally:
        _OPEN.reset(token)


def share_of(weight: Tensor) -> Share | None:
    """Returns what happens to a weight in the open block, which the caller takes on; None where it is left alone."""
    descent = _OPEN.get()
    if descent is None or not descent.shares:
        return None
    place = weight.data_ptr()
    found = descent.shares.get(place)
    if found is not None:
        descent.taken.add(place)
    return found


def used_once(loss: Tensor, leaves: Sequence[Tensor]) -> tuple[bool, ...]:
    """Returns which leaves are the weight of exactly one layer that can descend, and nothing else."""
    users: dict[int, list[tuple[str, int]]] = {}
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for place, (after, _) in enumerate(node.next_functions):
            leaf = getattr(after, "variable", None)
            if leaf is not None:
                users.setdefault(id(leaf), []).append((type(node).__name__, place))
            else:
                waiting.append(after)
    able = ([("_CohortLinearBackward", 1)], [("_CohortConvBackward", 1)])  # (x, weight, bias, ...)
    return tuple(users.get(id(leaf)) in able for leaf in leaves)
