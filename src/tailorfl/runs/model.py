"""From settings to a model that fits the samples of a federation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tailorfl.data.locations import data_file
from tailorfl.data.source import Source
from tailorfl.errors import ModelError
from tailorfl.models.functional import Model
from tailorfl.models.registry import build, options_of
from tailorfl.models.weights import load_weights
from tailorfl.settings.model import OneModelConfig

OF_TOKENIZER = ("pad", "end", "vocabulary")
"""Options of models that a token source knows."""
OF_DATA = "data:"
"""What follows is a file of the data folder (TAILORFL_DATA)."""


def make_model(config: OneModelConfig, source: Source, seed: int) -> Model:
    """Returns a model for the samples of `source`; `seed` draws frozen tensors that no file gives.

    What the source knows of its tokens (padding, end, vocabulary, length of an option) are defaults of the model's
    options.

    Raises:
        ModelError: the model is for tokens and the samples are none, or the other way round; it knows too few tokens.
        DataError: the weights are a file of the data folder (`data:NAME`), which has none of that name.
    """
    options = {**_known(config.name, source), **config.options}
    _check_head(config.name, options, source)

    def factory() -> torch.nn.Module:
        return build(config.name, source.input_shape, source.outputs, **options)

    def prepare(module: torch.nn.Module) -> None:
        if config.weights is not None:
            load_weights(module, _file(config.weights), skip_head=config.skip_head)

    model = Model(factory, prepare, trainable=config.trainable, seed=seed)
    if ":" not in config.name:  # whoever writes a model knows what it reads
        _check(config.name, model, source)
    return model


def _file(weights: str) -> str:
    return str(data_file(weights.removeprefix(OF_DATA))) if weights.startswith(OF_DATA) else weights


def _known(name: str, source: Source) -> dict[str, Any]:
    if ":" in name or not source.holds_tokens:
        return {}
    told = {key: source.info[key] for key in OF_TOKENIZER if key in source.info}
    told |= {k: v for k, v in source.info.get("choice", {}).items() if k == "option_length"}
    valid = options_of(name)
    return {key: value for key, value in told.items() if key in valid}


def _check_head(name: str, options: Mapping[str, Any], source: Source) -> None:
    """Raises ModelError where the head that a model is given cannot give what the task asks for."""
    if ":" in name or not source.holds_tokens or "head" not in options_of(name):
        return
    head = options.get("head", options_of(name)["head"])
    if (source.task == "generation") != (head == "language"):
        wanted, others = (
            ("a text, which takes model.head=language of a causal model such as llama", "classes or choices")
            if source.task == "generation"
            else ("classes, which takes model.head=classification or choice", "texts")
        )
        raise ModelError(
            f"source '{source.name}' asks for {wanted}, but the head of model '{name}' is '{head}'; change the "
            f"head, or take data that ask for {others} (data.options.form of instructions: choice or generation)"
        )


def _check(name: str, model: Model, source: Source) -> None:
    tables = [part for part in model.module.modules() if isinstance(part, torch.nn.Embedding)]
    if bool(tables) != source.holds_tokens:
        held, others = ("tokens", "bert or minilm") if source.holds_tokens else ("numbers", "mlp or cnn2")
        raise ModelError(
            f"model '{name}' cannot read source '{source.name}', whose samples are {held}; take a model such as "
            f"{others}"
        )
    tokens = int(source.info.get("vocabulary", 0))
    largest = max((table.num_embeddings for table in tables), default=0)
    if tokens > largest:
        raise ModelError(
            f"model '{name}' knows {largest} tokens, but the tokenizer '{source.info.get('tokenizer')}' of source "
            f"'{source.name}' has {tokens}; give the data the tokenizer of the model (data.options.tokenizer)"
        )
