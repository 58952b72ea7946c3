"""`Split`: which tensors of a model are shared, personal or frozen, for every part of the library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, overload

from tensordict import TensorDictBase
from torch import nn

from tailorfl.errors import ModelError
from tailorfl.models.layers import state_entries
from tailorfl.models.selectors import Selector, select

D = TypeVar("D", bound=TensorDictBase)
V = TypeVar("V")


@dataclass(frozen=True)
class Split:
    """Role of every parameter and buffer of a model; the three roles partition `names`.

    shared    trained by clients, sent and aggregated; of these `held` are sent and not trained: only `aggregate`
              changes them
    personal  trained by the client that owns it, never sent
    frozen    the same constant everywhere: neither trained nor sent

    Mappings are flat: dotted name -> tensor, a dict or a TensorDict of any batch size (for instance
    [clients]). All tuples of names are in module order.
    """

    names: tuple[str, ...]
    shared: tuple[str, ...]
    personal: tuple[str, ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    sizes: Mapping[str, int] = field(hash=False, repr=False)
    """Number of scalars of one client's tensor, by name."""
    held: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        module: nn.Module,
        personal: Selector,
        frozen: Selector = "none",
        *,
        held: Selector = "none",
        allow_empty: bool = False,
    ) -> Split:
        """Return the split of a module.

        Tensors that are neither personal nor frozen are shared; those of them that `held` picks are not trained.

        A tensor that both selectors pick is frozen. Raises ConfigError for an unknown word and
        ModelError if a selector matches nothing, or nothing that is not frozen, unless `allow_empty`.
        """
        entries = state_entries(module)
        if not entries:
            raise ModelError(f"a {type(module).__name__} without parameters and buffers cannot be split.")
        still = select(module, frozen, allow_empty=allow_empty)
        picked = select(module, personal, allow_empty=allow_empty)
        own_names = picked - still
        if picked and not own_names and not allow_empty:
            raise ModelError(
                f"the whole personal part ({personal!r}) is also frozen; train some of it, see model.trainable."
            )
        names = tuple(entry.name for entry in entries)
        shared = tuple(n for n in names if n not in own_names and n not in still)
        untrained = select(module, held, allow_empty=allow_empty)
        return cls(
            names=names,
            shared=shared,
            personal=tuple(n for n in names if n in own_names),
            frozen=tuple(n for n in names if n in still),
            buffers=tuple(entry.name for entry in entries if entry.is_buffer),
            sizes={entry.name: entry.tensor.numel() for entry in entries},
            held=tuple(n for n in shared if n in untrained),
        )

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names that are not buffers."""
        buffers = set(self.buffers)
        return tuple(n for n in self.names if n not in buffers)

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Parameters that are neither frozen nor held."""
        still = {*self.frozen, *self.held}
        return tuple(n for n in self.parameters if n not in still)

    @overload
    def select_shared(self, mapping: D) -> D: ...
    @overload
    def select_shared(self, mapping: Mapping[str, V]) -> dict[str, V]: ...
    def select_shared(self, mapping: Any) -> Any:
        """Return the shared entries of the mapping in module order; same kind of mapping, tensors not copied.

        The mapping may cover a part of the state (gradients have no buffers). Raises ModelError for a name
        that the model does not have.
        """
        return self._pick(mapping, self.shared)

    @overload
    def select_personal(self, mapping: D) -> D: ...
    @overload
    def select_personal(self, mapping: Mapping[str, V]) -> dict[str, V]: ...
    def select_personal(self, mapping: Any) -> Any:
        """Return the entries of the mapping that are personal; otherwise as `select_shared`."""
        return self._pick(mapping, self.personal)

    def _pick(self, mapping: Any, role: tuple[str, ...]) -> Any:
        names = set(mapping.keys())
        strange = [n for n in names if n not in self.sizes]
        if strange:
            raise ModelError(f"the model has no state named {strange[:8]}; it has {list(self.names[:8])} ...")
        picked = [n for n in role if n in names]
        if isinstance(mapping, TensorDictBase):
            return mapping.select(*picked)
        return {n: mapping[n] for n in picked}
