"""Low-rank adaptation of linear layers (Hu et al., ICLR 2022), with the layers of the package peft.

    y = W x + (alpha / r) · B A dropout(x)      A [r, in] Kaiming-uniform, B [out, r] zero, W frozen

The number of scalars is the sum over the adapted layers of r (in + out): 4 194 304 for LLaMA-7B with r = 8 on queries
and values.

A client may have only the first ranks: y = W x + s B (m ⊙ A x), m its vector of 0 and a scale. Cut-off rows of A and
columns of B then contribute nothing to the outputs and get no gradient, so clients of different ranks have tensors of
one shape and train side by side.

The product of the factors can be merged into the weight of the layer: W + s B A. The layer is then one of peft, or a
module that holds modules `lora_A` and `lora_B` and one linear layer; its s is the attribute `scaling`, 1 if it has
none.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

from tailorfl.errors import ModelError, needs_extra
from tailorfl.printable import shown

FACTORS = ("lora_A", "lora_B")
"""Names of the modules in which peft holds the factors of LoRA."""
QUERY_VALUE = (("query", "value"), ("q_proj", "v_proj"), ("q_lin", "v_lin"), ("q", "v"))
"""Names of the two projections in families of models."""
FUSED = ("qkv", "c_attn", "query_key_value", "qkv_proj", "Wqkv", "in_proj")
"""Names of layers that hold query, key and value in one."""


def linear_layers(module: nn.Module) -> dict[str, int]:
    """Return dotted name -> number of outputs of the linear layers, in the order in which they were registered."""
    return {
        name: part.weight.shape[0] if isinstance(part, nn.Linear) else int(part.nf)
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) or (type(part).__name__ == "Conv1D" and hasattr(part, "nf"))
    }


def candidates(module: nn.Module) -> str:
    """Return one line for error messages: the linear layers by the last part of their names, with counts."""
    counts = Counter(name.rpartition(".")[2] for name in linear_layers(module))
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "none"


def find_targets(base: nn.Module, endings: Sequence[str] | None = None) -> list[str]:
    """Return the names of the linear layers to adapt: those that end in one of `endings`, or all queries and values.

    Raises:
        ModelError: a name of `endings`, or every known pair of query and value, is missing; lists the layers.
    """
    names = list(linear_layers(base))
    if endings is not None:
        if isinstance(endings, str) or not endings:
            raise ModelError(f"lora_targets is a list of names such as [query, value], got {shown(endings)}.")
        ends = {end: [n for n in names if n == end or n.endswith(f".{end}")] for end in endings}
        if absent := [end for end, matching in ends.items() if not matching]:
            raise ModelError(
                f"no linear layer ends in {', '.join(map(repr, absent))}; lora_targets may name: {candidates(base)}."
            )
        return [n for n in names if any(n in matching for matching in ends.values())]
    for pair in QUERY_VALUE:
        owners = [{n.rpartition(".")[0] for n in names if n.rpartition(".")[2] == end} for end in pair]
        if both := owners[0] & owners[1]:
            return [n for n in names if n.rpartition(".")[0] in both and n.rpartition(".")[2] in pair]
    fused = sorted({n.rpartition(".")[2] for n in names} & set(FUSED))
    reason = (
        f"{', '.join(fused)} hold query, key and value in one layer, so adapting it would also adapt the keys"
        if fused
        else "no linear layers are named like queries and values"
    )
    raise ModelError(
        f"LoRA's usual targets are not in a {type(base).__name__}: {reason}. Name layers with lora_targets: "
        f"{candidates(base)}."
    )


def inject_lora(
    base: nn.Module, rank: int, alpha: float, dropout: float, target_names: Sequence[str] | None = None
) -> None:
    """Wrap the target layers of a base in place; the outputs do not change until B is trained.

    Raises:
        MissingExtraError: peft is not installed.
        ModelError: a number is invalid, or targets are missing.
    """
    if rank < 1 or not 0 <= dropout < 1:
        raise ModelError(
            f"LoRA needs a rank of at least 1 and a dropout in [0, 1), got {rank} and {dropout}."
        )
    targets = find_targets(base, target_names)
    with needs_extra("peft", "text"):
        peft: Any = importlib.import_module("peft")
    # The other kind of linear layer (Conv1D) holds its weight transposed.
    turned = any(not isinstance(base.get_submodule(name), nn.Linear) for name in targets)
    settings = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, fan_in_fan_out=turned
    )
    peft.inject_adapter_in_model(settings, base)


def lora_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of the module that LoRA wraps."""
    loaded: Any = sys.modules.get("peft.tuners.lora")
    return [] if loaded is None else [part for part in module.modules() if isinstance(part, loaded.LoraLayer)]


def lora_parts(module: nn.Module) -> list[nn.Module]:
    """Return the modules that hold A and B."""
    layers: list[Any] = list(lora_layers(module))
    parts = [getattr(layer, name) for layer in layers for name in layer.adapter_layer_names]
    return [part for part in parts if isinstance(part, nn.Module)]


KEPT = "kept"
"""Name of m."""


class RankedUp(nn.Module):
    """The factor B of LoRA, applied after a vector m over its ranks."""

    kept: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer(KEPT, torch.ones_like(weight[0]).detach())

    def forward(self, h: Tensor) -> Tensor:
        """[..., r] -> [..., out]."""
        return linear(h * self.kept, self.weight)


def add_ranks(module: nn.Module) -> None:
    """Turn every factor B of LoRA in a network into a `RankedUp` with m = 1, in place: no output changes."""
    factors = {
        path: part
        for path, part in module.named_modules()
        if isinstance(part, nn.Linear) and "lora_B" in path.split(".")
    }
    for path, part in factors.items():
        module.set_submodule(path, RankedUp(part.weight))


def fold_ranks(module: nn.Module) -> None:
    """Turn every `RankedUp` into the linear layer B · diag(m), in place: no output changes."""
    ranked = {path: part for path, part in module.named_modules() if isinstance(part, RankedUp)}
    for path, part in ranked.items():
        plain = nn.Linear(part.weight.shape[1], part.weight.shape[0], bias=False, device="meta")
        plain.weight = nn.Parameter((part.weight * part.kept).detach(), requires_grad=False)
        module.set_submodule(path, plain)


def is_kept(name: str, tensor: Tensor, module: nn.Module) -> bool:
    """Return whether a tensor is a vector m; a selector."""
    return isinstance(module, RankedUp) and name.rpartition(".")[2] == KEPT


class Merge(NamedTuple):
    """The names of a layer's factors and of its weight, and how their product is added to it."""

    a: str
    """[r, in]"""
    b: str
    """[out, r]"""
    base: str
    """[out, in], or [in, out] if it is `turned`."""
    scale: float
    """s"""
    turned: bool
    layer: str
    """The module that holds all of them."""

    def sides(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return (left, right), such that `leftᵀ @ right` is added to W.

        `a` [rows, in] are rows of A, `b` [rows, out] columns of B.
        """
        return (a, b * self.scale) if self.turned else (b * self.scale, a)


def merges(module: nn.Module) -> tuple[Merge, ...]:
    """Return every layer of a network whose factors can be merged.

    Raises:
        ModelError: a layer has factors, but not exactly one linear layer with them.
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
    """Return the name of the linear layer that belongs to the factors."""
    if hasattr(owner, "base_layer"):  # peft
        return "base_layer"
    linear = [n for n, part in owner.named_children() if isinstance(part, nn.Linear) and n not in FACTORS]
    if len(linear) != 1:
        raise ModelError(
            f"the factors of LoRA in '{path}' can be merged only with exactly one linear layer in the same module, but "
            f"there are {len(linear)}"
        )
    return linear[0]


def check_merges(module: nn.Module, merge_list: Sequence[Merge]) -> None:
    """Check that layers give the same outputs for some inputs with their factors and with these merged.

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
                f"the layer '{merge.layer}' is not W x + {merge.scale:g} B A x with the weight '{merge.base}', so the "
                "trained factors cannot be merged into that weight; use plain LoRA on linear layers, or another method"
            )
