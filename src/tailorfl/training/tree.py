"""TensorDict functions that TensorDict itself lacks: merging parts, norms, inner products, weighted means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.errors import first_few

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of every leaf, by path."""


def empty() -> TensorDict:
    """Return an empty TensorDict: the message or state of a method that has none."""
    return TensorDict({}, batch_size=[])


def merge(*parts: TensorDict) -> TensorDict:
    """Return one TensorDict with the entries of all `parts`; on equal names the last wins.

    Tensors are not copied.
    """
    out: dict[str, Tensor] = {}
    for part in parts:
        out.update(tensors(part))
    return TensorDict(out, batch_size=parts[0].batch_size if parts else [])


def tensors(flat: TensorDict) -> dict[str, Tensor]:
    """Return the entries of a TensorDict that has no nested parts as a dict; tensors are not copied."""
    return cast(dict[str, Tensor], dict(flat.items()))


def leaves(tree: TensorDict) -> Iterable[tuple[str, Tensor]]:
    """Yield (path, tensor) of every leaf; keys of nested parts are joined by '/'."""
    for key, value in tree.items():
        if isinstance(value, TensorDict):
            for inner, tensor in leaves(value):
                yield f"{key}/{inner}", tensor
        else:
            yield str(key), cast(Tensor, value)


def precision(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype for calculations with these tensors: float64 if one of them is, else float32."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def shapes(flat: Iterable[tuple[str, Tensor]], axes: int = 0) -> Shapes:
    """Return the shapes and dtypes of leaves, without their first `axes` axes."""
    return {path: (tuple(tensor.shape[axes:]), tensor.dtype) for path, tensor in flat}


def unlike(found: Shapes, wanted: Shapes) -> str:
    """Return how `found` differs, such as "lacks a, has b of shape [3] and not [4]"; "" if it does not."""
    differences = [f"lacks {path}" for path in wanted if path not in found]
    differences += [f"has {path} beside" for path in found if path not in wanted]
    for path, (shape, dtype) in found.items():
        expected, kind = wanted.get(path, (shape, dtype))
        if shape != expected:
            differences.append(f"has {path} of shape {list(shape)} and not {list(expected)}")
        elif dtype != kind:
            differences.append(f"has {path} of {dtype} and not {kind}")
    return first_few(differences, 5)


def nest(flat: Iterable[tuple[str, Tensor]], batch_size: Iterable[int] = ()) -> TensorDict:
    """Return the TensorDict whose `leaves` are `flat`."""
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    out: dict[str, Tensor | TensorDict] = {}
    for path, tensor in flat:
        head, _, inner = path.partition("/")
        if inner:
            groups.setdefault(head, []).append((inner, tensor))
        else:
            out[head] = tensor
    size = list(batch_size)
    for head, items in groups.items():
        out[head] = nest(items, size)
    return TensorDict(out, batch_size=size)


def fill(template: TensorDict, flat: Mapping[str, Tensor], prefix: str = "") -> TensorDict:
    """Return a TensorDict with the structure of `template`, including empty parts, and `flat`'s tensors by path.

    Tensors of `flat` that `template` does not have are added.
    """
    out: dict[str, Tensor | TensorDict] = {}
    for key, value in template.items():
        path = f"{prefix}{key}"
        out[key] = fill(value, flat, f"{path}/") if isinstance(value, TensorDict) else flat[path]
    here = ((p.removeprefix(prefix), t) for p, t in flat.items() if p.startswith(prefix))
    added = nest([(p, t) for p, t in here if p.partition("/")[0] not in out], template.batch_size)
    return TensorDict({**out, **dict(added.items())}, batch_size=template.batch_size)


def contiguous(tree: TensorDict) -> TensorDict:
    """Return `tree` with every tensor contiguous, copying only those that are not.

    Sums over a transposed tensor and over its copy round differently, and a checkpoint keeps values, not layouts.
    """
    out = {k: contiguous(v) if isinstance(v, TensorDict) else v.contiguous() for k, v in tree.items()}
    return TensorDict(out, batch_size=tree.batch_size)


def dot(a: TensorDict, b: TensorDict) -> Tensor:
    """Return the inner product over the floating entries of `a`, a 0-d tensor."""
    terms = [(x * b.get(name)).sum() for name, x in a.items() if x.is_floating_point()]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def norm(a: TensorDict) -> Tensor:
    """Return the Euclidean norm over all floating entries, a 0-d tensor."""
    return dot(a, a).sqrt()


def choose(which: Tensor, a: TensorDict, b: TensorDict) -> TensorDict:
    """Return `a` if the 0-d boolean tensor `which` is true, else `b`; both have the same, not nested, entries."""
    return TensorDict({name: torch.where(which, tensor, b.get(name)) for name, tensor in tensors(a).items()})


def weighted_mean(stack: TensorDict, weights: Tensor) -> TensorDict:
    """Return Σ_i weights[i]·stack[i] over the leading axis.

    `weights` [clients] sums to 1. Integer entries (counters) are taken from the first client.
    """
    out: dict[str, Tensor | TensorDict] = {}
    for name, value in stack.items():
        if isinstance(value, TensorDict):
            out[name] = weighted_mean(value, weights)
            continue
        tensor = cast(Tensor, value)
        if tensor.is_floating_point():
            out[name] = torch.tensordot(weights.to(tensor.dtype), tensor, dims=1)
        else:
            out[name] = tensor[0]
    return TensorDict(out, batch_size=[])
