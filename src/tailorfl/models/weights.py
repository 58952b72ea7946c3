"""Weight files: loading pre-trained tensors by name into a module, and saving a state."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tailorfl.archives import load_arrays
from tailorfl.errors import ModelError, first_few
from tailorfl.models.adapters import BottleneckAdapter, ResidualAdapter
from tailorfl.models.layers import head_layer, state_entries
from tailorfl.models.lora import lora_parts
from tailorfl.models.selectors import select

HUBS = ("torchvision", "timm")


@dataclass(frozen=True)
class WeightReport:
    """The result of `load_weights`, by state name."""

    source: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """In the module and not in the source: left at their initial values."""
    unexpected: tuple[str, ...]
    """In the source and not in the module: not used."""
    skipped: tuple[str, ...]
    """In both, left at their initial values because they belong to the skipped head."""

    def lacking(self, module: nn.Module, frozen: Collection[str] = ()) -> list[str]:
        """Return the missing names that a file of weights for `module` should have: those before the head.

        Args:
            module: the one that the weights were loaded into.
            frozen: names of its tensors that never change; with any, only these are expected in the file, since parts
                that train may be new. Adapters and LoRA never are.
        """
        head, new = head_layer(module), lora_parts(module)
        new += [part for part in module.modules() if isinstance(part, ResidualAdapter | BottleneckAdapter)]
        if head is not None:
            new.append(head)
        anew = {id(tensor) for part in new for tensor in (*part.parameters(), *part.buffers())}
        return [
            entry.name
            for entry in state_entries(module)
            if entry.name in self.missing
            and (not frozen or entry.name in frozen)
            and id(entry.tensor) not in anew
            and entry.tensor.is_floating_point()  # else the number of batches that a norm has seen
        ]


def load_weights(module: nn.Module, source: str | Path, *, skip_head: int = 0) -> WeightReport:
    """Copy tensors into a module by name, converted to each tensor's own type; returns a report.

    `source` is a local .npz or .safetensors file whose keys are state names, or "torchvision:resnet18",
    "timm:resnet18" with the package installed. `skip_head` leaves out the last linear layer (True or 1) or
    the last k, for another number of classes. Running statistics are loaded with the parameters. A layer that LoRA or
    an adapter wraps takes the tensors that the file has under the name of the layer without the wrapper.

    Raises ModelError if the source cannot be read, shares no name with the module, has another shape for some
    tensor, or holds NaN or complex numbers; the module is then unchanged.
    """
    tensors = _read(str(source))
    targets = {entry.name: entry.tensor for entry in state_entries(module)}
    wrapped = {name.replace(".base_layer.", "."): name for name in targets}
    tensors = {wrapped.get(name, name): tensor for name, tensor in tensors.items()}
    skip = frozenset(targets) - select(module, f"extractor:{int(skip_head)}") if skip_head else frozenset()
    common = [name for name in targets if name in tensors and name not in skip]
    if not common:
        raise ModelError(
            f"no tensor of '{source}' has a name of the model: the file has {first_few(list(tensors), 5)}, the model "
            f"has {first_few(list(targets), 5)}."
        )
    wrong = [
        f"{name}: file {tuple(tensors[name].shape)}, model {tuple(targets[name].shape)}"
        for name in common
        if tensors[name].shape != targets[name].shape
    ]
    if wrong:
        raise ModelError(
            f"'{source}' does not fit the model in {len(wrong)} tensor(s): {first_few(wrong, 5, '; ')}. If these are "
            "the last linear layers, skip_head=True (or their number) leaves them at their initial values."
        )
    unusable = [n for n in common if tensors[n].is_complex() or bool(tensors[n].float().isnan().any())]
    if unusable:
        raise ModelError(
            f"'{source}' holds NaN or complex numbers in {len(unusable)} tensor(s), such as {unusable[0]}; save the "
            "weights of a model that has not diverged, as real numbers."
        )
    with torch.no_grad():
        for name in common:
            targets[name].copy_(tensors[name])
    return WeightReport(
        source=str(source),
        loaded=tuple(common),
        missing=tuple(name for name in targets if name not in tensors),
        unexpected=tuple(name for name in tensors if name not in targets),
        skipped=tuple(name for name in targets if name in skip and name in tensors),
    )


def save_weights(state: Mapping[str, Tensor], path: str | Path) -> Path:
    """Write a flat state (dict or TensorDict) as a .safetensors file and return its path.

    The file appears under its name only when it is complete. Raises ModelError for another suffix.
    """
    from safetensors.torch import save_file

    target = Path(path)
    if target.suffix != ".safetensors":
        raise ModelError(f"weights are saved as .safetensors, but the file is '{target}'.")
    # Clones, because safetensors refuses tensors that share memory (tied weights, views of one stack).
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    save_file(tensors, partial)
    os.replace(partial, target)
    return target


def _read(source: str) -> dict[str, Tensor]:
    hub, _, name = source.partition(":")
    if name and hub in HUBS:
        return _from_hub(hub, name)
    path = Path(source)
    if path.suffix not in (".npz", ".safetensors"):
        raise ModelError(
            f"'{source}' is not a weight source; give a .npz or .safetensors file, or one of "
            f"{', '.join(f'{h}:NAME' for h in HUBS)}. Convert other formats with save_weights first."
        )
    if not path.is_file():
        raise ModelError(f"the weight file '{path}' does not exist.")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        return {key: torch.as_tensor(array) for key, array in load_arrays(path).items()}
    except (ValueError, TypeError) as error:
        raise ModelError(f"the weight file '{path}' cannot be read as arrays: {error}.") from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, MemoryError, SafetensorError) as error:
        raise ModelError(f"the weight file '{path}' cannot be read as safetensors: {error}.") from error
    return tensors


def _from_hub(hub: str, name: str) -> dict[str, Tensor]:
    """Return the state of a pre-trained model of torchvision or timm; the only place that imports them."""
    try:
        package: Any = importlib.import_module("torchvision.models" if hub == "torchvision" else hub)
    except (ImportError, RuntimeError, OSError) as error:
        # A torchvision built for another torch is found but fails with a RuntimeError (missing operator).
        raise ModelError(
            f"'{hub}:{name}' needs the package '{hub}', which is missing or does not match torch "
            f"({type(error).__name__}: {error}); install the build for torch {torch.__version__} with: "
            f"pip install {hub}, or give a local .npz or .safetensors file."
        ) from error
    try:
        if hub == "torchvision":
            state: dict[str, Tensor] = package.get_model_weights(name).DEFAULT.get_state_dict(progress=False)
        else:
            state = package.create_model(name, pretrained=True).state_dict()
    except (ValueError, KeyError, AttributeError, RuntimeError, OSError) as error:
        # OSError: no network and nothing in the cache; the others: no such model or no such weights.
        raise ModelError(f"{hub} gives no weights for '{name}': {type(error).__name__}: {error}.") from error
    return state
