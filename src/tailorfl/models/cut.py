"""A network that begins where frozen layers end: their outputs go in, in place of samples.

What frozen layers make of a sample that nothing changes at random is the same in every pass. A `Cut` names the modules
at the front of a network that only hold such layers, and the outputs of theirs that the rest reads.
`tailorfl.models.front` computes those, a row of numbers for each sample; `Cut.apply` puts stand-ins in the place of
the modules, which hand them out. Everything else of the network runs as it is written, with its own names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tailorfl.errors import ModelError


class Output(NamedTuple):
    """What one call of a module returns."""

    shape: tuple[int, ...]
    """Of one row."""
    rows: int
    """How many of them a sample has."""
    dtype: torch.dtype
    items: tuple[bool, ...] | None
    """Of a module that returns a tuple with one tensor: where that is, and None elsewhere."""
    start: int | None = None
    """Where it stands in the row of numbers of a sample; None: nothing reads it."""

    @property
    def size(self) -> int:
        """Numbers of a sample."""
        return self.rows * math.prod(self.shape)

    def form(self, tensor: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        """Returns a tensor as the module does."""
        if self.items is None:
            return tensor
        return tuple(tensor if there else None for there in self.items)

    def tensor(self, made: Any) -> Tensor:
        """Returns the tensor of what the module returned."""
        found: Tensor = made if self.items is None else made[self.items.index(True)]
        return found


@dataclass(frozen=True)
class Cut:
    """Where a network begins.

    Attributes:
        replaced: dotted name of each module that is left out -> what its calls of one pass return, in order.
        input: the samples themselves, of which the rest may read something, too.
        device: of what nobody reads: "meta", which has a shape and no numbers, or None for that of the samples.
        share: of the products of a forward pass, what the modules that are left out take.
    """

    replaced: Mapping[str, tuple[Output, ...]]
    input: Output
    device: str | None = "meta"
    share: float = 0.0

    @property
    def kept(self) -> list[Output]:
        """What is kept, in the order of its places."""
        every = [one for calls in self.replaced.values() for one in calls] + [self.input]
        return sorted((one for one in every if one.start is not None), key=lambda one: one.start or 0)

    @property
    def width(self) -> int:
        """Numbers that are kept of a sample."""
        return sum(one.size for one in self.kept)

    @property
    def dtype(self) -> torch.dtype:
        """Of those numbers."""
        return reduce(
            torch.promote_types, (one.dtype for one in self.kept if one is not self.input), torch.bfloat16
        )

    def apply(self, module: nn.Module) -> None:
        """Puts stand-ins in the place of the modules that are left out; the module then takes what `Front` gives."""
        standing = [
            StandIn(module.get_submodule(n), calls, self.device) for n, calls in self.replaced.items()
        ]
        for name, one in zip(self.replaced, standing, strict=True):
            module.set_submodule(name, one)
        entrance = Entrance(self.input, self.device, standing)
        module.register_forward_pre_hook(entrance.begin, prepend=True)
        module.register_forward_hook(entrance.end, always_call=True)


class StandIn(nn.Module):
    """Returns what another module would have returned."""

    def __init__(self, original: nn.Module, calls: Sequence[Output], device: str | None) -> None:
        super().__init__()
        # Not as a submodule: nothing of it runs, but code around it may ask for the type of its weights, say.
        self.__dict__["original"] = original
        self.calls, self.device = tuple(calls), device
        self.kept: Tensor | None = None
        self.turn = 0

    def __getattr__(self, name: str) -> Any:
        """An attribute of the original."""
        if "original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["original"], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        """What the original returned at this call of the pass, for the samples that the pass is of.

        Raises:
            ModelError: it is called outside a pass of the whole network, or more often than the original was.
        """
        if self.kept is None or self.turn >= len(self.calls):
            raise ModelError(
                "a frozen layer is asked for by itself, but what frozen layers give out was computed once and they are "
                "left out of the network; set engine.features=off"
            )
        call = self.calls[self.turn]
        self.turn += 1
        return call.form(taken(call, self.kept, self.device))


class Entrance:
    """Hands the numbers that were kept of a batch of samples to the stand-ins, at the beginning of a pass."""

    def __init__(self, given: Output, device: str | None, standing: Sequence[StandIn]) -> None:
        self.input, self.device, self.standing = given, device, list(standing)

    def begin(self, _: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Returns the samples as the network sees them: what it reads of them, or something of their shape."""
        (kept,) = given
        for one in self.standing:
            one.kept, one.turn = kept, 0
        return (taken(self.input, kept, self.device),)

    def end(self, *_: Any) -> None:
        """Forgets the batch."""
        for one in self.standing:
            one.kept = None


def taken(call: Output, kept: Tensor, device: str | None) -> Tensor:
    """Returns what a call returns for a batch, [batch · rows, ...], out of what is `kept` of it, [batch, width]."""
    shape = (kept.shape[0] * call.rows, *call.shape)
    if call.start is None:
        if device is not None:
            return torch.empty(shape, dtype=call.dtype, device=device)
        return torch.zeros((), dtype=call.dtype, device=kept.device).expand(shape)
    found = kept[:, call.start : call.start + call.size].reshape(shape)
    return found if found.dtype == call.dtype else found.to(call.dtype)
