"""Descent along a method's own direction, or along private gradients.

A direction is code for one client that is mapped over the cohort; each gradient that it requests is computed outside
the map, for all clients at once. Only private gradients are computed inside it, sample by sample, with
`torch.func.grad`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.errors import TailorflError
from tailorfl.models.dropout import fold_key
from tailorfl.models.mapping import Level, outside, over_clients
from tailorfl.training import tree
from tailorfl.training.batches import ActiveClients
from tailorfl.training.gradients import (
    Batch,
    Component,
    Directions,
    Gradient,
    LocalObjective,
    filled,
    gradients_of,
)
from tailorfl.training.request import FitRequest
from tailorfl.training.sample_privacy import GradientRelease, SampleDP, private_gradient
from tailorfl.training.update import CLIP_EPS


def plain(state: TensorDict, grad: Gradient) -> TensorDict:
    """Return the direction of ordinary SGD: the gradient at the current parameters."""
    return grad(state)


def gradients_asked(
    direction: Directions | None, state: TensorDict, given: Sequence[Any], batches: int
) -> list[int]:
    """Return the number of gradients that a direction requests on each batch of a step; no sample is read.

    `state` and `given` are those of one client. A direction has no conditions on values, so any client's will do.
    """
    counts = [0] * batches

    def grad(parameters: TensorDict, of: str = "", batch: int = 0) -> TensorDict:
        counts[batch] += 1
        return parameters * 0.0

    for part in direction.values() if isinstance(direction, Mapping) else (direction or plain,):
        part(state, grad, *given)
    return counts


class CustomGradient:
    """The direction of one step, for one client or, inside a map, for all clients.

    A direction is code for one client, but its gradients are computed outside the map, for all clients at once. The
    first pass of a component updates its batch statistics.
    """

    def __init__(
        self,
        request: FitRequest,
        objective: LocalObjective,
        clients: ActiveClients,
        batches: Sequence[Batch],
        stacked: bool,
    ) -> None:
        self.request, self.objective, self.stacked = request, objective, stacked
        self.clients, self.batches, self.dp = clients, batches, request.dp
        self.names = tuple(request.start)
        self.level: Level | None = None
        """The current map over clients, if there is one."""
        self.moved: dict[str, dict[str, Tensor]] = {}
        """New buffers, by component."""
        self.taken = [0] * len(batches)
        """Number of gradients computed on each batch."""
        self.loss: Tensor | None = None
        """Loss of the first pass, [clients] (0-d for one client)."""

    def turns(self) -> Iterator[tuple[tuple[str, ...], list[Tensor]]]:
        """Yield (components that step together, their descent directions in the order of their parameters).

        Each direction is evaluated after the components before it have taken their step.
        """
        direction = self.request.direction
        if not isinstance(direction, Mapping):
            yield self.names, self._along(self.names, direction or plain)
            return
        for name, part in direction.items():
            yield (name,), self._along((name,), part)

    def _along(self, turn: tuple[str, ...], direction: Any) -> list[Tensor]:
        clients = self.clients
        with over_clients(len(clients.keys)) if self.stacked else nullcontext() as level:
            self.level = level
            params = map(self.seen, clients.params)
            parts = [
                TensorDict({n: next(params) for n in c.trained}, batch_size=[]) for c in clients.components
            ]
            is_single = self.names == ("",)
            state = parts[0] if is_single else TensorDict(dict(zip(self.names, parts, strict=True)))
            along = direction(state, self.gradient, *clients.given.map(self.seen).unpack())
            single = is_single or isinstance(self.request.direction, Mapping)
            back = [along] if single else [along.get(name) for name in turn]
            flat = [
                part.get(n)
                for part, name in zip(back, turn, strict=True)
                for n in self._component(name).trained
            ]
            return [g.clone() if level is None else level.all(g).clone() for g in flat]

    def _component(self, name: str) -> Component:
        return self.clients.components[self.names.index(name)]

    def seen(self, tensor: Tensor) -> Tensor:
        """Return one client's part of a tensor, as the direction sees it."""
        return tensor if self.level is None else self.level.one(tensor)

    def gradient(self, parameters: TensorDict, of: str = "", batch: int = 0) -> TensorDict:
        """Return the gradient of a batch's loss at `parameters` (the trained tensors of component `of`)."""
        if not 0 <= batch < len(self.batches):
            raise TailorflError(
                f"a direction requested batch {batch}, but its steps have {len(self.batches)}, counted from 0; set the "
                "number with fit(..., batches=...)"
            )
        component, at = self._component(of), tree.tensors(parameters)
        if self.objective.model.sizes.keys().isdisjoint(component.trained):
            raise TailorflError(
                f"a direction requested the gradient of '{of}', which trains no part of a model; use grad(parameters, "
                "of=...) with the name of a trained model"
            )
        if self.dp is not None:
            gradient, value = self._private(component, at, self.batches[batch], self.dp)
            moved = component.moving
        else:
            gradient, value, moved = self._plain(component, at, self.batches[batch])
        self.taken[batch] += 1
        self.moved.setdefault(of, moved)
        if self.loss is None:
            self.loss = value
        slopes = TensorDict(gradient, batch_size=[])
        clip = self.request.cohort.config.clip
        if clip is None or not self.request.optimizer.clip_each:
            return slopes
        return slopes * (clip / (tree.norm(slopes) + CLIP_EPS)).clamp(max=1.0)

    def _plain(
        self, component: Component, at: dict[str, Tensor], batch: Batch
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        level, stacked = self.level, self.stacked
        with nullcontext() if level is None else outside():
            points = [at[n] if level is None else level.back(at[n]) for n in component.trained]
            leaves = [point.detach().requires_grad_() for point in points]
            value, slopes, moved = gradients_of(self.objective, component, leaves, batch, stacked)
        gradient = dict(zip(component.trained, filled(slopes, leaves), strict=True))
        return {n: self.seen(g) for n, g in gradient.items()}, value, moved

    def _private(
        self, component: Component, at: dict[str, Tensor], batch: Batch, dp: SampleDP
    ) -> tuple[dict[str, Tensor], Tensor]:
        release, level = self.clients.release, self.level
        assert release is not None
        if level is None:
            constant, release = {**component.own, **component.moving}, release.of(0)
        else:
            batch, constant = batch.map(level.one), level.each({**component.own, **component.moving})
            release = GradientRelease(*[None if t is None else level.one(t) for t in release])  # type: ignore[arg-type]
        constant = {**component.common, **constant}
        given = component.given.map(self.seen).unpack()

        def loss_of(
            values: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor | None, key: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            sample = batch._replace(x=x, y=y, weight=weight, key=key)
            return self.objective.value(
                {**constant, **values}, component.moving, component.names, sample, given
            )

        noise = fold_key(fold_key(batch.key, self.request.number), sum(self.taken))
        gradient, value = private_gradient(
            loss_of, at, batch.x, batch.y, batch.weight, dp, noise, batch.key, release
        )
        return gradient, value if level is None else level.all(value)

    def close(self) -> Tensor:
        """Write the step's batch statistics and return the loss of its first pass, [clients] (0-d for one client)."""
        for name, moved in self.moved.items():
            self._component(name).keep(moved)
        if self.loss is not None:
            return self.loss
        return torch.zeros(len(self.clients.keys)) if self.stacked else torch.zeros(())
