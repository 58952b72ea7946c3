"""Low-rank adaptation of linear layers (Hu et al., ICLR 2022), with the layers of the package peft.

    y = W x + (alpha / r) · B A dropout(x)      A [r, in] Kaiming-uniform, B [out, r] zero, W frozen

The number of scalars is the sum over the adapted layers of r (in + out): 4 194 304 for LLaMA-7B with r = 8 on queries
and values.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from tailorfl.errors import MissingExtraError, ModelError
from tailorfl.printable import shown

QUERY_VALUE = (("query", "value"), ("q_proj", "v_proj"), ("q_lin", "v_lin"), ("q", "v"))
"""What families of models call the two projections."""
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
    """One line for error messages: the linear layers by the last part of their names, with counts."""
    counts = Counter(name.rpartition(".")[2] for name in linear_layers(module))
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "none"


def find_targets(base: nn.Module, endings: Sequence[str] | None = None) -> list[str]:
    """Return the names of the linear layers to adapt: those that end in one of `endings`, or all queries and values.

    Raises:
        ModelError: a wanted name, or no known pair of query and value, is there; the message lists what is.
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
        f"{', '.join(fused)} hold query, key and value in one layer, and adapting it adapts the keys as well"
        if fused
        else "no linear layers are called like queries and values"
    )
    raise ModelError(
        f"LoRA's usual targets are not in a {type(base).__name__}: {reason}. Name layers by lora_targets: "
        f"{candidates(base)}."
    )


def inject_lora(
    base: nn.Module, rank: int, alpha: float, dropout: float, target_names: Sequence[str] | None = None
) -> None:
    """Wrap the target layers of a base in place; the outputs stay as they are until B is trained.

    Raises:
        MissingExtraError: peft is not installed.
        ModelError: a bad number, or targets that are not there.
    """
    if rank < 1 or not 0 <= dropout < 1:
        raise ModelError(
            f"LoRA needs a rank of at least 1 and a dropout in [0, 1), got {rank} and {dropout}."
        )
    targets = find_targets(base, target_names)
    try:
        peft: Any = importlib.import_module("peft")
    except ImportError as error:
        raise MissingExtraError("peft", "text") from error
    # The other kind of linear layer keeps its weight transposed.
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
