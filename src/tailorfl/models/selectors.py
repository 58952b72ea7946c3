"""Selectors: words, patterns and predicates that pick a part of a model's state.

word           picks
-------------  --------------------------------------------------------------------------------------------
all, none      everything, nothing
head           the last linear layer, or the one that the module's attribute `feature_layer` names
body           everything but the head
extractor[:k]  everything but the last k linear layers (k = 1 unless given; LG-FedAvg)
norm           the normalisation layers, parameters and running statistics (FedBN)
input          the first convolution, linear layer or embedding, with its norm (partial personalization)
input_perada   the stem convolution and the first convolution of every residual block (PerAda)
adapter        residual adapters, the norms of their blocks and of the stem, not of the shortcuts (PerAda; its
               whole set is "adapter+head"); in a transformer bottleneck adapters and the norms of their blocks
lora           the factors A and B of every layer that LoRA wraps (FedIT)
lora_A, lora_B one of the two, in modules of that name, as peft calls them (FFA-LoRA, FedSA-LoRA)

Words add with "+": "head+norm". Layers are recognised by type and position; only patterns, which the user
writes for one model, and the two factors use names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from tailorfl.errors import ModelError, unknown
from tailorfl.models.adapters import BottleneckAdapter, ResidualAdapter, adapted_blocks
from tailorfl.models.layers import head_layer, inventory, is_norm, layers, linears, state_entries
from tailorfl.models.lora import FACTORS, lora_parts
from tailorfl.models.resnet import ResidualBlock

Predicate = Callable[[str, Tensor, nn.Module], bool]
Selector = str | Sequence[str] | Predicate
"""A word or a sum of words, a list of name patterns (["fc.*"]), or a predicate (name, tensor, module)."""


def select(module: nn.Module, selector: Selector, *, allow_empty: bool = False) -> frozenset[str]:
    """Return the names of the parameters and buffers that the selector picks.

    Raises ConfigError for an unknown word, and ModelError if a word, a pattern or a predicate picks nothing
    (except "none", or with `allow_empty`: FedBN on a model without norm layers is FedAvg).
    """
    if isinstance(selector, str):
        parts = {word: _word(module, word) for word in (part.strip() for part in selector.split("+"))}
    elif isinstance(selector, Sequence):
        names = [entry.name for entry in state_entries(module)]
        parts = {f"pattern {p!r}": {n for n in names if fnmatchcase(n, p)} for p in selector}
    else:
        entries = state_entries(module)
        label = getattr(selector, "__name__", type(selector).__name__)
        parts = {f"predicate {label}": {e.name for e in entries if selector(e.name, e.tensor, e.module)}}
    empty = [label for label, picked in parts.items() if not picked and label != "none"]
    if (empty or not parts) and not allow_empty:
        description = " and ".join(empty) if empty else "an empty list of patterns"
        raise ModelError(f"the selector {description} matches nothing: {inventory(module)}.")
    return frozenset().union(*parts.values())


def _word(module: nn.Module, word: str) -> set[str]:
    name, _, number = word.partition(":")
    if name not in WORDS:
        hint = " (name patterns go into a list, such as ['fc.*'])" if any(c in word for c in ".*?[") else ""
        raise unknown("selector", word + hint, WORDS)
    if number and name != "extractor":
        raise ModelError(f"only 'extractor' takes a number, got '{word}'.")
    if number and (count := _positive(word, number)) > 1:
        return _everything(module) - _last_linears(module, count)
    return WORDS[name](module)


def _everything(module: nn.Module) -> set[str]:
    return {entry.name for entry in state_entries(module)}


def _body(module: nn.Module) -> set[str]:
    return _everything(module) - _head(module)


def _factor(factor: str, module: nn.Module) -> set[str]:
    return {name for name in _everything(module) if factor in name.split(".")}


def _positive(word: str, number: str) -> int:
    if not number.isdecimal() or int(number) < 1:
        raise ModelError(f"'{word}': after 'extractor:' comes the number of last linear layers, 1 or more.")
    return int(number)


def _state_of(module: nn.Module, parts: Iterable[nn.Module]) -> set[str]:
    """Return the names of the state held by the parts or below them (where a parametrised layer holds its weight)."""
    tensors = {id(t) for part in parts for t in (*part.parameters(), *part.buffers())}
    # By tensor, not by holder: a tied weight belongs to the layer under either of its names.
    return {entry.name for entry in state_entries(module) if id(entry.tensor) in tensors}


def _head(module: nn.Module) -> set[str]:
    layer = head_layer(module)
    if layer is None:
        return _last_linears(module, 1)  # whose error names the missing layer
    if not any(True for _ in layer.parameters()):
        raise ModelError(
            f"a {type(module).__name__} has no head: its outputs are computed from the features at "
            f"'{getattr(module, 'feature_layer', '')}' without a trainable layer. Select another part of the model."
        )
    return _state_of(module, (layer,))


def _last_linears(module: nn.Module, count: int) -> set[str]:
    linear_layers = linears(module)
    if len(linear_layers) < count:
        raise ModelError(
            f"the selector needs {count} linear layer(s), found {len(linear_layers)}: {inventory(module)}. For a head "
            "of another type, give patterns or a predicate."
        )
    return _state_of(module, linear_layers[-count:])


def _is_conv(part: nn.Module) -> bool:
    return isinstance(part, _ConvNd)


def _input(module: nn.Module) -> set[str]:
    for layer in layers(module):
        if _is_conv(layer.module) or isinstance(layer.module, nn.Linear | nn.Embedding):
            return _state_of(module, (layer.module, *filter(is_norm, layer.attached)))
    return set()


def _input_perada(module: nn.Module) -> set[str]:
    blocks = [part for part in module.modules() if isinstance(part, ResidualBlock)]
    if not blocks:
        raise ModelError(
            f"'input_perada' needs blocks of type tailorfl.models.ResidualBlock; {inventory(module)}."
        )
    firsts = [next(filter(_is_conv, owner.modules()), None) for owner in (module, *blocks)]
    return _state_of(module, (conv for conv in firsts if conv is not None))


def _lora(module: nn.Module) -> set[str]:
    parts = lora_parts(module)
    if not parts:
        raise ModelError(
            "'lora' needs layers that LoRA wraps, which lora=8 adds to bert, llama, vit, minilm and huggingface; "
            f"{inventory(module)}."
        )
    return _state_of(module, parts)


def _adapter(module: nn.Module) -> set[str]:
    bottlenecks = [part for part in module.modules() if isinstance(part, BottleneckAdapter)]
    if bottlenecks:
        inside = (part for block in adapted_blocks(module) for part in block.modules())
        return _state_of(module, (*bottlenecks, *filter(is_norm, inside)))
    adapters = [part for part in module.modules() if isinstance(part, ResidualAdapter)]
    if not adapters:
        raise ModelError(
            "'adapter' needs layers of type tailorfl.models.ResidualAdapter, which adapters=True adds to a resnet "
            "(resnet10 to resnet56), or tailorfl.models.BottleneckAdapter, which adapter_size=64 adds to a "
            f"transformer; {inventory(module)}."
        )
    # A block's own norms are its direct children; that of a shortcut is one level deeper.
    owners = [part for part in module.modules() if isinstance(part, ResidualBlock)]
    norms = [part for owner in (module, *owners) for part in owner.children() if is_norm(part)]
    return _state_of(module, (*adapters, *norms))


WORDS: dict[str, Callable[[nn.Module], set[str]]] = {
    "all": _everything,
    "none": lambda module: set(),
    "head": _head,
    "body": _body,
    "extractor": _body,
    "norm": lambda module: _state_of(module, filter(is_norm, module.modules())),
    "input": _input,
    "input_perada": _input_perada,
    "adapter": _adapter,
    "lora": _lora,
    **{factor: partial(_factor, factor) for factor in FACTORS},
}
"""The function that picks the state for each word; for "extractor" without a number."""
