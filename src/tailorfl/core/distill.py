"""Distillation on the client: a term of the local loss that pulls a model's predictions on public data to targets.

    D(p) = λ · (1/b') Σ_x ‖softmax(f_p(x)) − target(x)‖²          over a batch of b' public samples

The batches of a client are drawn from its key. A pass visits public samples in a random order and in full batches;
what does not fill one is left out of that pass, so that every batch is a uniform subset of the public set.
The model is in evaluation mode: dropout is off, and norms use their running statistics as they stand after the
private batch of the step and do not update them, so public data leave no trace in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from tailorfl.core.gradients import Carry
from tailorfl.core.keys import Keys
from tailorfl.core.plan import make_plan
from tailorfl.data.source import Source
from tailorfl.errors import TailorflError
from tailorfl.models.functional import Model


@dataclass(frozen=True)
class Distill:
    """What `Client.fit` pulls the predictions on the public set to, and how strongly.

    Attributes:
        strength: λ; 0 turns the term off.
        targets: [P, C] probabilities for every public sample, the same for all clients or each client's own.
        batch_size: b', public samples a step; at most all of them.
    """

    strength: float
    targets: Tensor
    batch_size: int

    def __post_init__(self) -> None:
        if not self.strength >= 0 or self.batch_size < 1:
            raise TailorflError(
                f"Distill needs strength >= 0 and batch_size >= 1, got {self.strength} and {self.batch_size}"
            )

    def check(self, public: Source | None) -> None:
        """Nothing if there is one row of targets for each sample of the public set.

        Raises:
            TailorflError: there is not, or there is no public set.
        """
        if public is None:
            raise TailorflError(
                "fit(public=...) needs a public set, but the federation has none; name one, such as "
                "data.public=digits, or set `needs_public` of the method so that a run says so at its start"
            )
        if self.targets.ndim != 2 or self.targets.shape[0] != len(public):
            raise TailorflError(
                f"the targets of Distill are of shape {list(self.targets.shape)}, but the public set has "
                f"{len(public)} samples; give one row of probabilities for each"
            )


@dataclass(frozen=True)
class PublicTerm:
    """The gradient of D for the clients of a cohort at once, or for one client."""

    model: Model
    source: Source
    strength: float
    targets: Tensor
    """[clients, P, C] (or [P, C] for one client)."""
    rows: Tensor
    """[clients, steps, batch] int64 rows of the public set."""
    stacked: bool

    def gradient(
        self, carry: Carry, params: Sequence[Tensor], step: int, who: slice | Tensor
    ) -> list[Tensor]:
        """Returns the gradient of D at `params` for the clients `who`, whose tensors `carry` holds.

        Clients share no variable, so the gradient of the sum of their terms is each client's own.
        """
        names = tuple(carry.trained)
        leaves = [p.detach().requires_grad_() for p in params]
        clients = torch.arange(len(self.rows), device=self.rows.device)[who]
        rows = self.rows[clients, step]
        x = self.source.take(rows)

        def forward(
            values: tuple[Tensor, ...],
            own: dict[str, Tensor],
            moving: dict[str, Tensor],
            x: Tensor,
            target: Tensor,
        ) -> Tensor:
            at = dict(zip(names, values, strict=True))
            probabilities = self.model({**carry.common, **own, **moving, **at}, x).softmax(-1)
            if probabilities.shape != target.shape:
                raise TailorflError(
                    f"the targets of Distill have {target.shape[-1]} classes, but the model has "
                    f"{probabilities.shape[-1]} outputs"
                )
            return self.strength * (probabilities - target).square().sum(-1).mean()

        with torch.enable_grad():
            if self.stacked:
                target = self.targets[clients[:, None], rows]
                value = vmap(forward)(tuple(leaves), carry.own, carry.moving, x, target).sum()
            else:
                value = forward(tuple(leaves), carry.own, carry.moving, x[0], self.targets[rows[0]])
            found = torch.autograd.grad(value, leaves, allow_unused=True)
        return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


def public_rows(keys: Keys, samples: int, batch: int, steps: int, first: int = 0) -> Tensor:
    """Returns the public samples of every client and step, int64 [clients, steps, batch].

    `keys` [clients] uint64; a batch of all `samples` where `batch` is larger; `first` skips steps.
    """
    if batch >= samples:
        return torch.arange(samples).expand(len(keys), steps, samples)
    members = [np.arange(samples, dtype=np.int64)] * len(keys)
    plan = make_plan(members, keys, batch, steps=steps, first=first, min_batch=batch)
    return torch.from_numpy(plan.rows)
