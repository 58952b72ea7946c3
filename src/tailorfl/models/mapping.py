"""One map over clients with little overhead: the same as `torch.func.vmap` of one level, at a fraction of its cost.

`vmap` flattens and rebuilds its arguments as general trees at every call: for a small model that takes longer than its
arithmetic. Here the caller chooses the tensors with a client axis. The maps of torch are used for all operations in
between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from torch._C._functorch import (
    _add_batch_dim,
    _remove_batch_dim,
    _unwrap_batched,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_get_level,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
)
from torch._functorch import vmap as torch_vmap


class Level:
    """An open map: gives tensors a client axis that the code inside does not see, and removes it again."""

    def __init__(self, level: int, clients: int) -> None:
        self.level, self.clients = level, clients

    def one(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return a tensor with a client axis as the code of one client sees it."""
        return _add_batch_dim(tensor, dim, self.level)

    def each(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors [clients, ...] as the code of one client sees them."""
        return {name: _add_batch_dim(t, 0, self.level) for name, t in tensors.items()}

    def back(self, tensor: Tensor) -> Tensor:
        """Return the tensor [clients, ...] for one that the code of one client sees; for use in `outside`."""
        plain, dim = _unwrap_batched(tensor, self.level)
        if dim is None:
            return plain.expand(self.clients, *plain.shape)
        return plain.movedim(dim, 0)

    def all(self, tensor: Tensor) -> Tensor:
        """Return a result of the code of one client for all clients, [clients, ...]."""
        return _remove_batch_dim(tensor, self.level, self.clients, 0)


@contextmanager
def over_clients(clients: int) -> Iterator[Level]:
    """Open a map over `clients` clients; random operations raise an error, as in `torch.func.vmap`."""
    torch_vmap.lazy_load_decompositions()  # type: ignore[attr-defined]
    level = Level(_vmap_increment_nesting(clients, "error"), clients)
    try:
        yield level
    finally:
        _vmap_decrement_nesting()


@contextmanager
def outside() -> Iterator[None]:
    """Step out of the innermost map.

    Operations in this block see physical tensors, and autograd records them.
    """
    layer = pop_dynamic_layer_stack()
    try:
        yield
    finally:
        push_dynamic_layer_stack(layer)


def mapped_once(*tensors: Tensor | None) -> bool:
    """Return whether one map gives some of the tensors a client axis, and no other map or transform is involved."""
    levels = {
        maybe_get_level(t)
        if is_batchedtensor(t) and not is_functorch_wrapped_tensor(get_unwrapped(t))
        else -1
        for t in tensors
        if t is not None and is_functorch_wrapped_tensor(t)
    }
    return len(levels) == 1 and -1 not in levels


def physical(tensor: Tensor) -> tuple[Tensor, int | None]:
    """Return (tensor with its client axis, index of that axis), or (tensor, None) if all clients share it."""
    if not is_batchedtensor(tensor):
        return tensor, None
    plain, dim = _unwrap_batched(tensor, maybe_get_level(tensor))
    return plain, dim


def front(tensor: Tensor, dim: int | None, clients: int) -> Tensor:
    """Return the tensor as [clients, ...]; a view without copies if all clients share it."""
    if dim is None:
        return tensor.expand(clients, *tensor.shape)
    return tensor if dim == 0 else tensor.movedim(dim, 0)


def together(
    layer: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shared_input: bool = False,
) -> Tensor | None:
    """Return a layer's outputs for mapped tensors, computed on the physical ones; None unless one map made all.

    `weight` is mapped. With `shared_input` the layer accepts an input without client axis if all clients share it.
    """
    if not mapped_once(x, weight, bias):
        return None
    level = maybe_get_level(weight)
    w, w_dim = physical(weight)
    clients = w.shape[w_dim or 0]
    with outside():
        inputs, x_dim = physical(x)
        if x_dim is not None or not shared_input:
            inputs = front(inputs, x_dim, clients)
        b = None if bias is None else front(*physical(bias), clients)
        outputs = layer(inputs, front(w, w_dim, clients), b)
    out: Tensor = _add_batch_dim(outputs, 0, level)
    return out
