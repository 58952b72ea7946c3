"""Finds where a network can be cut: what is frozen and depends on the sample alone, and what the rest reads of it.

Nothing is known of a network but its modules. One pass tells which modules hold nothing that trains, draw nothing and
see only what such modules made: autograd marks what depends on trained tensors. They are left out, the outermost ones.
A pass in which one output after another is not a number tells which of them the rest reads. What comes out is compared
with the whole network, in evaluation and in training, at another state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tailorfl.errors import ModelError
from tailorfl.models.cut import Cut, Output
from tailorfl.models.dropout import Keyed, dropout_key
from tailorfl.models.front import Front
from tailorfl.models.functional import Model
from tailorfl.models.layers import head_name

SAMPLES = 5
"""A network is looked at with so many: a number that few other axes have."""
LARGEST_ID = 2**24
"""Whole numbers up to here are exact as float32, as which token ids are kept."""
LEAST_SHARE = 0.2
"""Of the products of a forward pass that must be saved."""
NARROWER, CHEAPER = 0.5, 0.25
"""Layers of a block are computed anew if so few numbers are then kept, and no larger share of what is saved is lost."""
TOLERANCE = 1e-4
"""Of the largest output; a cut at the wrong place differs by as much as the outputs themselves."""
DISTURBED = 0.1
"""How far the state of that comparison is from the given one, in units of a tensor's mean size."""

State = Mapping[str, Tensor]


class NoCut(Exception):
    """Why a network is not cut."""


@dataclass
class _Calls:
    """The calls of one module in a pass."""

    outputs: list[Output] = field(default_factory=list)
    products: int = 0
    is_still: bool = True
    """Every output is a tensor with a row or more a sample, and depends on frozen tensors and samples alone."""


def find_cut(model: Model, state: State, x: Tensor) -> Cut:
    """Returns where the frozen front of a model ends.

    Args:
        model: the network.
        state: of it; the cut does not depend on it.
        x: some samples, [SAMPLES, ...].

    Raises:
        NoCut: it has no front that is worth it, or the rest does not give what the whole network gives; says which.
    """
    if not any(name in model.frozen for name, _ in model.module.named_parameters()):
        raise NoCut("nothing is frozen")
    try:
        return _found(model, state, x)
    except NoCut:
        raise
    except Exception as error:  # of code that nobody here has written, run in parts
        first = str(error).partition("\n")[0]
        raise NoCut(
            f"a part of the network does not run by itself ({type(error).__name__}: {first})"
        ) from error


def _found(model: Model, state: State, x: Tensor) -> Cut:
    calls, total = _traced(model, state, x)
    module = model.module
    chosen = _still_ones(module, calls)
    cut = _needed(model, state, x, calls, chosen, total)
    if cut.share < LEAST_SHARE:
        raise NoCut(
            f"what is frozen before the first layer that trains takes {cut.share:.0%} of a forward pass"
        )
    for frame in _frames(module, chosen):
        outside = [name for name in chosen if not name.startswith(f"{frame}.")]
        if _share(calls, outside, total) < (1 - CHEAPER) * cut.share or len(outside) == len(chosen):
            continue
        narrower = _needed(model, state, x, calls, outside, total)
        if narrower.width <= NARROWER * cut.width:
            chosen, cut = outside, narrower
    return _checked(model, state, x, cut)


def _traced(model: Model, state: State, x: Tensor) -> tuple[dict[str, _Calls], int]:
    """What every module does in a pass in evaluation mode, and all products of the pass."""
    calls: dict[str, _Calls] = {}
    live = {path for places in model.live_places.values() for path, _ in places}
    values = {
        n: t.detach().clone().requires_grad_(t.is_floating_point() and n in model.parameters)
        for n, t in state.items()
    }
    with (
        torch.enable_grad(),
        model.bound(values) as module,
        FlopCounterMode(display=False) as counter,
        ExitStack() as hooks,
    ):
        begun: list[int] = []

        def before(_: nn.Module, __: Any) -> None:
            begun.append(counter.get_total_flops())

        def after(name: str, part: nn.Module, made: Any) -> Any:
            own = calls.setdefault(name, _Calls())
            own.products += counter.get_total_flops() - begun.pop()
            output = _output(made, len(x))
            if output is None or output.tensor(made).requires_grad:
                own.is_still = False
            else:
                own.outputs.append(output)
            if (name in live or draws(part)) and isinstance(made, Tensor) and made.is_floating_point():
                return made if made.requires_grad else made.detach().requires_grad_()
            return None

        for name, part in module.named_modules():
            hooks.callback(part.register_forward_pre_hook(before).remove)
            hooks.callback(part.register_forward_hook(_of(after, name)).remove)
        module(x)
    for name in [*calls]:
        inside = [n for n in live if n == name or n.startswith(f"{name}.")]
        if inside or any(draws(part) for part in model.module.get_submodule(name).modules()):
            calls[name].is_still = False
    return calls, counter.get_total_flops()


def _of(after: Any, name: str) -> Any:
    return lambda part, _, made: after(name, part, made)


def draws(part: nn.Module) -> bool:
    """Whether a module draws random numbers in training."""
    return isinstance(part, Keyed) and not (isinstance(part, nn.Dropout) and part.p == 0)


def _output(made: Any, samples: int) -> Output | None:
    """What a call returned, or None where that cannot be kept sample by sample."""
    items = None
    if isinstance(made, tuple | list):
        if type(made) not in (tuple, list) or sum(one is not None for one in made) != 1:
            return None
        items = tuple(one is not None for one in made)
        (made,) = (one for one in made if one is not None)
    if not isinstance(made, Tensor) or not made.is_floating_point() or made.dim() < 1:
        return None
    rows, rest = divmod(made.shape[0], samples)
    return Output(tuple(made.shape[1:]), rows, made.dtype, items) if rows and not rest else None


def _shared_modules(module: nn.Module) -> set[str]:
    """Names of modules that stand at several places."""
    places: dict[int, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        places.setdefault(id(part), []).append(name)
    return {name for names in places.values() if len(names) > 1 for name in names}


def _still_ones(module: nn.Module, calls: Mapping[str, _Calls]) -> list[str]:
    """Names of the outermost modules that can be left out; of the head methods may ask what goes into it."""
    found: list[str] = []
    needed = _shared_modules(module) | {head_name(module)}

    def walk(part: nn.Module, path: str) -> None:
        for leaf, child in part.named_children():
            name = f"{path}.{leaf}" if path else leaf
            inside = any(n == name or str(n).startswith(f"{name}.") for n in needed)
            if name in calls and calls[name].is_still and not inside:
                found.append(name)
            else:
                walk(child, name)

    walk(module, "")
    return found


def _frames(module: nn.Module, chosen: Sequence[str]) -> Iterable[str]:
    """The modules around those that are left out, outer ones first."""
    around = {name.rsplit(".", k)[0] for name in chosen for k in range(1, name.count(".") + 1)}
    return sorted(around, key=lambda name: name.count("."))


def _share(calls: Mapping[str, _Calls], chosen: Iterable[str], total: int) -> float:
    return sum(calls[name].products for name in chosen) / max(total, 1)


def _needed(
    model: Model, state: State, x: Tensor, calls: Mapping[str, _Calls], chosen: Sequence[str], total: int
) -> Cut:
    """The cut before which `chosen` modules stand, and what the rest reads of their outputs and of the samples.

    Raises:
        NoCut: the rest cannot be run without them.
    """
    share, given = _share(calls, chosen, total), Output(tuple(x.shape[1:]), 1, x.dtype, None)
    if not share:
        raise NoCut("no layer that multiplies is frozen before the first one that trains")
    everything = Cut({name: tuple(calls[name].outputs) for name in chosen}, given, None, share)
    every = [(name, k) for name in chosen for k in range(len(calls[name].outputs))]
    full = _placed(everything, [*every, None])
    row = Front(model, full, state)(x[:1]).expand(len(every) + 1, -1).clone()
    tokens = not x.is_floating_point()
    for poisoned, one in zip(row, _outputs(full, [*every, None]), strict=True):
        assert one.start is not None
        if one is not full.input or not tokens:
            poisoned[one.start : one.start + one.size] = math.nan
    with torch.no_grad():
        read = model.cut_at(full)(state, row).isnan().flatten(1).any(1).tolist()
    wanted = [place for place, is_read in zip([*every, None], read, strict=True) if is_read]
    if all(place is None for place in wanted):
        raise NoCut("nothing after its frozen layers reads what they give out")
    if tokens and None not in wanted:  # ids cannot be no number; masks and lengths are made of them
        wanted.append(None)
    return _placed(everything, wanted)


def _outputs(cut: Cut, places: Iterable[tuple[str, int] | None]) -> list[Output]:
    return [cut.input if place is None else cut.replaced[place[0]][place[1]] for place in places]


def _placed(cut: Cut, wanted: Sequence[tuple[str, int] | None]) -> Cut:
    """The cut that keeps these outputs alone, (module, number of its call), or None for the samples."""
    starts: dict[tuple[str, int] | None, int] = {}
    end = 0
    for place, one in zip(wanted, _outputs(cut, wanted), strict=True):
        starts[place], end = end, end + one.size
    replaced = {
        name: tuple(one._replace(start=starts.get((name, k))) for k, one in enumerate(calls))
        for name, calls in cut.replaced.items()
    }
    return replace(cut, replaced=replaced, input=cut.input._replace(start=starts.get(None)))


def _checked(model: Model, state: State, x: Tensor, cut: Cut) -> Cut:
    """Returns the cut, with outputs that nobody reads as cheap as the network allows.

    Raises:
        NoCut: the rest does not give what the whole network gives.
    """
    if not x.is_floating_point() and (int(x.max()) > LARGEST_ID or torch.finfo(cut.dtype).bits < 32):
        raise NoCut(f"token ids cannot be kept as {cut.dtype}")
    try:
        light = replace(cut, device="meta")
        _compare(model, state, x, light)
        return light
    except (RuntimeError, NoCut):  # something is calculated with what nobody reads in the end
        _compare(model, state, x, cut)
        return cut


def _compare(model: Model, state: State, x: Tensor, cut: Cut) -> None:
    """Nothing if cut and whole network agree on samples, in both modes, near a state; raises NoCut."""
    tail, kept, values = model.cut_at(cut), Front(model, cut, state)(x), _disturbed(state, model.parameters)
    with torch.no_grad():
        _same(_trained(model, values, x), _trained(tail, values, kept))
        for part in (slice(None), slice(0, 2)):
            _same(_evaluated(model, values, x[part]), _evaluated(tail, values, kept[part]))


def _evaluated(model: Model, state: State, x: Tensor) -> list[Tensor]:
    """Outputs, and features where it has them."""
    outputs, features = model.with_features(state, x)
    try:
        return [outputs, features()]
    except ModelError:
        return [outputs]


def _trained(model: Model, state: State, x: Tensor) -> list[Tensor]:
    """Outputs in training mode, and running statistics after the pass."""
    own = {n: t.clone() for n, t in state.items()}
    with dropout_key(torch.tensor(1)) if model.has_dropout else nullcontext():
        outputs = model.forward_train(own, x, frozenset(model.parameters))
    return [outputs, *(own[n] for n in model.buffers)]


def _same(whole: Sequence[Tensor], cut: Sequence[Tensor]) -> None:
    if [t.shape for t in whole] != [t.shape for t in cut]:
        raise NoCut("without its frozen front the network gives outputs of other shapes")
    for a, b in zip(whole, cut, strict=True):
        apart = float((a - b).abs().max()) if a.numel() else 0.0
        if not apart <= TOLERANCE * max(float(a.abs().max()) if a.numel() else 0.0, TOLERANCE):
            raise NoCut("without its frozen front the network gives other outputs")


def _disturbed(state: State, parameters: Sequence[str]) -> dict[str, Tensor]:
    """A state near another one: parameters moved by noise, statistics of norms made a little larger."""
    drawn = torch.Generator().manual_seed(0)
    out = {}
    for name, tensor in state.items():
        noise = torch.randn(tensor.shape, generator=drawn).to(tensor)
        size = float(tensor.abs().mean()) if tensor.numel() and tensor.is_floating_point() else 0.0
        if not tensor.is_floating_point():
            out[name] = tensor
        elif name in parameters:
            out[name] = tensor + DISTURBED * max(size, DISTURBED) * noise
        else:
            out[name] = tensor * (1 + DISTURBED * noise.abs())
    return out
