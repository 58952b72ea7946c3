"""Features of frozen layers, computed once: the boundary that a network declares, and the network from there on.

The outputs of frozen layers for a sample without random changes are the same in every pass. A network declares by its
attribute `feature_boundary` after which of its modules they may be kept: one dotted name, or several, of which the one
is used that runs last without anything before it that trains or draws. `FeatureExtractor` computes the outputs of that
module. In a network that begins there (`Model.from_features`), stand-ins replace the modules before it and return the
kept outputs. Everything else runs unchanged, with its own names.

    class Net(nn.Module):
        feature_boundary = "backbone"       # or ("backbone.stage1", "backbone.stage2", ...)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tailorfl.errors import ModelError
from tailorfl.models.dropout import Keyed, dropout_key
from tailorfl.models.functional import Model
from tailorfl.models.half import in_float32

SAMPLES = 5
"""Samples with which a network is tried: a number that few other axes have."""
LARGEST_ID = 2**24
"""Whole numbers up to here are exact in float32, the type in which token ids are kept."""
TOLERANCE = 1e-4
"""Allowed difference, relative to the largest output; at a wrong boundary it is as large as the outputs themselves."""
DISTURBED = 0.1
"""Distance of the state for comparison from the given one, in units of a tensor's mean magnitude."""

State = Mapping[str, Tensor]


class NoFeaturesError(Exception):
    """The reason why the frozen layers of a network are not computed once."""


class Output(NamedTuple):
    """The form of the result of one call of a module: one tensor, alone or in a tuple with None."""

    shape: tuple[int, ...]
    """Of one row."""
    rows: int
    """Number of rows per sample."""
    dtype: torch.dtype
    items: tuple[bool, ...] | None
    """For a tuple: True at its tensor."""
    start: int | None = None
    """Its position in the features of a sample; None: it is not kept."""

    @property
    def size(self) -> int:
        """Numbers per sample."""
        return self.rows * math.prod(self.shape)

    def tensor(self, returned: Any) -> Tensor:
        """Return the tensor in the module's result."""
        tensor: Tensor = returned if self.items is None else returned[self.items.index(True)]
        return tensor

    def like_returned(self, tensor: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        """Return a tensor in the form of the module's result."""
        if self.items is None:
            return tensor
        return tuple(tensor if is_tensor else None for is_tensor in self.items)

    def of_batch(self, features: Tensor, device: str | None) -> Tensor:
        """Return the tensor for a batch of samples, [batch · rows, ...], from their `features` [batch, width]."""
        shape = (features.shape[0] * self.rows, *self.shape)
        if self.start is None:
            if device is not None:
                return torch.empty(shape, dtype=self.dtype, device=device)
            return torch.zeros((), dtype=self.dtype, device=features.device).expand(shape)
        tensor = features[:, self.start : self.start + self.size].reshape(shape)
        return tensor if tensor.dtype == self.dtype else tensor.to(self.dtype)


@dataclass(frozen=True)
class Boundary:
    """The place where a network with kept features begins.

    Attributes:
        name: of the module whose outputs are the features.
        replaced: name of each module that is left out, that one last -> the outputs of its calls in a pass, in order.
        input: the samples; tokens are kept too, since masks and positions are computed from them.
        device: of outputs that are not kept: "meta", with a shape but no numbers, or None for that of the features.
    """

    name: str
    replaced: Mapping[str, tuple[Output, ...]]
    input: Output
    device: str | None = "meta"

    @property
    def kept(self) -> tuple[Output, ...]:
        """The outputs that are kept, in the order of their positions."""
        samples = () if self.input.start is None else (self.input,)
        return (*self.replaced[self.name], *samples)

    @property
    def width(self) -> int:
        """Numbers kept per sample."""
        return sum(output.size for output in self.kept)

    @property
    def dtype(self) -> torch.dtype:
        """Type of these numbers."""
        return self.replaced[self.name][0].dtype

    def apply(self, module: nn.Module) -> None:
        """Replace the modules that are left out by stand-ins; the module then takes features."""
        stand_ins = [
            StandIn(module.get_submodule(n), calls, self.device) for n, calls in self.replaced.items()
        ]
        for name, stand_in in zip(self.replaced, stand_ins, strict=True):
            module.set_submodule(name, stand_in)
        entrance = _Entrance(self, stand_ins)
        module.register_forward_pre_hook(entrance.begin, prepend=True)
        module.register_forward_hook(entrance.end, always_call=True)


@dataclass(frozen=True)
class _Entrance:
    """Passes the features of a batch to the stand-ins at the beginning of a pass; copied together with them."""

    boundary: Boundary
    stand_ins: Sequence[StandIn]

    def begin(self, _: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Return the samples for the network: tokens, or for other samples a placeholder of their shape."""
        (features,) = arguments
        for stand_in in self.stand_ins:
            stand_in.features, stand_in.turn = features, 0
        return (self.boundary.input.of_batch(features, self.boundary.device),)

    def end(self, *_: Any) -> None:
        """Forget the batch."""
        for stand_in in self.stand_ins:
            stand_in.features = None


class StandIn(nn.Module):
    """A module that returns precomputed outputs of another one."""

    def __init__(self, original: nn.Module, calls: Sequence[Output], device: str | None) -> None:
        super().__init__()
        # Not as a submodule: it does not run, but code around it may read the type of its weights, say.
        self.__dict__["original"] = original
        self.calls, self.device = tuple(calls), device
        self.features: Tensor | None = None
        self.turn = 0

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original."""
        if "original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["original"], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the original's output for this call of the pass and the samples of the pass.

        Raises:
            ModelError: it is called outside a pass of the whole network, or more often than the original was.
        """
        if self.features is None or self.turn >= len(self.calls):
            raise ModelError(
                "a frozen layer was called by itself, but the outputs of frozen layers were computed once and the "
                "layers were removed from the network; set engine.features=off"
            )
        call = self.calls[self.turn]
        self.turn += 1
        return call.like_returned(call.of_batch(self.features, self.device))


class _EnoughError(Exception):
    """Signals that all features have been computed."""


class FeatureExtractor:
    """The frozen layers of a network up to a boundary: samples -> features.

    Args:
        model: the whole network.
        boundary: where the rest begins.
        state: any state of the model; the features do not depend on it.
    """

    def __init__(self, model: Model, boundary: Boundary, state: State) -> None:
        self.model, self.boundary, self._state = model, boundary, state

    def on(self, device: torch.device) -> FeatureExtractor:
        """Return the same on a device."""
        state = {name: tensor.to(device) for name, tensor in self._state.items()}
        return FeatureExtractor(self.model.on(device), self.boundary, state)

    def __call__(self, x: Tensor) -> Tensor:
        """Return features [batch, width] of samples [batch, ...].

        They are float32 even if the rest computes in bfloat16, since they are computed only once.
        """
        boundary, tensors = self.boundary, list[Tensor]()
        calls = boundary.replaced[boundary.name]

        def note(_: nn.Module, __: Any, returned: Any) -> None:
            tensors.append(calls[len(tensors)].tensor(returned))
            if len(tensors) == len(calls):
                raise _EnoughError

        with torch.no_grad(), in_float32(), self.model.bound(self._state) as module:
            handle = module.get_submodule(boundary.name).register_forward_hook(note)
            try:
                with suppress(_EnoughError):
                    module(x)
            finally:
                handle.remove()
        if boundary.input.start is not None:
            tensors.append(x)
        return torch.cat([tensor.reshape(len(x), -1).to(boundary.dtype) for tensor in tensors], dim=1)


def find_boundary(model: Model, state: State, x: Tensor) -> Boundary:
    """Return the boundary of the features of a model's frozen layers, as its network declares it.

    Args:
        model: the network.
        state: of it; the boundary does not depend on it.
        x: some samples, [SAMPLES, ...].

    Raises:
        NoFeaturesError: nothing is frozen, the network declares no boundary, something trains or draws before it, or
            token ids cannot be kept exactly; the message gives the reason.
        ModelError: the declaration is wrong: names the module.
    """
    if not any(name in model.frozen for name, _ in model.module.named_parameters()):
        raise NoFeaturesError("nothing is frozen")
    declared = getattr(model.module, "feature_boundary", None)
    names = (declared,) if isinstance(declared, str) else tuple(declared or ())
    if not names:
        raise NoFeaturesError(f"a {type(model.module).__name__} declares no feature_boundary")
    modules = dict(model.module.named_modules())
    for name in names:
        if name not in modules or not name:
            raise _wrong(model, name, "it has no such module")
    calls = _traced(model, state, x)
    for name in names:
        if name not in calls:
            raise _wrong(model, name, "it does not run in a forward pass")
    for name in sorted(names, key=lambda name: calls[name].ends[-1], reverse=True):
        boundary = _boundary(model, calls, name, x)
        if boundary is not None:
            return _checked(model, state, x, boundary)
    raise NoFeaturesError(
        f"trained layers or layers that draw random numbers run before '{names[0]}' of its feature_boundary"
    )


class _Calls:
    """The calls of a module in a pass: what each returned, and when it ended."""

    def __init__(self) -> None:
        self.outputs: list[Output | None] = []
        self.ends: list[int] = []


def _traced(model: Model, state: State, x: Tensor) -> dict[str, _Calls]:
    """Return the calls of every module in a pass in evaluation mode."""
    calls: dict[str, _Calls] = {}
    clock = iter(range(1, 1 << 62))

    def noting(name: str) -> Callable[..., None]:
        def note(_: nn.Module, __: Any, returned: Any) -> None:
            of_module = calls.setdefault(name, _Calls())
            of_module.outputs.append(_output(returned, len(x)))
            of_module.ends.append(next(clock))

        return note

    with torch.no_grad(), model.bound(state) as module, ExitStack() as hooks:
        for name, part in module.named_modules():
            hooks.callback(part.register_forward_hook(noting(name)).remove)
        module(x)
    return calls


def _output(returned: Any, samples: int) -> Output | None:
    """Return the form of a call's result, or None if that cannot be kept sample by sample."""
    items = None
    if isinstance(returned, tuple | list):
        tensors = [item for item in returned if item is not None]
        if type(returned) not in (tuple, list) or len(tensors) != 1:
            return None
        items, returned = tuple(item is not None for item in returned), tensors[0]
    if not isinstance(returned, Tensor) or not returned.is_floating_point() or returned.dim() < 1:
        return None
    rows, remainder = divmod(returned.shape[0], samples)
    return Output(tuple(returned.shape[1:]), rows, returned.dtype, items) if rows and not remainder else None


def _boundary(model: Model, calls: Mapping[str, _Calls], name: str, x: Tensor) -> Boundary | None:
    """Return the boundary after a module; None if something before it trains or draws, or nothing is frozen.

    Raises:
        ModelError: the module's output cannot be kept sample by sample.
        NoFeaturesError: token ids cannot be kept exactly in the features' type.
    """
    if None in calls[name].outputs:
        raise _wrong(
            model, name, "it does not return one tensor of real numbers with one or several rows per sample"
        )
    before = _before(model.module, calls, name)
    moving = {path for holders in model.live_places.values() for path, _ in holders}
    moving |= {path for path, part in model.module.named_modules() if _draws(part)}
    if any(f"{path}.".startswith(f"{front}.") for path in moving for front in before):
        return None
    parts = [model.module.get_submodule(front) for front in before]
    if not any(True for part in parts for _ in part.parameters()):
        return None
    outputs = {n: tuple(o for o in calls[n].outputs if o is not None) for n in before}
    replaced = {
        n: module_outputs
        for n, module_outputs in outputs.items()
        if len(module_outputs) == len(calls[n].outputs)
    }
    end, placed = 0, []
    for output in replaced.pop(name):
        placed.append(output._replace(start=end))
        end += output.size
    tokens = not x.is_floating_point()
    samples = Output(tuple(x.shape[1:]), 1, x.dtype, None, end if tokens else None)
    boundary = Boundary(name, {**replaced, name: tuple(placed)}, samples)
    if tokens and (int(x.max()) > LARGEST_ID or torch.finfo(boundary.dtype).bits < 32):
        raise NoFeaturesError(f"token ids cannot be kept as {boundary.dtype}")
    return boundary


def _before(module: nn.Module, calls: Mapping[str, _Calls], name: str) -> list[str]:
    """Return the outermost modules whose first and last call end no later than those of module `name`, itself too."""
    before: list[str] = []
    first, last = calls[name].ends[0], calls[name].ends[-1]

    def walk(part: nn.Module, path: str) -> None:
        for leaf, child in part.named_children():
            child_path = f"{path}.{leaf}" if path else leaf
            around = name.startswith(f"{child_path}.")
            ends = calls[child_path].ends if child_path in calls else [last + 1]
            if ends[0] <= first and ends[-1] <= last and not around:
                before.append(child_path)
            else:
                walk(child, child_path)

    walk(module, "")
    return before


def _draws(part: nn.Module) -> bool:
    """Return whether a module draws random numbers in training."""
    return isinstance(part, Keyed) and not (isinstance(part, nn.Dropout) and part.p == 0)


def _checked(model: Model, state: State, x: Tensor, boundary: Boundary) -> Boundary:
    """Return the boundary, with outputs that are not kept as cheap as the network allows.

    Raises:
        NoFeaturesError: layers before it depend on parameters that train.
        ModelError: the rest of the network gives other outputs than the whole network.
    """
    problem = ""
    # Some networks calculate with outputs that are not used in the end, which needs numbers.
    for device in ("meta", None):
        tried = replace(boundary, device=device)
        try:
            if _agree(model, state, state, x, tried):
                break
            problem = "the rest of the network reads more than its output"
        except Exception as error:  # a user's network may raise anything when only a part of it runs
            first = str(error).partition("\n")[0]
            problem = f"the rest of the network cannot run alone ({type(error).__name__}: {first})"
    else:
        raise _wrong(model, boundary.name, problem)
    if not _agree(model, state, _disturbed(state, model.parameters), x, tried):
        raise NoFeaturesError(f"trained parameters are read before '{boundary.name}', its feature_boundary")
    return tried


def _wrong(model: Model, name: str, problem: str) -> ModelError:
    return ModelError(
        f"the attribute feature_boundary of a {type(model.module).__name__} names '{name}', but {problem}; name a "
        "module whose output is all that the rest of the network needs, or set engine.features=off"
    )


def _agree(model: Model, state: State, values: State, x: Tensor, boundary: Boundary) -> bool:
    """Return whether the network from a boundary on gives the same as the whole one, in both modes, with `values`."""
    tail, features = model.from_features(boundary.apply), FeatureExtractor(model, boundary, state)(x)
    with torch.no_grad():
        pairs = [(_trained(model, values, x), _trained(tail, values, features))]
        for part in (slice(None), slice(0, 2)):
            pairs.append((_evaluated(model, values, x[part]), _evaluated(tail, values, features[part])))
    return all(_same(expected, cut) for expected, cut in pairs)


def _evaluated(model: Model, state: State, x: Tensor) -> list[Tensor]:
    """Return outputs, and features if the model has them."""
    outputs, features = model.with_features(state, x)
    try:
        return [outputs, features()]
    except ModelError:
        return [outputs]


def _trained(model: Model, state: State, x: Tensor) -> list[Tensor]:
    """Return outputs in training mode, and running statistics after the pass."""
    values = {n: t.clone() for n, t in state.items()}
    with dropout_key(torch.tensor(1)) if model.has_dropout else nullcontext():
        outputs = model.forward_train(values, x, frozenset(model.parameters))
    return [outputs, *(values[n] for n in model.buffers)]


def _same(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> bool:
    """Return whether tensors are equal up to rounding."""
    if [t.shape for t in expected] != [t.shape for t in actual]:
        return False
    for a, b in zip(expected, actual, strict=True):
        distance, size = (float(t.abs().max()) if t.numel() else 0.0 for t in (a - b, a))
        if not distance <= TOLERANCE * max(size, TOLERANCE):  # NaN is never the same
            return False
    return True


def _disturbed(state: State, parameters: Sequence[str]) -> dict[str, Tensor]:
    """Return a state near another one: parameters with added noise, statistics of norms increased a little."""
    generator = torch.Generator().manual_seed(0)
    disturbed = {}
    for name, tensor in state.items():
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        size = float(tensor.abs().mean()) if tensor.numel() and tensor.is_floating_point() else 0.0
        if not tensor.is_floating_point():
            disturbed[name] = tensor
        elif name in parameters:
            disturbed[name] = tensor + DISTURBED * max(size, DISTURBED) * noise
        else:
            disturbed[name] = tensor * (1 + DISTURBED * noise.abs())
    return disturbed
