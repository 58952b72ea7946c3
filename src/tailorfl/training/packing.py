"""Named tensors as one flat list and back: what goes through an operation of many clients keeps its names.

An operation under `torch.func.vmap` may only be given tensors one beside the other. So whatever travels (models,
centres, inputs of directions and terms) is packed here and unpacked on the other side, by one rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.errors import TailorflError

Dims = Sequence[int | None] | None
"""The client axis of each tensor (None: shared by all clients); None for one client without client axes."""


class Form(NamedTuple):
    """What a tree is apart from its tensors: which nodes it has, and by what names."""

    kind: type
    """Tensor of a leaf, NoneType of nothing; else TensorDict, dict, tuple or a named tuple."""
    names: tuple[str, ...] = ()
    parts: tuple[Form, ...] = ()

    @property
    def size(self) -> int:
        """How many tensors the tree has."""
        return 1 if self.kind is Tensor else sum(part.size for part in self.parts)


class Packed(NamedTuple):
    """The leaves of a tree in order, tensors or what stands for them, and its form."""

    leaves: list[Any]
    form: Form

    @classmethod
    def of(cls, tree: Any) -> Packed:
        """Packs a tensor, None, or TensorDicts, mappings and tuples; raises TailorflError for anything else."""
        if isinstance(tree, Tensor):
            return cls([tree], Form(Tensor))
        if tree is None:
            return cls([], Form(type(None)))
        if isinstance(tree, TensorDict | Mapping):
            named = {str(name): value for name, value in tree.items()}
            kind: type = TensorDict if isinstance(tree, TensorDict) else dict
        elif isinstance(tree, tuple):
            named = {str(place): value for place, value in enumerate(tree)}
            kind = type(tree)
        else:
            raise TailorflError(
                f"tensors, TensorDicts, mappings and tuples travel into a client's training, but not {tree!r}; make a "
                "number that is the same for all clients part of the function, any other a tensor"
            )
        parts = [cls.of(value) for value in named.values()]
        form = Form(kind, tuple(named), tuple(part.form for part in parts))
        return cls([leaf for part in parts for leaf in part.leaves], form)

    def map(self, change: Callable[[Any], Any]) -> Packed:
        """Returns the tree with every leaf changed."""
        return Packed([change(leaf) for leaf in self.leaves], self.form)

    def parts(self) -> dict[str, Packed]:
        """Returns the branches of the root by name; those of a tuple by "0", "1", ..., of a named one by its fields."""
        fields = getattr(self.form.kind, "_fields", self.form.names)
        rest = iter(self.leaves)
        return {
            name: Packed([next(rest) for _ in range(part.size)], part)
            for name, part in zip(fields, self.form.parts, strict=True)
        }

    def unpack(self) -> Any:
        """Returns the tree again."""
        return _unpacked(self.form, iter(self.leaves))


def _unpacked(form: Form, rest: Iterator[Any]) -> Any:
    if form.kind is Tensor:
        return next(rest)
    if form.kind is type(None):
        return None
    parts = [_unpacked(part, rest) for part in form.parts]
    if form.kind is TensorDict:
        return TensorDict(dict(zip(form.names, parts, strict=True)), batch_size=[])
    if form.kind is dict:
        return dict(zip(form.names, parts, strict=True))
    return form.kind(parts) if form.kind is tuple else form.kind(*parts)


class Travelled(NamedTuple):
    """A tensor as an operation gets it, with the axis on which clients lie; None where they share it."""

    tensor: Tensor
    dim: int | None


def travelled(tensors: Sequence[Tensor], dims: Dims) -> list[Travelled]:
    """Returns the tensors of an operation with their client axes."""
    return [Travelled(*pair) for pair in zip(tensors, dims or [None] * len(tensors), strict=True)]


class Arrange:
    """Lays tensors out as the training loop wants them: client axis first, clients in the plan's order."""

    def __init__(self, stacked: bool, clients: int, order: Tensor | None) -> None:
        self.stacked, self.clients, self.order = stacked, clients, order

    def own(self, given: Travelled) -> Tensor:
        """A copy that may be written to."""
        tensor, dim = given.tensor.detach(), given.dim
        if not self.stacked:
            return tensor.clone()
        if dim is None:
            return tensor.expand(self.clients, *tensor.shape).clone(memory_format=torch.contiguous_format)
        moved = tensor.movedim(dim, 0)
        if self.order is not None:
            return moved.index_select(0, self.order)
        return moved.clone(memory_format=torch.contiguous_format)

    def view(self, given: Travelled) -> Tensor:
        """For reading; without a client axis where all clients share it."""
        if given.dim is None:
            return given.tensor.detach()
        moved = given.tensor.detach().movedim(given.dim, 0)
        return moved if self.order is None else moved.index_select(0, self.order)

    def spread(self, given: Travelled) -> Tensor:
        """For reading; with a client axis even where all clients share it (no copy then)."""
        tensor = self.view(given)
        return tensor.expand(self.clients, *tensor.shape) if given.dim is None and self.stacked else tensor
