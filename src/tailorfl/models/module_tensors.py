"""The tensors of a module by name: which never change, where they stand, and what a copy has in their place."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from tailorfl.models.selectors import Selector, select


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a frozen tensor on a device."""
    moved = tensor.detach().to(device)
    return nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved


def without_value(tensor: Tensor) -> Tensor:
    """Return what stands in the place of a tensor that a call lends the module."""
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty


def frozen_names(module: nn.Module, trainable: Selector) -> frozenset[str]:
    """Names of the tensors that never change: those not picked, and constants that no weight file holds."""
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
    """State names of the tensors that a module called `name` itself holds."""
    named = (*module.named_parameters(name, recurse=False), *module.named_buffers(name, recurse=False))
    return [n for n, _ in named]


def has_statistics(module: nn.Module) -> bool:
    """Whether a training step of the module depends on the batch as a whole, or updates running statistics."""
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
