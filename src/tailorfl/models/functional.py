"""A module as a pure function of its state: `model(state, x)`.

The state is ONE flat TensorDict with dotted names holding parameters and buffers; the module itself only
keeps the structure and never holds values of a client. That is what lets an engine stack states along a
leading client axis.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from tailorfl.errors import ModelError
from tailorfl.models.dropout import replace_dropout

State = Mapping[str, Tensor]


class Model:
    """The structure of a network, its initial states, and its forward pass as a function of a state.

    Args:
        factory: makes a fresh, randomly initialised module; called under a seeded generator for each initial
            state.
        prepare: applied to every fresh module (loads pretrained weights, say).
    """

    def __init__(
        self, factory: Callable[[], nn.Module], prepare: Callable[[nn.Module], object] | None = None
    ) -> None:
        self._factory = factory
        self._prepare = prepare
        module = replace_dropout(factory())
        self.module: nn.Module = module
        self.parameters: tuple[str, ...] = tuple(name for name, _ in module.named_parameters())
        self.buffers: tuple[str, ...] = tuple(name for name, _ in module.named_buffers())
        self.sizes: dict[str, int] = {name: t.numel() for name, t in _tensors(module).items()}
        if not self.parameters:
            raise ModelError(f"{type(module).__name__} has no parameters, so there is nothing to learn")
        self._norms = {name: m for name, m in module.named_modules() if _has_statistics(m)}
        self._places = _places(module)
        self._eval = _Skeleton(copy.deepcopy(module).eval().to("meta"), self._places)
        self._training: dict[frozenset[str], _Skeleton] = {}

    @classmethod
    def of(cls, module: nn.Module) -> Model:
        """Returns the Model of a module you built.

        Fresh initial states call `reset_parameters` wherever it exists.
        """

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
        """Whether a training step depends on the batch as a whole (batch norm), so that a batch must not be
        padded.
        """
        return bool(self._norms)

    @property
    def scalars(self) -> int:
        """Number of parameters `d`."""
        return sum(self.sizes[name] for name in self.parameters)

    def init(self, seed: int) -> TensorDict:
        """Returns the initial state drawn with `seed`; equal seeds give equal states.

        Global random state is left as it was.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self._factory()
            if self._prepare is not None:
                self._prepare(module)
        return TensorDict({k: t.detach().clone() for k, t in _tensors(module).items()}, batch_size=[])

    def __call__(self, state: State, x: Tensor) -> Tensor:
        """Returns the outputs of the model in evaluation mode, [batch, outputs].

        `x` [batch, *input shape].
        """
        return self._eval(state, x)

    def forward_train(self, state: dict[str, Tensor], x: Tensor, trained: frozenset[str]) -> Tensor:
        """Returns the outputs in training mode; updates the batch-norm buffers in `state` IN PLACE.

        Norm modules of which no parameter is in `trained` stay in evaluation mode and keep their statistics.
        """
        return self._trainable(trained)(state, x)

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

    def _trainable(self, trained: frozenset[str]) -> _Skeleton:
        if trained not in self._training:
            module = copy.deepcopy(self._eval.module).train()
            active = self._active_norms(trained)
            for name in self._norms:
                module.get_submodule(name).train(name in active)
            self._training[trained] = _Skeleton(module, self._places)
        return self._training[trained]


def _has_statistics(module: nn.Module) -> bool:
    """Whether a training step of the module depends on the batch as a whole, or updates running statistics."""
    return isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats)


class _Skeleton:
    """A module without values of its own, which borrows a state for the time of one call.

    Does what `torch.func.functional_call` does; the places are looked up once instead of at every call, which
    for a small model costs more than its arithmetic.
    """

    def __init__(self, module: nn.Module, places: dict[str, list[tuple[str, str]]]) -> None:
        self.module = module
        for part in module.modules():
            if type(part) is nn.Linear:
                part.__class__ = _Linear
        self._slots: list[tuple[str, dict[str, Tensor | None], str, Tensor | None]] = []
        for name, owners in places.items():
            for path, leaf in owners:
                part = module.get_submodule(path)
                held: Any = part._parameters if leaf in part._parameters else part._buffers
                self._slots.append((name, held, leaf, held[leaf]))

    def __call__(self, state: State, x: Tensor) -> Tensor:
        """Returns the module's outputs with the tensors of `state` as its parameters and buffers."""
        try:
            for name, held, leaf, _ in self._slots:
                held[leaf] = state[name]
            out: Tensor = self.module(x)
        finally:
            for _, held, leaf, empty in self._slots:
                held[leaf] = empty
        return out


class _Linear(nn.Linear):
    """A linear layer that multiplies in the order W xᵀ where every client has a weight of its own.

    The gradient of W is then gᵀx, a batched product that lies in memory as W does; from x Wᵀ it would come
    out transposed, which costs twice the time of the whole step.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[batch, in] (or [..., in]) -> [batch, out]."""
        if input.dim() != 2 or not is_batchedtensor(self.weight):
            return F.linear(input, self.weight, self.bias)
        out = (self.weight @ input.T).T
        return out if self.bias is None else out + self.bias


def _places(module: nn.Module) -> dict[str, list[tuple[str, str]]]:
    """Returns for every state name the (submodule, leaf) places that hold it; tied tensors have several."""
    names = {id(t): name for name, t in reversed(_tensors(module).items())}
    out: dict[str, list[tuple[str, str]]] = {name: [] for name in _tensors(module)}
    for path, part in module.named_modules(remove_duplicate=False):
        for leaf, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                out[names[id(tensor)]].append((path, leaf))
    return out


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
