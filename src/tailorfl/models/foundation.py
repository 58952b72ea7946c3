"""Transformers of the package transformers as models: from a config, from all-MiniLM-L6-v2, or from any checkpoint.

Token models take int64 ids [batch, length]: encoders padded on the right, causal models on the left, `pad` being the
padding id. Dropout inside the base is off: it is called as a function there, and no key could control its masks. The
dropout of LoRA and adapters is keyed as everywhere. `attention` is "eager", which every engine can run, or "sdpa".
Options of `PeftConfig` are passed like those of the model: `build("bert", shape, 2, lora=8)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from tailorfl.errors import ModelError
from tailorfl.models.adapters import NO_PEFT, PeftConfig, transformer_blocks
from tailorfl.models.checkpoints import (
    cut,
    kind_of,
    load_pretrained,
    minilm_folder,
    read_config,
    transformers,
)
from tailorfl.models.factories import check_choice, image_shape
from tailorfl.models.heads import Classifier, Language, OptionScorer, Reading

VOCABULARY = 1024
"""Default vocabulary size of a model from a config."""


def bert(
    input_shape: Sequence[int],
    outputs: int,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 2,
    intermediate: int = 64,
    vocabulary: int = VOCABULARY,
    length: int = 128,
    head: str = "classification",
    pooling: str = "first",
    option_length: int = 12,
    pad: int = 0,
    attention: str = "eager",
    peft: PeftConfig = NO_PEFT,
) -> nn.Module:
    """BERT, an encoder of token ids, randomly initialised and by default tiny."""
    reading = Reading("encoder", head, pooling, pad, option_length=option_length)
    reading.check("bert", input_shape, outputs, length)
    package = transformers()
    config = package.BertConfig(
        **_sizes("bert", hidden, layers, heads, intermediate),
        **_tokens("bert", vocabulary, length, pad, attention),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _with_head(package.BertModel(config, add_pooling_layer=False), reading, outputs, peft)


def llama(
    input_shape: Sequence[int],
    outputs: int,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 2,
    intermediate: int = 64,
    vocabulary: int | None = None,
    length: int = 128,
    head: str = "classification",
    pooling: str = "last",
    option_length: int = 12,
    pad: int = 0,
    end: int = 1,
    attention: str = "eager",
    peft: PeftConfig = NO_PEFT,
) -> nn.Module:
    """LLaMA, a causal model of token ids, randomly initialised and by default tiny.

    `vocabulary` defaults to that of the data for a language head, and to 1024 otherwise.
    """
    reading = Reading("decoder", head, pooling, pad, end, option_length)
    reading.check("llama", input_shape, outputs, length)
    if vocabulary is None:
        vocabulary = outputs if head == "language" else VOCABULARY
    package = transformers()
    config = package.LlamaConfig(
        **_sizes("llama", hidden, layers, heads, intermediate),
        **_tokens("llama", vocabulary, length, pad, attention),
        bos_token_id=None,
        eos_token_id=end,
    )
    base = (package.LlamaForCausalLM if head == "language" else package.LlamaModel)(config)
    return _with_head(base, reading, outputs, peft)


def vit(
    input_shape: Sequence[int],
    outputs: int,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 2,
    intermediate: int = 64,
    patch: int = 4,
    pooling: str = "first",
    attention: str = "eager",
    peft: PeftConfig = NO_PEFT,
) -> nn.Module:
    """Vision transformer of images cut into patches, randomly initialised and by default tiny."""
    reading = Reading("vision", "classification", pooling)
    reading.check("vit", input_shape, outputs, None)
    channels, height, width = image_shape("vit", input_shape, patch)
    if height % patch or width % patch:
        raise ModelError(
            f"images of {height}x{width} pixels cannot be cut into patches of {patch}x{patch}; set patch to a divisor "
            "of both sides."
        )
    package = transformers()
    config = package.ViTConfig(
        **_sizes("vit", hidden, layers, heads, intermediate),
        image_size=(height, width),
        patch_size=patch,
        num_channels=channels,
        attn_implementation=_attention(attention),
    )
    return _with_head(package.ViTModel(config, add_pooling_layer=False), reading, outputs, peft)


def minilm(
    input_shape: Sequence[int],
    outputs: int,
    *,
    head: str = "classification",
    pooling: str = "mean",
    option_length: int = 12,
    pad: int | None = None,
    layers: int | None = None,
    attention: str = "eager",
    peft: PeftConfig = NO_PEFT,
) -> nn.Module:
    """All-MiniLM-L6-v2, a pre-trained sentence encoder (6 layers, 384 wide, 22.6 M scalars), from its own package.

    `layers` keeps only this many of its first layers.
    """
    return huggingface(
        input_shape,
        outputs,
        checkpoint=str(minilm_folder()),
        kind="encoder",
        head=head,
        pooling=pooling,
        option_length=option_length,
        pad=pad,
        layers=layers,
        attention=attention,
        peft=peft,
    )


def huggingface(
    input_shape: Sequence[int],
    outputs: int,
    *,
    checkpoint: str | None = None,
    kind: str | None = None,
    head: str = "classification",
    pooling: str | None = None,
    option_length: int = 12,
    pad: int | None = None,
    end: int | None = None,
    layers: int | None = None,
    attention: str = "eager",
    peft: PeftConfig = NO_PEFT,
) -> nn.Module:
    """Any pre-trained encoder, causal or vision model of transformers: a folder, or a name on the Hugging Face hub.

    `kind` is encoder, decoder or vision, by default according to the config; `pad` and `end` default to the config's,
    or else 0 and 1. `layers` keeps only this many first blocks of the checkpoint, which is proportionally faster.
    """
    config = cut(read_config(checkpoint), layers)
    reading = Reading(
        kind_of(config, kind),
        head,
        pooling,
        _token(pad, config, "pad_token_id", 0),
        _token(end, config, "eos_token_id", 1),
        option_length,
    )
    limit = getattr(config, "max_position_embeddings", None)
    reading.check(str(checkpoint), input_shape, outputs, limit)
    _check_pretrained(config, reading, input_shape)
    base = load_pretrained(str(checkpoint), config, _attention(attention), causal=head == "language")
    if limit is not None:
        reading.check(str(checkpoint), input_shape, outputs, limit - _unused_positions(base))
    return _with_head(base, reading, outputs, peft)


def _with_head(base: nn.Module, reading: Reading, outputs: int, peft: PeftConfig) -> nn.Module:
    """Return the module of a base with its head; a causal model with a language head keeps its own."""
    top: Any = base
    language = reading.head == "language"
    part = peft.apply(top.base_model if language else base, top.config.hidden_size)
    model: Classifier | OptionScorer | Language
    if reading.head == "classification":
        model = Classifier(base, reading, outputs)
    elif reading.head == "choice":
        model = OptionScorer(base, reading, outputs)
    else:
        if top.config.vocab_size < outputs:
            raise ModelError(
                f"the model's vocabulary has {top.config.vocab_size} tokens, but the data has {outputs}; use the "
                "tokenizer that belongs to the checkpoint, or another vocabulary."
            )
        model = Language(base, reading)
    model.feature_boundary = tuple(f"base.{name}" for name in transformer_blocks(model.base))
    if part != "all":
        model.default_trainable = f"{part}+head" if reading.head == "classification" else part
    return model


def _sizes(model: str, hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, int]:
    if min(hidden, layers, heads, intermediate) < 1 or hidden % heads:
        raise ModelError(
            f"model '{model}' needs positive sizes, and hidden must be a multiple of heads, got hidden {hidden}, "
            f"layers {layers}, heads {heads}, intermediate {intermediate}."
        )
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
    }


def _tokens(model: str, vocabulary: int, length: int, pad: int, attention: str) -> dict[str, Any]:
    if not 0 <= pad < vocabulary:
        raise ModelError(f"model '{model}': the padding id {pad} is not among {vocabulary} token ids.")
    return {
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
        "pad_token_id": pad,
        "attn_implementation": _attention(attention),
    }


def _attention(name: str) -> str:
    check_choice("attention", name, ("eager", "sdpa"))
    return name


def _token(option: int | None, config: Any, name: str, default: int) -> int:
    """Return a token id: the option, the config's (the first of several), or the default."""
    token = option if option is not None else getattr(config, name, None)
    token = token[0] if isinstance(token, list) else token
    return default if token is None else int(token)


def _unused_positions(base: nn.Module) -> int:
    """Return how many positions no token takes: RoBERTa and its relatives begin after the padding id."""
    for name, module in base.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def _check_pretrained(config: Any, reading: Reading, shape: Sequence[int]) -> None:
    """Raise ModelError if samples have another size than those that the checkpoint was trained with."""
    window = getattr(config, "sliding_window", None)
    if window is not None and reading.kind != "vision" and shape[0] > window:
        raise ModelError(
            f"a {config.model_type} reads at most {window} tokens, but the data has {shape[0]}; cut the texts shorter."
        )
    if reading.kind == "vision":
        side = config.image_size
        expected = (
            getattr(config, "num_channels", 3),
            *(side if isinstance(side, list | tuple) else (side, side)),
        )
        if tuple(shape) != expected:
            raise ModelError(
                f"the checkpoint takes images of shape {expected}, but the data has {tuple(shape)}; resize them."
            )
