"""A module without values of its own: what `Model` runs with the values of one client or of many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from tailorfl.errors import ModelError
from tailorfl.models.cohort_convs import Conv2d
from tailorfl.models.cohort_layers import Linear
from tailorfl.models.cohort_norms import BatchNorm1d, BatchNorm2d, GroupNorm
from tailorfl.models.half import forward_pass, is_half, widened
from tailorfl.models.layers import head_layer
from tailorfl.models.norm import is_norm
from tailorfl.models.pooling import taken_along

State = Mapping[str, Tensor]


LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear,
    nn.Conv2d: Conv2d,
    nn.GroupNorm: GroupNorm,
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
}
"""What takes the place of a layer so that it can be many clients' at once."""


class Skeleton:
    """A module without values of its own, which borrows a state for the time of one call.

    Does what `torch.func.functional_call` does; the places are looked up once instead of at every call, which
    for a small model costs more than its arithmetic.
    """

    def __init__(self, module: nn.Module, holders: dict[str, list[tuple[str, str]]]) -> None:
        self.module = module
        # Convolutions and pooling are faster with channels last, norms with channels first.
        last = not any(is_norm(part) for part in module.modules())
        for part in module.modules():
            mapped = LAYERS.get(type(part))
            if mapped is not None:
                part.__class__ = mapped
            if isinstance(part, Conv2d):
                part.channels_last = last
        for layer, pool in taken_along(module, Conv2d).items():
            layer.pool = pool
        convolves = any(isinstance(part, Conv2d) for part in module.modules())
        self.channels_last = last and convolves and all(map(_any_layout, module.modules()))
        """Whether a client alone is faster with that layout, too, and nothing in the module asks for another."""
        self._head: nn.Module | None = None
        self._slots: list[tuple[str, dict[str, Tensor | None], str, Tensor | None]] = []
        for name, owners in holders.items():
            for path, leaf in owners:
                part = module.get_submodule(path)
                slots: Any = part._parameters if leaf in part._parameters else part._buffers
                self._slots.append((name, slots, leaf, slots[leaf]))

    def __call__(self, state: State, x: Tensor) -> Tensor:
        """Return the module's outputs with the tensors of `state` as its parameters and buffers."""
        try:  # as `holding`, without a block of its own: that takes microseconds, at every step
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
        """Return (outputs, what returns the features or raises ModelError where the model has none)."""
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
    """Whether a module is known to take images in any order of memory; `x.view(...)` in other code would not."""
    return type(part).__module__.startswith(("torch.nn.", "tailorfl.models.", "tailorfl.methods."))


def _features(model: str, inputs: Sequence[Tensor] | None) -> Tensor:
    """Return what went into the head, `inputs` at each of its runs; None where there is no head."""
    if inputs is None:
        raise ModelError(
            f"a {model} has no linear layer whose input could be its feature; name the layer by an attribute "
            "`feature_layer`"
        )
    if len(inputs) != 1:
        raise ModelError(
            f"the features of a {model} are the input of a layer that runs once in a forward pass, but it ran "
            f"{len(inputs)} times; name another one by the attribute `feature_layer`"
        )
    return inputs[0][:, -1] if inputs[0].dim() == 3 else inputs[0]
