"""The frozen front of a network: what it makes of samples, as `tailorfl.models.cut` keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from tailorfl.models.cut import Cut
from tailorfl.models.functional import Model
from tailorfl.models.half import in_float32


class _Enough(Exception):
    """Everything that is kept has been computed."""


class Front:
    """The frozen front of a network: samples -> what is kept of them.

    Args:
        model: the whole network.
        cut: where the rest begins.
        state: any state of the model; nothing that is kept depends on it.
    """

    def __init__(self, model: Model, cut: Cut, state: Mapping[str, Tensor]) -> None:
        self.model, self.cut, self._state = model, cut, state

    def on(self, device: torch.device) -> Front:
        """Returns the same on a device."""
        state = {name: tensor.to(device) for name, tensor in self._state.items()}
        return Front(self.model.on(device), self.cut, state)

    def __call__(self, x: Tensor) -> Tensor:
        """Samples [batch, ...] -> [batch, width]; in float32 whatever the rest multiplies in, as it is done once."""
        cut, found, seen = self.cut, dict[int, Tensor](), dict.fromkeys(self.cut.replaced, 0)
        if cut.input.start is not None:
            found[cut.input.start] = x
        wanted = len(cut.kept)

        def noting(name: str) -> Callable[..., None]:
            def note(_: nn.Module, __: Any, made: Any) -> None:
                call = cut.replaced[name][seen[name]]
                seen[name] += 1
                if call.start is not None:
                    found[call.start] = call.tensor(made)
                    if len(found) == wanted:
                        raise _Enough

            return note

        with torch.no_grad(), in_float32(), self.model.bound(self._state) as module, ExitStack() as hooks:
            for name in cut.replaced:
                handle = module.get_submodule(name).register_forward_hook(noting(name))
                hooks.callback(handle.remove)
            with suppress(_Enough):
                module(x)
        return torch.cat([found[start].reshape(len(x), -1).to(cut.dtype) for start in sorted(found)], dim=1)
