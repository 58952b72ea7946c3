"""The clients that take a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tailorfl.training.gradients import Carry
from tailorfl.training.packing import Packed
from tailorfl.training.sample_privacy import Release

Which = slice | Tensor
"""Positions of clients; neighbours are cut out as views, chosen ones as copies that `put` writes back."""


@dataclass(frozen=True)
class ActiveClients:
    """The clients that take a step, by their part of all tensors: [clients, ...], or of one client without the axis."""

    carries: Sequence[Carry]
    params: list[Tensor]
    """Of all components, in order."""
    given: Packed
    """The inputs of a direction."""
    centre: list[Tensor] | None
    """Where the proximal pull goes, as `params`."""
    strength: Tensor | None
    """λ of that pull where it is a tensor, [clients]."""
    rate: Tensor | None
    """η where it is a tensor, [clients]."""
    keys: Tensor
    """int64 [clients], also of the one there is."""
    release: Release | None
    """How private sums become gradients."""
    classes: Tensor | None
    """[clients, classes] what samples of a class count in the loss, also of the one client there is."""
    memory: list[Tensor]
    """What the optimizer remembers: zeros at first of the shapes of `params`, `Rule.memories` times."""

    def of(self, which: Which) -> ActiveClients:
        """The part of some clients."""

        def take(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [t[which] for t in tensors]

        # The trained tensors of a carry only lend their names.
        carries = [
            replace(
                carry,
                moving=dict(zip(carry.moving, take(list(carry.moving.values())), strict=True)),
                own=dict(zip(carry.own, take(list(carry.own.values())), strict=True)),
                given=carry.given.map(lambda t: t[which]),
            )
            for carry in self.carries
        ]
        return ActiveClients(
            carries,
            take(self.params),
            self.given.map(lambda t: t[which]),
            None if self.centre is None else take(self.centre),
            None if self.strength is None else self.strength[which],
            None if self.rate is None else self.rate[which],
            self.keys[which],
            None if self.release is None else self.release.of(which),
            None if self.classes is None else self.classes[which],
            take(self.memory),
        )

    def put(self, which: Which, part: ActiveClients) -> None:
        """Writes the part of chosen clients back; views have been written already."""
        if isinstance(which, slice):
            return
        for carry, own in zip(self.carries, part.carries, strict=True):
            for name, buffer in own.moving.items():
                carry.moving[name][which] = buffer
        for tensor, value in zip((*self.params, *self.memory), (*part.params, *part.memory), strict=True):
            tensor[which] = value
