"""What to descend along where that is not simply the gradient: a method's own direction, or private gradients.

A direction is the mathematics of one client and is mapped over the cohort; each gradient that it asks for is taken
outside the map, of all clients at once. Only private gradients are taken inside it, sample by sample, with
`torch.func.grad`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.errors import TailorflError
from tailorfl.models.dropout import fold_key
from tailorfl.models.mapping import Level, outside, over_clients
from tailorfl.training import tree
from tailorfl.training.gradients import (
    Batch,
    Carry,
    Direction,
    Gradient,
    LocalObjective,
    Pass,
    filled,
    gradients_of,
)
from tailorfl.training.packing import Packed
from tailorfl.training.sample_privacy import Release, SampleDP, private_gradient
from tailorfl.training.update import CLIP_EPS

Directions = Direction | Mapping[str, Direction]
"""One direction for all components together, or one for each, which take their steps in this order: a direction sees
the components before its own after their step, and returns what its own descends along."""


@dataclass(frozen=True)
class Directed:
    """How to find a direction that is not simply the gradient.

    Attributes:
        components: names of the models that train together.
        direction: the method's own, or None for the (private) gradient.
        dp: privacy of every gradient, or None.
        number: which fit of its client in this round this is (privacy noise must differ between fits).
        clip: largest norm of every gradient that a direction asks for, or None.
    """

    objective: LocalObjective
    components: tuple[str, ...]
    direction: Directions | None
    dp: SampleDP | None
    number: int
    clip: float | None = None

    @property
    def turns(self) -> tuple[tuple[str, ...], ...]:
        """The components that take their step together, in order."""
        if isinstance(self.direction, Mapping):
            return tuple((name,) for name in self.direction)
        return (self.components,)


def plain(state: TensorDict, grad: Gradient) -> TensorDict:
    """The direction of ordinary SGD: the gradient where the client is."""
    return grad(state)


def gradients_asked(
    direction: Directions | None, state: TensorDict, given: Sequence[Any], batches: int
) -> list[int]:
    """Returns how many gradients a direction asks for on each of the batches of a step; no sample is looked at.

    `state` and `given` are those of one client. A direction has no conditions on values, so any will do.
    """
    asked = [0] * batches

    def grad(parameters: TensorDict, of: str = "", batch: int = 0) -> TensorDict:
        asked[batch] += 1
        return parameters * 0.0

    for one in direction.values() if isinstance(direction, Mapping) else (direction or plain,):
        one(state, grad, *given)
    return asked


class Passes:
    """Forward and backward passes on the batches of one step, for one client or, inside a map, for all of them.

    A direction is the mathematics of one client, but its gradients are taken of all clients at once: what it asks for
    is evaluated outside the map. The first pass of a component updates its batch statistics.
    """

    def __init__(self, how: Directed, carries: Sequence[Carry], batches: Sequence[Batch]) -> None:
        self.how, self.carries, self.batches = how, carries, batches
        self.active = len(batches[0].keys)
        self.clients: Level | None = None
        """The map that is open, where there is one."""
        self.moved: list[dict[str, Tensor]] = [{} for _ in carries]
        self.taken = [0] * len(batches)
        """How many gradients of each batch were taken."""
        self.met: set[str] = set()
        self.first: Tensor | None = None

    def along(
        self,
        turn: Sequence[str],
        params: list[Tensor],
        given: Packed,
        stacked: bool,
    ) -> list[Tensor]:
        """Returns what the components of `turn` descend along, in the order of their parameters.

        `params` are those of all components; `given` are the direction's own inputs.
        """
        how = self.how
        with over_clients(self.active) if stacked else nullcontext() as clients:
            self.clients = clients
            rest = map(self.seen, params)
            parts = [TensorDict({n: next(rest) for n in c.trained}, batch_size=[]) for c in self.carries]
            alone, in_turn = how.components == ("",), isinstance(how.direction, Mapping)
            state = parts[0] if alone else TensorDict(dict(zip(how.components, parts, strict=True)))
            direction = how.direction[turn[0]] if isinstance(how.direction, Mapping) else how.direction
            found = (direction or plain)(state, self.gradient, *given.map(self.seen).unpack())
            back = [found] if alone or in_turn else [found.get(name) for name in turn]
            names = [self.carries[how.components.index(name)].trained for name in turn]
            flat = [part.get(n) for part, own in zip(back, names, strict=True) for n in own]
            return [g.clone() if clients is None else clients.all(g).clone() for g in flat]

    def seen(self, tensor: Tensor) -> Tensor:
        """What the direction sees of a tensor: that of one client."""
        return tensor if self.clients is None else self.clients.one(tensor)

    def gradient(self, parameters: TensorDict, of: str = "", batch: int = 0) -> TensorDict:
        """Returns the gradient of a batch's loss at `parameters` (trained names of component `of`)."""
        if not 0 <= batch < len(self.batches):
            raise TailorflError(
                f"a direction asked for batch {batch}, but its steps have {len(self.batches)}, counted from 0; "
                "say how many with fit(..., batches=...)"
            )
        which = self.how.components.index(of)
        if self.how.objective.model.sizes.keys().isdisjoint(self.carries[which].trained):
            raise TailorflError(
                f"a direction asked for the gradient of '{of}', of which nothing of a model trains; grad(parameters, "
                "of=...) names the model whose forward pass it is"
            )
        carry, at = self.carries[which], tree.tensors(parameters)
        if self.how.dp is not None:
            gradient, value = self._private(carry, at, self.batches[batch])
            moved = carry.moving
        else:
            gradient, value, moved = self._plain(carry, at, self.batches[batch])
        self.taken[batch] += 1
        if of not in self.met:
            self.met.add(of)
            self.moved[which] = moved
        if self.first is None:
            self.first = value
        found = TensorDict(gradient, batch_size=[])
        if self.how.clip is None:
            return found
        return found * (self.how.clip / (tree.norm(found) + CLIP_EPS)).clamp(max=1.0)

    def _plain(
        self, carry: Carry, at: dict[str, Tensor], batch: Batch
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        objective, clients = self.how.objective, self.clients
        if clients is None:
            leaves = [at[n].detach().requires_grad_() for n in carry.trained]
            value, found, moved = gradients_of(objective, carry, leaves, batch, stacked=False)
            return dict(zip(carry.trained, filled(found, leaves), strict=True)), value, moved
        with outside():
            leaves = [clients.back(at[n]).detach().requires_grad_() for n in carry.trained]
            value, found, moved = gradients_of(objective, carry, leaves, batch, stacked=True)
        every = zip(carry.trained, filled(found, leaves), strict=True)
        return {n: clients.one(g) for n, g in every}, value, moved

    def _private(self, carry: Carry, at: dict[str, Tensor], batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        how, clients = self.how, self.clients
        constant = {**carry.own, **carry.moving}
        given = carry.given.map(self.seen).unpack()
        release = batch.release
        assert release is not None
        if clients is None:
            seen, release = batch.only(), release.of(0)
        else:
            seen, constant = batch.seen(clients), clients.each(constant)
            size = None if release.size is None else clients.one(release.size)
            release = Release(clients.one(release.noise), size)
        constant = {**carry.common, **constant}

        def loss_of(
            values: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor | None, key: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            state = {**constant, **values}
            return how.objective.value(state, carry.moving, carry.names, Pass(x, y, weight, key), given)

        assert how.dp is not None
        x, y, weight, key = seen[:4]  # no class weights: privacy does not go with them
        noise = fold_key(fold_key(key, how.number), sum(self.taken))
        gradient, value = private_gradient(loss_of, at, x, y, weight, how.dp, noise, key, release)
        return gradient, value if clients is None else clients.all(value)

    def close(self) -> Tensor:
        """Writes the batch statistics of the step and returns the loss of its first pass, [clients] (0-d of one)."""
        for carry, new in zip(self.carries, self.moved, strict=True):
            carry.keep(new)
        if self.first is not None:
            return self.first
        return torch.zeros(()) if self.clients is None else torch.zeros(self.active)
