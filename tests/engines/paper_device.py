"""A device on paper: tensors that say they are on `paper:0`, calculate on the CPU, and refuse to meet CPU tensors.

It is a Python backend of torch, so code under test takes the same paths as for a GPU: what was not moved there is found
by an error, and what comes out can be compared with the CPU to the bit. Registering a backend cannot be undone, so this
is imported in processes of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("paper")
PAPER = torch.device("paper", 0)


class OnPaper(Tensor):
    """A tensor on paper; `raw` is the CPU tensor that it stands for."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> OnPaper:
        made: OnPaper = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=PAPER,
        )
        made.raw = raw
        return made

    def data_ptr(self) -> int:
        """That of the tensor it stands for."""
        return self.raw.data_ptr()

    def __repr__(self) -> str:
        return f"OnPaper({self.raw})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


MOVES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
PUT = {
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten._index_put_impl_.default,
}
"""(tensor, indices, values, ...)"""
INDEXED = {torch.ops.aten.index.Tensor, *PUT}
"""A GPU takes indices on the host, too; values that are put must be where they are put to."""


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU tensors behind those on paper."""
    flat = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    paper = [t for t in flat if isinstance(t, OnPaper)]
    target = kwargs.get("device")
    if func not in MOVES and func not in INDEXED and paper:
        strays = [t for t in flat if not isinstance(t, OnPaper) and t.dim() > 0 and t.device.type == "cpu"]
        if strays:
            shapes = [tuple(t.shape) for t in strays]
            raise RuntimeError(f"{func} of tensors on paper and CPU tensors of shapes {shapes}")
    if func in INDEXED and not isinstance(args[0], OnPaper) and any(isinstance(t, OnPaper) for t in args[1]):
        raise RuntimeError(f"{func} of a CPU tensor with indices on paper")
    if func in PUT and isinstance(args[0], OnPaper) != isinstance(args[2], OnPaper) and args[2].dim() > 0:
        raise RuntimeError(f"{func} of values {tuple(args[2].shape)} that are not where they are put to")
    new = torch.device(target).type == "paper" if target is not None else None
    stays = bool(paper) if new is None else new
    if func is torch.ops.aten.copy_.default:
        stays = isinstance(args[0], OnPaper)
    if target is not None and new:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    bare = lambda t: t.raw if isinstance(t, OnPaper) else t  # noqa: E731
    raw_args, raw_kwargs = pytree.tree_map(bare, (args, kwargs))
    out = func(*raw_args, **raw_kwargs)
    known = {id(t.raw): t for t in paper}
    wrap = lambda t: known.get(id(t), OnPaper(t)) if isinstance(t, Tensor) and stays else t  # noqa: E731
    return pytree.tree_map(wrap, out)


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    return dispatch(op, args, kwargs)


def _tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    return _plain(data, dtype=dtype, device="cpu").to(
        torch.get_default_device() if device is None else device
    )


# torch.tensor copies below the level at which a backend written in Python is asked.
_plain, torch.tensor = torch.tensor, _tensor  # type: ignore[assignment]

LIBRARY = torch.library.Library("_", "IMPL")
LIBRARY.fallback(_fallback, "PrivateUse1")
