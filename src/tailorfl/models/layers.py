"""The parts of a module: its state names in order, its layers, and the norm of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from tailorfl.errors import ModelError, first_few

# _NormBase is the common base of every BatchNorm*, SyncBatchNorm and InstanceNorm*.
NORM_TYPES: tuple[type[nn.Module], ...] = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation layer, recognised by its type and never by its attribute name.

    Every family of language models defines its own class for RMS norms, such as LlamaRMSNorm.
    """
    return isinstance(module, NORM_TYPES) or type(module).__name__.endswith("RMSNorm")


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer: its dotted name, the tensor, and the module that holds it."""

    name: str
    tensor: Tensor
    module: nn.Module
    is_buffer: bool


def state_entries(module: nn.Module) -> tuple[Entry, ...]:
    """Return every parameter and buffer once, module by module, each module's parameters before its buffers.

    A tensor that is held under several names (tied weights) appears under the first one, as in
    `named_parameters()`. Raises ModelError for lazy layers that have not seen an input yet.
    """
    entries: list[Entry] = []
    visited: set[int] = set()
    for prefix, part in module.named_modules():
        tensors = [(n, t, False) for n, t in part.named_parameters(recurse=False)]
        tensors += [(n, t, True) for n, t in part.named_buffers(recurse=False)]
        for name, tensor, is_buffer in tensors:
            dotted = f"{prefix}.{name}" if prefix else name
            if is_lazy(tensor):
                raise ModelError(f"'{dotted}' has no shape yet; run one forward pass before making a split.")
            if id(tensor) not in visited:
                visited.add(id(tensor))
                entries.append(Entry(dotted, tensor, part, is_buffer))
    return tuple(entries)


@dataclass
class Layer:
    """A module with its own parameters, and the norms and other modules with buffers that belong to it."""

    module: nn.Module
    attached: list[nn.Module] = field(default_factory=list)


def layers(module: nn.Module) -> list[Layer]:
    """Return the layers of a module in the order in which they were registered, each with its norm.

    A norm belongs to the layer registered last before it. If layers and norms are in two lists of equal
    length and widths (convs.0..n, then norms.0..n), the k-th norm belongs to the k-th layer. Norms that
    come before every layer belong to the first one; a module of only norms has one layer per norm.
    """
    result: list[Layer] = []
    leading: list[nn.Module] = []
    for carriers, followers in _runs(module):
        run = [Layer(carrier) for carrier in carriers]
        result += run
        if not run:
            leading += followers
        elif _paired(carriers, followers):
            for layer, norm in zip(run, followers, strict=True):
                layer.attached.append(norm)
        else:
            run[-1].attached += followers
    if not result:
        return [Layer(norm) for norm in leading]
    result[0].attached[:0] = leading
    return result


def _runs(module: nn.Module) -> Iterator[tuple[list[nn.Module], list[nn.Module]]]:
    """Yield the stateful modules as alternating runs: layers, and the norms that follow them."""
    owners = {id(entry.module): entry.module for entry in state_entries(module)}
    carriers: list[nn.Module] = []
    followers: list[nn.Module] = []
    for owner in owners.values():
        if is_norm(owner) or not any(True for _ in owner.parameters(recurse=False)):
            followers.append(owner)
            continue
        if followers:
            yield carriers, followers
            carriers, followers = [], []
        carriers.append(owner)
    yield carriers, followers


def _paired(carriers: list[nn.Module], followers: list[nn.Module]) -> bool:
    if len(carriers) != len(followers):
        return False
    return all(
        _width(carrier) is not None and _width(carrier) == _width(norm)
        for carrier, norm in zip(carriers, followers, strict=True)
    )


def _width(module: nn.Module) -> int | None:
    """Return the output channels of a layer or the input channels of a norm; None for other types."""
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, _ConvNd):
        return module.out_channels
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return int(module.normalized_shape[-1])
    if isinstance(module, nn.GroupNorm):
        return module.num_channels
    if isinstance(module, NORM_TYPES):
        return int(getattr(module, "num_features"))  # noqa: B009  (the common base has it, the type does not say so)
    return None


Groups = tuple[tuple[str, ...], ...]
"""Names of the parameters of every layer."""


def layer_groups(module: nn.Module, *, buffers: bool = False) -> Groups:
    """Return the names of the parameters, grouped by layer, in module order (methods of the PLGU family, CVPR 2023).

    A layer is a module with its weight and bias, and the norm that follows it; ResNet-18 has 21 (20
    convolutions and the head). The groups partition the parameters; with `buffers` they partition the whole
    state, with running statistics in the group of their norm.
    """
    entries = state_entries(module)
    groups = []
    for layer in layers(module):
        members = {id(layer.module), *(id(part) for part in layer.attached)}
        names = tuple(e.name for e in entries if id(e.module) in members and (buffers or not e.is_buffer))
        if names:
            groups.append(names)
    return tuple(groups)


def linears(module: nn.Module) -> list[nn.Linear]:
    """Return the linear layers in the order in which they were registered."""
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def head_layer(module: nn.Module) -> nn.Module | None:
    """Return the layer that turns features into outputs.

    The one that the module's attribute `feature_layer` names, else the last linear one; None if there is neither.

    Raises:
        ModelError: the module has no layer of that name.
    """
    named = getattr(module, "feature_layer", None)
    if named is not None:
        try:
            return module.get_submodule(named)
        except AttributeError as error:
            raise ModelError(
                f"the attribute feature_layer of a {type(module).__name__} names '{named}', but it has no such layer; "
                f"name one of {', '.join(name for name, _ in module.named_modules() if name)}"
            ) from error
    linear_layers = linears(module)
    return linear_layers[-1] if linear_layers else None


def head_name(module: nn.Module) -> str | None:
    """Return the dotted name of `head_layer`."""
    head = head_layer(module)
    return next((name for name, part in module.named_modules() if part is head), None)


def replace_head(module: nn.Module, make: Callable[[nn.Linear], nn.Module], what: str) -> None:
    """Replace the head of a network in place by the module that `make` returns for it.

    Args:
        module: the network.
        make: linear head -> its replacement, which gets the head's type and device.
        what: the subject and verb of the error, such as "a gate stands before".

    Raises:
        ModelError: the head is not an ordinary linear layer inside a network.
    """
    head, name = head_layer(module), head_name(module)
    if type(head) is not nn.Linear or not name:
        raise ModelError(
            f"{what} a head that is a linear layer inside a network, but that of a {type(module).__name__} is "
            f"{'missing' if head is None else f'a {type(head).__name__}'}"
        )
    module.set_submodule(name, make(head).to(head.weight))
    module.feature_layer = name  # type: ignore[assignment]


def inventory(module: nn.Module) -> str:
    """Return one line for error messages: the stateful module types with their counts, and the first state names."""
    entries = state_entries(module)
    owners = {id(entry.module): type(entry.module).__name__ for entry in entries}
    types = ", ".join(f"{count} {kind}" for kind, count in Counter(owners.values()).items())
    names = first_few([entry.name for entry in entries], 12)
    return f"the model has {types or 'no stateful module'}; its state: {names or 'empty'}"
