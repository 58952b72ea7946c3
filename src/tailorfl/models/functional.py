"""A module as a pure function of its state: `model(state, x)`.

The state is ONE flat TensorDict with dotted names holding parameters and buffers; the module itself only keeps the structure
and never holds values of a client. That is what lets an engine stack states along a leading client axis.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from tailorfl.errors import ModelError
from tailorfl.models.dropout import replace_dropout

State = Mapping[str, Tensor]


class Model:
    """The structure of a network, its initial states, and its forward pass as a function of a state.

    Args:
        factory: makes a fresh, randomly initialised module; called under a seeded generator for each initial state.
        prepare: applied to every fresh module (loads pretrained weights, say).
    """

    def __init__(self, factory: Callable[[], nn.Module], prepare: Callable[[nn.Module], object] | None = None) -> None:
        self._factory = factory
        self._prepare = prepare
        module = replace_dropout(factory())
        self.module: nn.Module = module
        self.parameters: tuple[str, ...] = tuple(name for name, _ in module.named_parameters())
        self.buffers: tuple[str, ...] = tuple(name for name, _ in module.named_buffers())
        self.sizes: dict[str, int] = {name: t.numel() for name, t in _tensors(module).items()}
        if not self.parameters:
            raise ModelError(f"{type(module).__name__} has no parameters, so there is nothing to learn")
        self._norms = {name: m for name, m in module.named_modules() if isinstance(m, _BatchNorm)}
        self._eval = copy.deepcopy(module).eval().to("meta")
        self._training: dict[frozenset[str], nn.Module] = {}

    @classmethod
    def of(cls, module: nn.Module) -> Model:
        """Returns the Model of a module you built; fresh initial states call `reset_parameters` wherever it exists."""

        def factory() -> nn.Module:
            fresh = copy.deepcopy(module)
            for part in fresh.modules():
                reset = getattr(part, "reset_parameters", None)
                if callable(reset):
                    reset()
            return fresh

        return cls(factory)

    @property
    def has_batch_statistics(self) -> bool:
        """Whether a training step depends on the batch as a whole (batch norm), so that a batch must not be padded."""
        return bool(self._norms)

    @property
    def scalars(self) -> int:
        """Number of parameters `d`."""
        return sum(self.sizes[name] for name in self.parameters)

    def init(self, seed: int) -> TensorDict:
        """Returns the initial state drawn with `seed`; equal seeds give equal states. Global random state is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self._factory()
            if self._prepare is not None:
                self._prepare(module)
        return TensorDict({k: t.detach().clone() for k, t in _tensors(module).items()}, batch_size=[])

    def __call__(self, state: State, x: Tensor) -> Tensor:
        """Returns the outputs of the model in evaluation mode, [batch, outputs]; `x` [batch, *input shape]."""
        out: Tensor = functional_call(self._eval, dict(state.items()), (x,))
        return out

    def forward_train(self, state: dict[str, Tensor], x: Tensor, trained: frozenset[str]) -> Tensor:
        """Returns the outputs in training mode; updates the batch-norm buffers in `state` IN PLACE.

        Norm modules of which no parameter is in `trained` stay in evaluation mode and keep their statistics.
        """
        out: Tensor = functional_call(self._trainable(trained), state, (x,))
        return out

    def trained_buffers(self, trained: Collection[str]) -> tuple[str, ...]:
        """The buffers that a step training the parameters `trained` updates."""
        active = self._active_norms(frozenset(trained))
        return tuple(b for b in self.buffers if b.rpartition(".")[0] in active)

    def _active_norms(self, trained: frozenset[str]) -> set[str]:
        active = set()
        for name, norm in self._norms.items():
            own = {f"{name}.{p}" if name else p for p, _ in norm.named_parameters(recurse=False)}
            if (own & trained) or (not own and trained):
                active.add(name)
        return active

    def _trainable(self, trained: frozenset[str]) -> nn.Module:
        if trained not in self._training:
            module = copy.deepcopy(self._eval).train()
            active = self._active_norms(trained)
            for name in self._norms:
                module.get_submodule(name).train(name in active)
            self._training[trained] = module
        return self._training[trained]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
