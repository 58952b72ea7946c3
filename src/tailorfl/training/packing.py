"""Named tensors as one flat list and back: what goes through an operation of many clients keeps its names.

An operation under `torch.func.vmap` may only be given tensors one beside the other. So whatever travels (models,
centres, inputs of directions and terms) is packed here and unpacked on the other side, by one rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
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
    size: int = 0
    """How many tensors the tree has."""


LEAF, NOTHING = Form(Tensor, size=1), Form(type(None))


class Packed(NamedTuple):
    """The leaves of a tree in order, tensors or what stands for them, and its form."""

    leaves: list[Any]
    form: Form

    @classmethod
    def of(cls, tree: Any) -> Packed:
        """Packs a tensor, None, or TensorDicts, mappings and tuples; raises TailorflError for anything else."""
        leaves: list[Any] = []
        return cls(leaves, _pack(tree, leaves))

    def map(self, change: Callable[[Any], Any]) -> Packed:
        """Returns the tree with every leaf changed."""
        return Packed([change(leaf) for leaf in self.leaves], self.form) if self.leaves else self

    def unpack(self) -> Any:
        """Returns the tree again."""
        return _unpacked(self.form, iter(self.leaves))


def _pack(tree: Any, leaves: list[Any]) -> Form:
    """Adds the leaves of a tree to those given and returns its form."""
    if isinstance(tree, Tensor):
        leaves.append(tree)
        return LEAF
    if tree is None:
        return NOTHING
    before = len(leaves)
    if isinstance(tree, TensorDict | Mapping):
        kind: type = TensorDict if isinstance(tree, TensorDict) else dict
        names, values = map(tuple, zip(*tree.items(), strict=True)) if len(tree.keys()) else ((), ())
    elif isinstance(tree, tuple):
        kind, names, values = type(tree), tuple(map(str, range(len(tree)))), tree
    else:
        raise TailorflError(
            f"tensors, TensorDicts, mappings and tuples travel into a client's training, but not {tree!r}; make a "
            "number that is the same for all clients part of the function, any other a tensor"
        )
    parts = tuple([_pack(value, leaves) for value in values])
    return Form(kind, names, parts, len(leaves) - before)


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


class Owned(NamedTuple):
    """A tensor of a cohort, and whether every client has its own, [clients, ...], or all share it."""

    tensor: Tensor
    by_client: bool


class Layout(NamedTuple):
    """How tensors that come into an operation lie, and how training wants them: client axis first, in its order."""

    dims: Dims
    clients: int
    order: Tensor | None = None
    """The clients in the order that is wanted, positions [clients]; None where they lie so."""

    def copied(self, tensor: Tensor, dim: int | None) -> Tensor:
        """A copy that may be written to."""
        if self.dims is None:
            return tensor.clone()
        if dim is None:
            return tensor.expand(self.clients, *tensor.shape).clone(memory_format=torch.contiguous_format)
        moved = tensor.movedim(dim, 0)
        if self.order is not None:
            return moved.index_select(0, self.order)
        return moved.clone(memory_format=torch.contiguous_format)

    def viewed(self, tensor: Tensor, dim: int | None) -> Owned:
        """For reading; without a client axis where all clients share it."""
        if dim is None:
            return Owned(tensor, False)
        moved = tensor.movedim(dim, 0)
        return Owned(moved if self.order is None else moved.index_select(0, self.order), True)

    def spread(self, tensor: Tensor, dim: int | None) -> Tensor:
        """For reading; with a client axis even where all clients share it (no copy then)."""
        found = self.viewed(tensor, dim)
        if found.by_client or self.dims is None:
            return found.tensor
        return found.tensor.expand(self.clients, *tensor.shape)

    def arranged(
        self,
        tensors: Sequence[Tensor],
        form: Form,
        copied: Collection[str],
        viewed: Collection[str],
        packed: Collection[str],
    ) -> dict[str, Any]:
        """Returns the tensors of a named tuple by its fields: some to write to, some as views, the others spread.

        Fields in `packed` stay so, to be cut and mapped tensor by tensor; of the others the trees are made again.
        """
        dims = self.dims or [None] * len(tensors)
        rest = zip([t.detach() for t in tensors], dims, strict=True)
        found: dict[str, Any] = {}
        for name, part in zip(form.kind._fields, form.parts, strict=True):  # type: ignore[attr-defined]
            lay = self.copied if name in copied else self.viewed if name in viewed else self.spread
            own = Packed([lay(*one) for one in islice(rest, part.size)], part)
            found[name] = own if name in packed else own.unpack()
        return found
