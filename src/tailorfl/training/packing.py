"""Trees of named tensors as one flat list and back, and the tensors of a cohort as training wants them.

An operation under `torch.func.vmap` may only be given tensors one beside the other, so whatever travels (models,
centres, inputs of directions and terms) is flattened on one side and put together on the other, by torch's own trees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tailorfl.errors import TailorflError


class Packed(NamedTuple):
    """The tensors of a tree in order, and its form."""

    leaves: list[Tensor]
    form: TreeSpec

    @classmethod
    def of(cls, tree: Any) -> Packed:
        """Pack tensors, TensorDicts, mappings and tuples.

        Raises:
            TailorflError: there is anything else.
        """
        if isinstance(tree, tuple) and not tree:
            return NOTHING
        leaves, form = tree_flatten(tree)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise TailorflError(
                    f"tensors, TensorDicts, mappings and tuples travel into a client's training, but not {leaf!r}; "
                    "make a number that is the same for all clients part of the function, any other a tensor"
                )
        return cls(leaves, form)

    def map(self, change: Callable[[Tensor], Tensor]) -> Packed:
        """Return the tree with every tensor changed."""
        return Packed([change(leaf) for leaf in self.leaves], self.form) if self.leaves else self

    def unpack(self) -> Any:
        """Return the tree again."""
        return tree_unflatten(self.leaves, self.form)


NOTHING = Packed(*tree_flatten(()))


class Mapped(NamedTuple):
    """A tensor of a cohort that is mapped over its clients."""

    tensor: Tensor
    axis: int | None
    """That of the clients; None: all of them share the tensor."""


class Layout:
    """Tensors of one client, which have no axis of clients, as training wants them."""

    stacked = False
    """Whether tensors have an axis of clients."""

    def copies(self, tensors: Mapping[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
        """Return copies of some tensors that may be written to."""
        return {name: tensors[name].detach().clone() for name in names}

    def views(self, tensors: Sequence[Any]) -> list[Tensor]:
        """Return tensors for reading; of a cohort with their axis of clients even where all share one."""
        return [tensor.detach() for tensor in tensors]

    def parts(self, tensors: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return for reading (each client's own tensors, [clients, ...], those that all clients share)."""
        return {}, {name: tensor.detach() for name, tensor in tensors.items()}

    def results(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return results in the order that clients have outside, and in the usual order of memory."""
        return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


class CohortLayout(Layout):
    """`Mapped` tensors of a cohort, [clients, ...] in memory.

    Args:
        clients: how many.
        order: the order in which they are wanted, positions [clients]; None takes them as they lie.
    """

    stacked = True

    def __init__(self, clients: int, order: Tensor | None = None) -> None:
        self.clients, self.order = clients, order

    def copies(self, tensors: Mapping[str, Mapped], names: Sequence[str]) -> dict[str, Tensor]:
        """Return copies of some tensors that may be written to."""
        return {name: self._copy(tensors[name]) for name in names}

    def _copy(self, mapped: Mapped) -> Tensor:
        moved = self._view(mapped)
        if mapped.axis is not None and self.order is not None:
            return moved
        return moved.clone(memory_format=torch.contiguous_format)

    def views(self, tensors: Sequence[Mapped]) -> list[Tensor]:
        """Return tensors for reading, with their axis of clients even where all share one (no copy then)."""
        return [self._view(mapped) for mapped in tensors]

    def _view(self, mapped: Mapped) -> Tensor:
        shared = mapped.tensor.detach()
        if mapped.axis is None:
            return shared.expand(self.clients, *shared.shape)
        moved = shared.movedim(mapped.axis, 0)
        return moved if self.order is None else moved.index_select(0, self.order)

    def parts(self, tensors: Mapping[str, Mapped]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return for reading (each client's own tensors, [clients, ...], those that all clients share)."""
        own = {name: self._view(mapped) for name, mapped in tensors.items() if mapped.axis is not None}
        return own, {name: mapped.tensor.detach() for name, mapped in tensors.items() if mapped.axis is None}

    def results(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return results [clients, ...] in the order that clients have outside."""
        if self.order is None:
            return {name: tensor.detach() for name, tensor in tensors.items()}
        back = self.order.argsort()
        return {name: tensor.detach().index_select(0, back) for name, tensor in tensors.items()}
