"""Exports of transformers: the base by `save_pretrained`, LoRA in PEFT's format, and code for the layers on top."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tailorfl.errors import ConfigError
from tailorfl.export.source_code import NotWritableError
from tailorfl.models import heads
from tailorfl.models.adapters import Adapted
from tailorfl.models.checkpoints import quiet_transformers
from tailorfl.models.heads import Classifier, Language, OptionScorer, PooledEncoder, Reading, Tokens
from tailorfl.models.lora import fold_ranks, lora_layers
from tailorfl.runs.checkpoints import system_errors
from tailorfl.runs.files import replacing_folder, reporting

BASE, ADAPTER = "base", "adapter"
LEFT_OUT = {Reading: ("check",), Language: ("generate",)}
"""Methods that an export does not need."""
IMPORTS = """\
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize
"""
LOAD = '''

def load(folder=Path(__file__).parent):
    """The trained network in evaluation mode: its base, the layers of its adapter, and its head."""
    folder = Path(folder)
    check(folder)
    told = json.loads((folder / "model.json").read_text(encoding="utf-8"))["transformer"]
    base = transformers.{auto}.from_pretrained(
        folder / told["base"], attn_implementation=told["attention"], dtype=torch.float32
    )
    if getattr(base, "pooler", None) is not None:
        base.pooler = None  # makes an output of its own, which nothing here reads
    if told["adapter"]:
        from peft import PeftModel

        PeftModel.from_pretrained(base, folder / told["adapter"])  # puts its layers into the base
    net = {network}
    net.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return net.eval()
'''


def is_transformer(module: nn.Module) -> bool:
    """Return whether a module is built on a transformer."""
    return isinstance(module, PooledEncoder | Language)


def code(module: nn.Module) -> str:
    """Return the code of the layers on top of a base, with `load`."""
    network, kinds = {
        Classifier: (
            'Classifier(base, Reading(**told["reading"]), told["outputs"])',
            (PooledEncoder, Classifier),
        ),
        OptionScorer: (
            'OptionScorer(base, Reading(**told["reading"]), told["outputs"])',
            (PooledEncoder, OptionScorer),
        ),
        Language: ('Language(base, Reading(**told["reading"]))', (Language,)),
    }[type(module)]
    constants = "".join(f"{name} = {getattr(heads, name)!r}\n" for name in ("POOLINGS", "SCALE", "UNUSED"))
    parts = [Reading, heads.attention_mask, heads.positions, Tokens, heads._dtype, *kinds]
    auto = "AutoModelForCausalLM" if isinstance(module, Language) else "AutoModel"
    body = "".join(f"\n\n{_source(part)}" for part in parts)
    return f"{IMPORTS}\n{constants}{body}{LOAD.format(auto=auto, network=network)}"


def _source(part: Any) -> str:
    text = inspect.getsource(part)
    for name in LEFT_OUT.get(part, ()):
        text = text.replace(inspect.getsource(getattr(part, name)), "")
    text = text.replace("    @torch.no_grad()\n\n", "").rstrip()
    return f"{text.removesuffix('@torch.no_grad()').rstrip()}\n"


def write_parts(
    module: nn.Module, live: Collection[str], place: Path, home: Path, attention: str, *, merge: bool
) -> dict[str, Any]:
    """Write base and adapter, and return the content of `transformer` in model.json.

    If the base is the same for all clients (`live` has none of its tensors), it goes into a folder next to the model's;
    otherwise, or if LoRA is merged into it, into the model's own. `place` is the folder that is written, `home` its
    final path.

    Raises:
        ConfigError: the folder next to the model's has the base of another model.
        NotWritableError: the model has bottleneck adapters, which PEFT does not support.
    """
    if any(isinstance(part, Adapted) for part in module.modules()):
        raise NotWritableError("its blocks contain bottleneck adapters")
    top: Any = module
    base_model: Any = copy.deepcopy(top.__dict__["_causal"] if isinstance(module, Language) else top.base)
    fold_ranks(base_model)
    has_lora = bool(lora_layers(base_model))
    live_names = [
        n for n in live if "lora_" not in n and not (isinstance(module, Classifier) and n.startswith("head."))
    ]
    together = not live_names and not (merge and has_lora)
    base = place.parent / BASE if together else place / BASE
    bare = _without_lora(base_model, merge=merge)
    if together and (base / "config.json").is_file():
        if _is_another(base, bare):
            raise ConfigError(
                f"'{base}' is the base of models that were exported before, but this model has another one; choose "
                "another folder (-o)"
            )
    else:
        with replacing_folder(base) as part, system_errors(), quiet_transformers():
            bare.save_pretrained(part)
    written = has_lora and not merge
    if written:
        _write_adapter(base_model, place / ADAPTER, (home.parent if together else home) / BASE)
    return {
        "base": f"../{BASE}" if together else BASE,
        "adapter": ADAPTER if written else None,
        "attention": attention,
        "reading": vars(top.reading),
        "outputs": top.slots
        if isinstance(module, OptionScorer)
        else getattr(getattr(top, "head", None), "out_features", 0),
    }


def head_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that belong neither to the base nor to the adapter."""
    if not isinstance(module, Classifier):
        return {}
    return {f"head.{name}": tensor for name, tensor in module.head.state_dict().items()}


def merged(module: nn.Module) -> nn.Module:
    """Return a copy with LoRA merged into the weights."""
    module = copy.deepcopy(module)
    fold_ranks(module)
    top: Any = module
    _unload(top.base if not isinstance(module, Language) else top.__dict__["_causal"], merge=True)
    return module


def _without_lora(base_model: nn.Module, merge: bool) -> Any:
    """Return a copy of a Hugging Face model without LoRA; with `merge` it is merged into the weights."""
    bare = copy.deepcopy(base_model)
    _unload(bare, merge)
    for name in ("peft_config", "_hf_peft_config_loaded"):
        if name in bare.__dict__:
            delattr(bare, name)
    return bare


def _unload(base_model: nn.Module, merge: bool) -> None:
    adapted: set[int] = {id(layer) for layer in lora_layers(base_model)}
    for name, part in list(base_model.named_modules()):
        layer: Any = part
        if id(part) in adapted:
            if merge:
                layer.merge()
            base_model.set_submodule(name, layer.get_base_layer())


def _is_another(folder: Path, base_model: Any) -> bool:
    """Return whether a folder has the kind or a tensor of another base than this one."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config.get("model_type") != base_model.config.model_type:
        return True
    own = base_model.state_dict()
    written = (entry for file in folder.glob("*.safetensors") for entry in load_file(file).items())
    return any(name in own and not torch.equal(own[name], tensor) for name, tensor in written)


def _write_adapter(base_model: Any, place: Path, base: Path) -> None:
    """Write LoRA in the format of `PeftModel.save_pretrained`."""
    from safetensors.torch import save_file

    settings = copy.deepcopy(_settings(base_model))
    settings.base_model_name_or_path, settings.inference_mode = str(base), True
    names = sorted(
        name
        for name, part in base_model.named_modules()
        if any(part is layer for layer in lora_layers(base_model))
    )
    settings.target_modules = set(names)
    tensors = {
        f"base_model.model.{name.replace('.default.', '.')}": tensor.detach().clone().contiguous()
        for name, tensor in base_model.state_dict().items()
        if ".lora_" in name
    }
    with reporting(place, "write the adapter into"), system_errors():
        place.mkdir()
        settings.save_pretrained(place)
        save_file(tensors, place / "adapter_model.safetensors")


def _settings(base_model: nn.Module) -> Any:
    """Return the LoraConfig of a model's LoRA layers."""
    for part in base_model.modules():
        settings: Any = getattr(part, "peft_config", None)
        if isinstance(settings, dict) and "default" in settings:
            return settings["default"]
    raise NotWritableError("its LoRA layers do not have their settings")
