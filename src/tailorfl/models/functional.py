"""A module as a pure function of its state: `model(state, x)`.

The state is ONE flat TensorDict with dotted names holding the parameters and buffers that may change. The module keeps
the structure, and the tensors that never change: a frozen backbone is in memory once, whatever the number of clients,
and no state, message or checkpoint holds it. Values of a client are never in the module, so an engine can stack states
along a leading client axis.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.errors import ModelError
from tailorfl.models.dropout import Keyed, plain_dropout, replace_dropout
from tailorfl.models.selectors import Selector, select
from tailorfl.models.skeleton import (
    Skeleton,
    State,
    frozen_names,
    has_statistics,
    on_device,
    own_names,
    places_of,
    tensors_of,
    without_value,
)
from tailorfl.models.split import Split

Factory = Callable[[], nn.Module]
Change = Callable[[nn.Module], object]


class Model:
    """The structure of a network, its initial states, and its forward pass as a function of a state.

    Args:
        factory: makes a fresh, randomly initialised module; called under a seeded generator for each initial
            state.
        prepare: applied to every fresh module (loads pretrained weights, say).
        trainable: which tensors may change, see `tailorfl.models.selectors`; all others are frozen: held here once
            and in no state, their norms in evaluation mode. Running statistics go with their norm's parameters. None:
            the module's attribute `default_trainable`, or else all that require a gradient.
        seed: of the frozen tensors that `prepare` does not set; `init` with the same seed draws the rest of the
            same module.

    Raises:
        ModelError: no parameters, or none that may change.
    """

    def __init__(
        self,
        factory: Factory,
        prepare: Change | None = None,
        *,
        trainable: Selector | None = None,
        seed: int = 0,
    ) -> None:
        self._factory, self._prepare, self._seed = factory, prepare, seed
        module = self._fresh(seed)
        if trainable is None:
            learning: Selector = "all" if all(p.requires_grad for p in module.parameters()) else requires_grad
            trainable = getattr(module, "default_trainable", learning)
        self.module: nn.Module = module
        tensors = tensors_of(module)
        self.frozen: frozenset[str] = frozen_names(module, trainable)
        """Names of the tensors that never change."""
        self.parameters: tuple[str, ...] = self._live(module.named_parameters())
        self.buffers: tuple[str, ...] = self._live(module.named_buffers())
        self.sizes: dict[str, int] = {n: tensors[n].numel() for n in self.parameters + self.buffers}
        if not self.parameters:
            reason = "all are frozen" if self.frozen else "it has none"
            raise ModelError(f"{type(module).__name__} has no parameters to learn: {reason}")
        for name in self.frozen:
            tensors[name].requires_grad_(False)
        self.held_scalars: int = sum(tensors[n].numel() for n in self.frozen)
        """Number of scalars that are held once for all clients."""
        norms = {name: m for name, m in module.named_modules() if has_statistics(m)}
        self._still = tuple(name for name in norms if not set(own_names(norms[name], name)) - self.frozen)
        self._norms = {name: m for name, m in norms.items() if name not in self._still}
        self.has_batch_statistics = bool(self._norms)
        """Whether a training step depends on the batch as a whole (batch norm), so that a batch must not be padded."""
        self.further_buffers: tuple[str, ...] = tuple(
            [b for b in self.buffers if b.rpartition(".")[0] not in norms]
        )
        """Names of the buffers of other layers than norms, which their forward pass in training mode may change."""
        self.has_dropout = any(isinstance(part, Keyed) for part in module.modules())
        """Whether a training step needs keys, for dropout masks or for the noise of other layers."""
        self._places = places_of(module)
        self._whole: Model | None = None
        self._begin: Change | None = None
        self._eval = self._skeleton(self._copy(module).eval())
        self._by_layer: Skeleton | None = None
        self._training: dict[frozenset[str], Skeleton] = {}
        self._elsewhere: dict[torch.device, Model] = {}
        self.single_users: dict[frozenset[str], tuple[bool, ...]] = {}
        """For parameters that train together, which of them enter the loss through a single layer, once known."""

    @classmethod
    def of(cls, module: nn.Module) -> Model:
        """Return the Model of a module you built.

        Fresh initial states call `reset_parameters` wherever it exists, of a module after those of its parts; modules
        whose parameters need no gradient keep their values.
        """

        def factory() -> nn.Module:
            fresh, parts = copy.deepcopy(module), list[nn.Module]()
            fresh.apply(parts.append)
            for part in dict.fromkeys(parts):
                reset, own = getattr(part, "reset_parameters", None), list(part.parameters())
                if callable(reset) and (not own or any(p.requires_grad for p in own)):
                    reset()
            return fresh

        return cls(factory)

    def changed(self, change: Change) -> Model:
        """Return the model of modules that `change` alters in place; tensors it adds are drawn last and train."""
        return self._after(change, self.frozen)

    def several(self, count: int, join: Callable[[Sequence[nn.Module]], nn.Module]) -> Model:
        """Return the model in which `join` combines `count` networks of this kind, drawn one after another.

        It holds them as its attribute `networks`. The first is drawn like this model's own; tensors that are frozen in
        this model are frozen in each.
        """
        factory = partial(_joined, self._factory, self._prepare, count, join)
        return Model(factory, trainable=partial(_is_live, self.frozen), seed=self._seed)

    def inside(self, outer: Callable[[nn.Module], nn.Module], name: str) -> Model:
        """Return the model of the modules that `outer` returns, each of which holds this model's as attribute `name`.

        Frozen tensors stay frozen under their new names; tensors that `outer` adds are drawn last and train.
        """
        frozen = {f"{name}.{n}" for n in self.frozen}
        factory, prepare = self._factory, self._prepare

        def make() -> nn.Module:
            return outer(_prepared(factory, prepare))

        return Model(make, trainable=lambda full, *_: full not in frozen, seed=self._seed)

    def freezing(self, still: Selector) -> Model:
        """Return the model in which the tensors that `still` picks are frozen too, as drawn with the model's seed."""
        frozen = self.frozen | select(self.module, still, allow_empty=True)
        if frozen == self.frozen:
            return self
        return Model(
            self._factory, self._prepare, trainable=lambda name, *_: name not in frozen, seed=self._seed
        )

    def thawing(self, moving: Selector) -> Model:
        """Return the model in which the tensors that `moving` picks may change too, starting from their values here."""
        picked = self.frozen & select(self.module, moving, allow_empty=True)
        if not picked:
            return self
        values = {n: t.detach() for n, t in tensors_of(self.module).items() if n in picked}
        return self._after(partial(_with_values, values), self.frozen - picked)

    def _after(self, change: Change, frozen: frozenset[str]) -> Model:
        """Return the model of modules that `change` alters once they are prepared, with `frozen` tensors."""
        steps = [step for step in (self._prepare, change) if step is not None]
        prepare = partial(_in_turn, steps)
        return Model(self._factory, prepare, trainable=lambda name, *_: name not in frozen, seed=self._seed)

    def on(self, device: torch.device) -> Model:
        """Return the model with its frozen tensors on `device`: itself if it has none, else a cached copy."""
        if not self.frozen:
            return self
        if device not in self._elsewhere:
            moved = copy.copy(self)
            moved.module = self._copy(self.module, device)
            moved._eval = moved._skeleton(moved._copy(moved.module).eval())
            moved._by_layer, moved._training = None, {}
            self._elsewhere[device] = moved
        return self._elsewhere[device]

    def from_features(self, begin: Change) -> Model:
        """Return the model of the layers after some frozen ones: it has the same state and takes their features.

        `begin` changes a module in place so that it begins there, see `tailorfl.models.frozen_features.Boundary.apply`.

        `module` and all that is derived from it (`alone`, other models) are of the whole network.
        """
        tail = copy.copy(self)
        tail._whole, tail._begin = self.whole, begin
        tail._by_layer, tail._training, tail._elsewhere, tail.single_users = None, {}, {}, {}
        tail._eval = tail._skeleton(tail._copy(tail.module).eval())
        return tail

    @property
    def whole(self) -> Model:
        """The model of the whole network, whose inputs are samples."""
        return self if self._whole is None else self._whole

    @property
    def live_places(self) -> dict[str, list[tuple[str, str]]]:
        """Name of every tensor that may change -> the (submodule, leaf) places that hold it."""
        return {name: holders for name, holders in self._places.items() if name not in self.frozen}

    def channels_last(self, device: torch.device) -> bool:
        """Return whether one client trains faster with images and convolutions in that layout; measured on CPUs."""
        return device.type == "cpu" and self._eval.channels_last

    @property
    def scalars(self) -> int:
        """Number of parameters `d` that may change."""
        return sum(self.sizes[name] for name in self.parameters)

    def split(
        self, personal: Selector = "none", *, held: Selector = "none", allow_empty: bool = False
    ) -> Split:
        """Return the split that keeps `personal` on the client and shares all other tensors that may change.

        Clients do not train the shared tensors `held`: these are sent, and only `aggregate` changes them.

        Raises as `Split.of` does.
        """
        frozen = self.frozen
        still: Selector = (lambda name, *_: name in frozen) if frozen else "none"
        return Split.of(self.module, personal, still, held=held, allow_empty=allow_empty)

    def init(self, seed: int) -> TensorDict:
        """Return the initial state drawn with `seed`; equal seeds give equal states.

        The global random state does not change.
        """
        tensors = tensors_of(self._fresh(seed))
        return TensorDict({n: tensors[n].detach().clone() for n in self.sizes}, batch_size=[])

    def __call__(self, state: State, x: Tensor) -> Tensor:
        """Return the outputs of the model in evaluation mode, [batch, outputs].

        `x` [batch, *input shape].
        """
        return self._eval(state, x)

    def outputs_and_features(self, state: State, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs in evaluation mode and the features they are made of, [batch, width].

        Features are the input of the head: the module that the attribute `feature_layer` of the network names, else
        the last linear layer. Of an input [batch, length, width] the last position is taken, as in FedOA's code.
        """
        outputs, features = self.with_features(state, x)
        return outputs, features()

    def with_features(self, state: State, x: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return the outputs in evaluation mode, and a function of the features, which raises if there are none."""
        return self._eval.with_features(state, x)

    @contextmanager
    def bound(self, state: State) -> Iterator[nn.Module]:
        """Yield the module in evaluation mode with a state in place, for uses other than a plain forward pass."""
        if self._by_layer is None:
            self._by_layer = self._skeleton(self._copy(self.module).eval(), fused=False)
        with self._by_layer.holding(state) as module:
            yield module

    def alone(self, state: State) -> nn.Module:
        """Return a module in evaluation mode with its own copies of the values of a state and of the frozen tensors.

        Its dropout layers are plain ones, so it can be trained further without keys.
        """
        module = plain_dropout(copy.deepcopy(self.module)).eval()
        tensors = tensors_of(module)
        with torch.no_grad():
            for name in self.sizes:
                if tensors[name].shape == state[name].shape:
                    tensors[name].copy_(state[name])
                else:  # of a state that grows, such as an ensemble
                    tensors[name].data = state[name].detach().clone()
        return module

    def forward_train(self, state: dict[str, Tensor], x: Tensor, trained: frozenset[str]) -> Tensor:
        """Return the outputs in training mode; updates the batch-norm buffers in `state` IN PLACE.

        Norm modules of which no parameter is in `trained` stay in evaluation mode and keep their statistics.
        """
        return self._trainable(trained)(state, x)

    def features_train(
        self, state: dict[str, Tensor], x: Tensor, trained: frozenset[str]
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return outputs and a function that returns the features in training mode; otherwise as `forward_train`."""
        return self._trainable(trained).with_features(state, x)

    def trained_buffers(self, trained: Collection[str]) -> tuple[str, ...]:
        """Return the buffers that a step training the parameters `trained` updates."""
        active = self._active_norms(frozenset(trained))
        return tuple(b for b in self.buffers if b.rpartition(".")[0] in active)

    def _active_norms(self, trained: frozenset[str]) -> set[str]:
        active = set()
        for name, norm in self._norms.items():
            norm_parameters = {f"{name}.{p}" if name else p for p, _ in norm.named_parameters(recurse=False)}
            if (norm_parameters & trained) or (not norm_parameters and trained):
                active.add(name)
        return active

    def _trainable(self, trained: frozenset[str]) -> Skeleton:
        if trained not in self._training:
            module = self._copy(self._eval.module).train()
            active = self._active_norms(trained)
            for name, part in module.named_modules():
                if name in self._norms or name in self._still:
                    part.train(name in active)
            self._training[trained] = Skeleton(module, self.live_places)
        return self._training[trained]

    def _skeleton(self, module: nn.Module, fused: bool = True) -> Skeleton:
        if self._begin is not None:
            self._begin(module)
        return Skeleton(module, self.live_places, fused)

    def _fresh(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _prepared(self._factory, self._prepare)

    def _live(self, named: Iterator[tuple[str, Any]]) -> tuple[str, ...]:
        return tuple(name for name, _ in named if name not in self.frozen)

    def _copy(self, module: nn.Module, device: torch.device | None = None) -> nn.Module:
        """Return a copy of the structure that shares the frozen tensors and has no values of the others.

        With `device` the frozen tensors are copied there.
        """
        shared_tensors = {id(t): t for name, t in tensors_of(self.module).items() if name in self.frozen}
        if device is not None:
            shared_tensors = {key: on_device(t, device) for key, t in shared_tensors.items()}
        copied = copy.deepcopy(module, shared_tensors)
        for holders in self.live_places.values():
            for path, leaf in holders:
                owner = copied.get_submodule(path)
                tensors: Any = owner._parameters if leaf in owner._parameters else owner._buffers
                tensors[leaf] = without_value(tensors[leaf])
        return copied


def requires_grad(_: str, tensor: Tensor, __: nn.Module) -> bool:
    """Return whether a tensor is a parameter that needs a gradient; a selector."""
    return tensor.requires_grad


def _in_turn(steps: Sequence[Change], module: nn.Module) -> None:
    for step in steps:
        step(module)


def _with_values(values: Mapping[str, Tensor], module: nn.Module) -> None:
    tensors = tensors_of(module)
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(value)


def _prepared(factory: Factory, prepare: Change | None) -> nn.Module:
    """Return a freshly drawn network with keyed dropout, prepared."""
    module = replace_dropout(factory())
    if prepare is not None:
        prepare(module)
    return module


def _joined(
    factory: Factory,
    prepare: Change | None,
    count: int,
    join: Callable[[Sequence[nn.Module]], nn.Module],
) -> nn.Module:
    """Return the network that `join` makes of `count` networks, drawn and prepared one after another."""
    return join([_prepared(factory, prepare) for _ in range(count)])


def _is_live(frozen: Collection[str], name: str, *_: object) -> bool:
    """Return whether a tensor of joined networks trains; those with the names `frozen` do not in any of them."""
    name_parts = name.split(".", 2)
    return name_parts[0] != "networks" or name_parts[2] not in frozen
