"""Where the product of LoRA's factors can be added to the weight beside them: W + s B A in the place of both.

A layer is one of peft, or a module that holds modules `lora_A` and `lora_B` beside one linear layer; `scaling`, where
it has that attribute, is its s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tailorfl.errors import ModelError
from tailorfl.models.selectors import FACTORS


class Merge(NamedTuple):
    """The names of a layer's factors and of the weight beside them, and how their product is added to it."""

    a: str
    """[r, in]"""
    b: str
    """[out, r]"""
    base: str
    """[out, in], or [in, out] where it is `turned`."""
    scale: float
    """s"""
    turned: bool
    layer: str
    """The module that holds all of them."""

    def sides(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return (left, right), rows of which `leftᵀ @ right` is what W gains.

        `a` [rows, in] are rows of A, `b` [rows, out] columns of B.
        """
        return (a, b * self.scale) if self.turned else (b * self.scale, a)


def merges(module: nn.Module) -> tuple[Merge, ...]:
    """Return every layer of a network whose factors can be merged.

    Raises:
        ModelError: a layer has factors, and not one weight beside them.
    """
    result = []
    for name, _ in module.named_parameters():
        parts = name.split(".")
        if "lora_A" not in parts or parts[-1] != "weight":
            continue
        at = parts.index("lora_A")
        path = ".".join(parts[:at])
        owner: Any = module.get_submodule(path)
        scale = getattr(owner, "scaling", 1.0)
        if isinstance(scale, dict):  # peft has one for each set of factors
            scale = scale[parts[at + 1]]
        base = ".".join(filter(None, (path, _beside(owner, path), "weight")))
        turned = bool(getattr(owner, "fan_in_fan_out", False))
        result.append(Merge(name, name.replace("lora_A", "lora_B"), base, float(scale), turned, path))
    return tuple(result)


def _beside(owner: nn.Module, path: str) -> str:
    """Return the name of the layer beside the factors."""
    if hasattr(owner, "base_layer"):  # peft
        return "base_layer"
    linear = [n for n, part in owner.named_children() if isinstance(part, nn.Linear) and n not in FACTORS]
    if len(linear) != 1:
        raise ModelError(
            f"the factors of LoRA in '{path}' can be merged where one linear layer stands beside them, but there are "
            f"{len(linear)}"
        )
    return linear[0]


def check_merges(module: nn.Module, merge_list: Sequence[Merge]) -> None:
    """Nothing if layers say the same of some inputs with their factors, and with these merged.

    Raises:
        ModelError: one does not; names it.
    """
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    for merge in merge_list:
        owner = module.get_submodule(merge.layer)
        a, base = tensors[merge.a].detach(), tensors[merge.base].detach()
        draw = torch.Generator().manual_seed(0)
        b = torch.randn(tensors[merge.b].shape, generator=draw).to(a)
        x = torch.randn(2, a.shape[1], generator=draw).to(base)
        left_rows, right = merge.sides(a, b.T)
        factors = {merge.b: b}
        merged = {merge.b: b * 0, merge.base: base + (left_rows.T @ right).to(base)}
        training = owner.training
        owner.eval()
        try:
            with torch.no_grad():
                separate, together = (
                    functional_call(
                        owner, {n[len(merge.layer) + bool(merge.layer) :]: t for n, t in s.items()}, (x,)
                    )
                    for s in (factors, merged)
                )
        finally:
            owner.train(training)
        near = 1e-3 if base.dtype in (torch.float32, torch.float64) else 0.05
        if float((separate - together).abs().max()) > near * float(separate.abs().max().clamp(min=1)):
            raise ModelError(
                f"the layer '{merge.layer}' is not W x + {merge.scale:g} B A x with the weight '{merge.base}', so what "
                "clients train cannot be merged into that weight; take plain LoRA, of linear layers, or another method"
            )
