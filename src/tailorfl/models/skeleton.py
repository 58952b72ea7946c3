"""A module without its own values, which `Model` runs with the values of one client or of many.

The functions here find a module's tensors by name, the places that hold them and those that never change, make the
placeholders for them in a copy, and set the memory order of image inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from tailorfl.errors import ModelError
from tailorfl.models.cohort_convs import Conv2d, MaxPool2d, taken_along
from tailorfl.models.cohort_layers import BatchNorm1d, BatchNorm2d, Embedding, GroupNorm, Linear, PReLU
from tailorfl.models.half import forward_pass, is_half, widened
from tailorfl.models.layers import head_layer, is_norm
from tailorfl.models.selectors import Selector, select

State = Mapping[str, Tensor]
LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear,
    nn.Embedding: Embedding,
    nn.PReLU: PReLU,
    nn.Conv2d: Conv2d,
    nn.MaxPool2d: MaxPool2d,
    nn.GroupNorm: GroupNorm,
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
}
"""The class that replaces each layer so that it can run for many clients at once."""


class Skeleton:
    """A module without its own values, which borrows a state for one call.

    Does the same as `torch.func.functional_call`, but looks up the places once instead of at every call, which
    for a small model costs more than its arithmetic.

    Args:
        module: the structure, which is changed.
        holders: the places of every tensor that is borrowed, by its name.
        fused: whether convolutions take the pooling after them along, so that layers cannot be called one by one.
    """

    def __init__(
        self, module: nn.Module, holders: dict[str, list[tuple[str, str]]], fused: bool = True
    ) -> None:
        self.module = module
        # Convolutions and pooling are faster with channels last, norms with channels first.
        last = not any(is_norm(part) for part in module.modules())
        for part in module.modules():
            mapped = LAYERS.get(type(part))
            if mapped is not None:
                part.__class__ = mapped
            if isinstance(part, Conv2d):
                part.channels_last = last
        for layer, pool in taken_along(module, Conv2d).items() if fused else ():
            layer.pool = pool
        convolves = any(isinstance(part, Conv2d) for part in module.modules())
        self.channels_last = last and convolves and all(map(_any_layout, module.modules()))
        """Whether a single client is faster with that layout too, and nothing in the module needs another."""
        self._head: nn.Module | None = None
        self._slots: list[tuple[str, dict[str, Tensor | None], str, Tensor | None]] = []
        for name, owners in holders.items():
            for path, leaf in owners:
                part = module.get_submodule(path)
                slots: Any = part._parameters if leaf in part._parameters else part._buffers
                self._slots.append((name, slots, leaf, slots[leaf]))

    def __call__(self, state: State, x: Tensor) -> Tensor:
        """Return the module's outputs with the tensors of `state` as its parameters and buffers."""
        try:  # as `holding`, but without a context manager, which would cost microseconds at every step
            for name, tensors, leaf, _ in self._slots:
                tensors[leaf] = state[name]
            out: Tensor = self._passed(x) if is_half() else self.module(x)
        finally:
            for _, tensors, leaf, empty in self._slots:
                tensors[leaf] = empty
        return out

    def _passed(self, x: Tensor) -> Tensor:
        """Return the outputs of a pass in bfloat16, in float32."""
        with forward_pass():
            return widened(self.module(x))

    def with_features(self, state: State, x: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return (outputs, a function that returns the features or raises ModelError if the model has none)."""
        inputs: list[Tensor] = []
        if self._head is None:
            self._head = head_layer(self.module)
        if self._head is None:
            return self(state, x), partial(_features, type(self.module).__name__, None)
        hook = self._head.register_forward_pre_hook(lambda _, arguments: inputs.append(widened(arguments[0])))
        try:
            outputs = self(state, x)
        finally:
            hook.remove()
        return outputs, partial(_features, type(self.module).__name__, inputs)

    @contextmanager
    def holding(self, state: State) -> Iterator[nn.Module]:
        """Yield the module while it has the tensors of `state`."""
        try:
            for name, tensors, leaf, _ in self._slots:
                tensors[leaf] = state[name]
            with forward_pass():
                yield self.module
        finally:
            for _, tensors, leaf, empty in self._slots:
                tensors[leaf] = empty


def _any_layout(part: nn.Module) -> bool:
    """Return whether a module is known to take images in any memory order; `x.view(...)` in other code does not."""
    return type(part).__module__.startswith(("torch.nn.", "tailorfl.models.", "tailorfl.methods."))


def _features(model: str, inputs: Sequence[Tensor] | None) -> Tensor:
    """Return the features from the head's `inputs`, one per run; raises ModelError for None (no head) or several."""
    if inputs is None:
        raise ModelError(
            f"a {model} has no linear layer whose input could be its feature; name the layer with the attribute "
            "`feature_layer`"
        )
    if len(inputs) != 1:
        raise ModelError(
            f"the features of a {model} are the input of a layer that runs once in a forward pass, but it ran "
            f"{len(inputs)} times; name another one with the attribute `feature_layer`"
        )
    return inputs[0][:, -1] if inputs[0].dim() == 3 else inputs[0]


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a frozen tensor on a device."""
    moved = tensor.detach().to(device)
    return nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved


def without_value(tensor: Tensor) -> Tensor:
    """Return the placeholder for a tensor that the module borrows for a call."""
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty


def frozen_names(module: nn.Module, trainable: Selector) -> frozenset[str]:
    """Return the names of the tensors that never change: those not picked, and constants that no weight file holds."""
    tensors = tensors_of(module)
    constant = {
        f"{path}.{leaf}" if path else leaf
        for path, part in module.named_modules()
        for leaf in part._non_persistent_buffers_set
    }
    live = set(tensors) if trainable == "all" else set(select(module, trainable))
    for name, part in module.named_modules():
        if has_statistics(part) and any(n in live for n, _ in part.named_parameters(name, recurse=False)):
            live |= {n for n, _ in part.named_buffers(name, recurse=False)}
    return frozenset(n for n in tensors if n not in live or n in constant)


def own_names(module: nn.Module, name: str) -> list[str]:
    """Return the state names of the tensors that a module called `name` holds itself."""
    named = (*module.named_parameters(name, recurse=False), *module.named_buffers(name, recurse=False))
    return [n for n, _ in named]


def has_statistics(module: nn.Module) -> bool:
    """Return whether a training step of the module depends on the whole batch, or updates running statistics."""
    return isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats)


def places_of(module: nn.Module) -> dict[str, list[tuple[str, str]]]:
    """Return for every state name the (submodule, leaf) places that hold it; tied tensors have several."""
    names = {id(t): name for name, t in reversed(tensors_of(module).items())}
    out: dict[str, list[tuple[str, str]]] = {name: [] for name in tensors_of(module)}
    for path, part in module.named_modules(remove_duplicate=False):
        for leaf, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                out[names[id(tensor)]].append((path, leaf))
    return out


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def channels_last(x: Tensor) -> Tensor:
    """Return `x` [batch, channels, height, width] copied with channels last in memory.

    A copy is needed: with a single channel both orders are the same in memory, and torch would keep the old strides.
    """
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)


def laid_out(x: Tensor, last: bool) -> Tensor:
    """Return `x` with channels last in memory if `last` and it has four axes (images, weights of a convolution)."""
    return channels_last(x) if last and x.dim() == 4 else x
