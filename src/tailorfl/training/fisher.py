"""The trace of the empirical Fisher information of a cohort's models, from batches of their training samples.

    F = Σ over the batches of one pass  ‖∇ mean loss of the batch‖²         over what the split does not freeze

Models are in evaluation mode, and nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tailorfl.training.cohort import Cohort
from tailorfl.training.operations import where
from tailorfl.training.packing import Dims

STAGE = "fisher"
"""Names the random sequence of the batches."""
Told = TypeVar("Told")


class Fisher:
    """One pass over the training samples of a cohort, in batches of the run's size."""

    def __init__(self, cohort: Cohort, names: tuple[str, ...]) -> None:
        self.cohort, self.names = cohort, names
        trainable = set(cohort.split.trainable)
        self.learned = tuple([n for n in cohort.model.parameters if n in trainable])

    def run(self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Returns F, [clients] or 0-d of one client."""
        cohort, source = self.cohort, self.cohort.source
        state = dict(zip(self.names, tensors, strict=True))
        like = state[self.learned[0]]
        if cohort.counting:
            return (like.new_zeros(() if dims is None else len(positions)),)
        plan = cohort.plan(positions, STAGE, cohort.config.batch_size, 1, None, 0)
        total, classes = like.new_zeros(len(positions)), cohort.weights_of_classes(positions)
        axes = dict.fromkeys(self.names) if dims is None else dict(zip(self.names, dims, strict=True))
        own, rest = self._parts(axes)
        mapped = torch.func.vmap(self._one, in_dims=(own, rest, 0, 0, 0, None if classes is None else 0))
        for step in range(plan.rows.shape[1]):
            # As wide as need be: a client alone has no padding, and the same bits whoever is planned with it.
            widest = max(int(plan.count[:, step].max()), 1)
            rows = torch.from_numpy(plan.rows[:, step, :widest]).to(source.x.device)
            counted = torch.arange(widest) < torch.from_numpy(plan.count[:, step])[:, None]
            weight = counted.to(cohort.device, torch.float32)
            x, y = source.take(rows), source.targets(rows)
            total = total + mapped(*self._parts(state), x, y, weight, classes)
        return (total[0] if dims is None else total,)

    def _parts(self, named: dict[str, Told]) -> tuple[dict[str, Told], dict[str, Told]]:
        """What is told of every tensor, of those that are differentiated and of the others."""
        learned = {n: named[n] for n in self.learned}
        return learned, {n: told for n, told in named.items() if n not in learned}

    def _one(
        self,
        learned: dict[str, Tensor],
        rest: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        classes: Tensor | None,
    ) -> Tensor:
        """‖∇ mean loss‖² of one client's batch; 0 of one that is all padding."""
        loss = self.cohort.loss.weighed(classes)

        def mean_loss(parameters: dict[str, Tensor]) -> Tensor:
            return loss(self.cohort.model({**rest, **parameters}, x), y, weight)

        gradient = torch.func.grad(mean_loss)(learned)
        return torch.stack([g.square().sum() for g in gradient.values()]).sum()

    def where(self, positions: Sequence[int]) -> str:
        return where(self.cohort, positions, STAGE)
