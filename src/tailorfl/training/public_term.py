"""The gradient of a term on public samples, see `tailorfl.training.terms`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from tailorfl.data.source import Source
from tailorfl.models.functional import Model
from tailorfl.training.gradients import Component, filled
from tailorfl.training.keys import Keys
from tailorfl.training.objective import Loss
from tailorfl.training.packing import Packed
from tailorfl.training.plan import make_plan
from tailorfl.training.terms import Seen, Term


@dataclass(frozen=True)
class PublicTerm:
    """One term for the clients of a cohort at once, or for one client."""

    term: Term
    model: Model
    loss: Loss
    source: Source
    given: Packed
    """What the term is given, [clients, ...] (or without the client axis for one client)."""
    rows: Tensor
    """[clients, steps, batch] int64 rows of the public set."""
    stacked: bool

    def gradient(
        self, component: Component, params: Sequence[Tensor], step: int, who: slice | Tensor
    ) -> list[Tensor]:
        """Return the term's gradient at `params` for the clients `who`, whose tensors `component` holds.

        Clients share no variable, so the gradient of the sum of their terms is each client's own.
        """
        leaves = [p.detach().requires_grad_() for p in params]
        at = dict(zip(component.trained, leaves, strict=True))
        rows = self.rows[who, step] if self.stacked else self.rows[0, step]
        x = self.source.take(rows)
        with torch.enable_grad():
            if self.stacked:
                given = [t[who] for t in self.given.leaves]
                mapped = vmap(self._value, in_dims=(0, 0, None, 0, 0, 0))
                value = mapped(
                    at, {**component.own, **component.moving}, component.common, x, rows, given
                ).sum()
            else:
                state = {**component.own, **component.moving}
                value = self._value(at, state, component.common, x, rows, self.given.leaves)
            slopes = torch.autograd.grad(value, leaves, allow_unused=True)
        return filled(slopes, leaves)

    def _value(
        self,
        at: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        common: Mapping[str, Tensor],
        x: Tensor,
        rows: Tensor,
        given: Sequence[Tensor],
    ) -> Tensor:
        """Return the term of one client, with its model in evaluation mode."""
        state = {**common, **own, **at}
        seen = Seen.evaluated(self.model, self.loss, (x, torch.empty(0), None), state, rows)
        value: Tensor = self.term.function(seen, *Packed(list(given), self.given.form).unpack())
        return value


def public_rows(keys: Keys, samples: int, batch: int, steps: int, first: int = 0) -> Tensor:
    """Return the public samples of every client and step, int64 [clients, steps, batch].

    `keys` [clients] uint64; a batch of all `samples` where `batch` is larger; `first` skips steps.
    """
    if batch >= samples:
        return torch.arange(samples).expand(len(keys), steps, samples)
    members = [np.arange(samples, dtype=np.int64)] * len(keys)
    plan = make_plan(members, keys, batch, steps=steps, first=first, min_batch=batch)
    return torch.from_numpy(plan.rows)
