"""Heads of a Hugging Face model: a linear classifier, the choice among options, or its own language head.

Every module here is an ordinary one, forward(x) -> outputs, and runs under `torch.func.vmap`: masks and positions are
made here from the token ids without looking at values. The state names of a base are `base.*`, whatever the head.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from tailorfl.errors import ModelError
from tailorfl.models.factories import check_choice, image_shape

HEADS = {
    "encoder": ("classification", "choice"),
    "decoder": ("classification", "choice", "language"),
    "vision": ("classification",),
}
"""The possible heads of each kind of base."""
POOLINGS = {
    "encoder": ("first", "mean", "last"),
    "decoder": ("last", "mean", "first"),
    "vision": ("first", "mean", "last"),
}
"""How the hidden states become one vector: the kind's usual pooling comes first."""
SCALE = 20.0
"""Factor that turns cosines into logits, as in the training of sentence encoders (multiple negatives ranking loss)."""
UNUSED = -1e4
"""Logit of an option slot that a sample does not use."""


@dataclass(frozen=True)
class Reading:
    """How a model reads a sample, and its head.

    kind     encoder (token ids, padded on the right), decoder (token ids, causal, padded on the left), vision
    head     classification, choice or language
    pooling  mean over the real tokens, the first position (the class token) or the last token; None: the kind's usual
    pad      token id of padding; `end` is the token id that ends a response
    """

    kind: str
    head: str
    pooling: str | None = None
    pad: int = 0
    end: int = 1
    option_length: int = 12

    def check(self, model: str, shape: Sequence[int], outputs: int, limit: int | None) -> None:
        """Raise ModelError or ConfigError if samples of `shape`, at most `limit` tokens, cannot be read like this."""
        check_choice(f"head of a model of kind {self.kind}", self.head, HEADS[self.kind])
        if self.pooling is not None:
            check_choice("pooling", self.pooling, POOLINGS[self.kind])
        if self.kind == "vision":
            image_shape(model, shape, 1)
            return
        if len(shape) != 1:
            raise ModelError(
                f"model '{model}' takes token ids of shape (length,), but the samples have shape {tuple(shape)}; use "
                "'vit' for images."
            )
        options = outputs * self.option_length if self.head == "choice" else 0
        if self.option_length < 1 or shape[0] <= options:
            raise ModelError(
                f"samples of {shape[0]} tokens cannot be a prompt and {outputs} options of {self.option_length} tokens "
                "each; set option_length to that of the data."
            )
        longest = max(shape[0] - options, self.option_length if options else 0)
        if limit is not None and longest > limit:
            raise ModelError(
                f"model '{model}' reads at most {limit} tokens, but the data has {longest}; cut the texts shorter, or "
                "set the model's length option if it has one."
            )


def attention_mask(real: Tensor, causal: bool, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to attention scores, [batch, 1, 1 or length, length]: 0 for tokens that may be seen.

    `real` bool [batch, length]. Elsewhere it is the least finite number: a row without any token to see (left padding)
    then weighs all alike, where -inf would give NaN. In float64 it is that of float32, since models compute their
    softmax in float32 whatever their own precision.
    """
    visible = real[:, None, None, :]
    if causal:
        length = real.shape[1]
        visible = visible & torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
    zeros = torch.zeros(visible.shape, dtype=dtype, device=real.device)
    return zeros.masked_fill(~visible, max(torch.finfo(dtype).min, torch.finfo(torch.float32).min))


def positions(real: Tensor) -> Tensor:
    """Return the position of every token among the real ones, int64 [batch, length]; 0 for padding on the left."""
    return (real.long().cumsum(-1) - 1).clamp(min=0)


class Tokens:
    """Makes the arguments of a token model from token ids."""

    def __init__(self, model: nn.Module, reading: Reading) -> None:
        self.causal, self.pad = reading.kind == "decoder", reading.pad
        taken = inspect.signature(model.forward).parameters
        self.takes_positions = self.causal and "position_ids" in taken
        self.settings = {"use_cache": False} if self.causal and "use_cache" in taken else {}

    def __call__(self, ids: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments for `ids` int64 [batch, length]; a row of only padding is read as text, as in `real`."""
        real = self.real(ids)
        arguments = {
            "input_ids": ids,
            "attention_mask": attention_mask(real, self.causal, dtype),
            **self.settings,
        }
        if self.takes_positions:
            arguments["position_ids"] = positions(real)
        return arguments

    def real(self, ids: Tensor) -> Tensor:
        """Return bool [batch, length]: which tokens are text; in a row of only padding all, so that no sum is empty."""
        real = ids != self.pad
        return real | ~real.any(-1, keepdim=True)


def _dtype(base: nn.Module) -> torch.dtype:
    inside: Any = base
    dtype: torch.dtype = inside.get_input_embeddings().weight.dtype
    return dtype


class PooledEncoder(nn.Module):
    """A base whose hidden states become one vector per sample."""

    default_trainable: str = "all"
    feature_boundary: tuple[str, ...] = ()

    def __init__(self, base: nn.Module, reading: Reading) -> None:
        super().__init__()
        self.base = base
        self.reading = reading
        self.tokens = None if reading.kind == "vision" else Tokens(base, reading)

    def pooled(self, x: Tensor) -> Tensor:
        """[batch, length] int64 token ids, or [batch, channels, height, width] images -> [batch, hidden]."""
        if self.tokens is None:
            hidden: Tensor = self.base(pixel_values=x).last_hidden_state
            real = hidden.new_ones(hidden.shape[:2])
        else:
            hidden = self.base(**self.tokens(x, _dtype(self.base))).last_hidden_state
            real = self.tokens.real(x).to(hidden.dtype)
        pooling = self.reading.pooling or POOLINGS[self.reading.kind][0]
        if pooling == "mean":
            return (hidden * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True)
        if pooling == "first":
            return hidden[:, 0]
        last = real.long().cumsum(1).argmax(1)  # the first position with all real tokens up to it
        return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[-1])).squeeze(1)


class Classifier(PooledEncoder):
    """A linear layer on the pooled hidden states."""

    feature_layer = "head"

    def __init__(self, base: nn.Module, reading: Reading, outputs: int) -> None:
        super().__init__(base, reading)
        inside: Any = base
        self.head = nn.Linear(inside.config.hidden_size, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Samples as for `pooled` -> [batch, outputs]."""
        scores: Tensor = self.head(self.pooled(x))
        return scores


class OptionScorer(PooledEncoder):
    """Scores options by the similarity of their embeddings to that of the prompt: 20 · cosine; no head is trained.

    The feature is the embedding of the prompt, [batch, hidden], of norm 1 since scores do not depend on its norm.
    """

    feature_layer = "feature"

    def __init__(self, base: nn.Module, reading: Reading, slots: int) -> None:
        super().__init__(base, reading)
        self.slots, self.option_length = slots, reading.option_length
        self.feature = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[batch, L + slots * option_length] int64, a prompt and its options -> logits [batch, slots].

        A slot that holds only padding gets -1e4.
        """
        cut = x.shape[1] - self.slots * self.option_length
        prompt = self.feature(normalize(self.pooled(x[:, :cut]), dim=-1))
        options = x[:, cut:].reshape(-1, self.option_length)
        embedded = normalize(self.pooled(options), dim=-1).reshape(x.shape[0], self.slots, -1)
        scores = SCALE * (embedded * prompt.unsqueeze(1)).sum(-1)
        used = (options != self.reading.pad).any(-1).reshape(x.shape[0], self.slots)
        return torch.where(used, scores, UNUSED)


class Language(nn.Module):
    """A causal language model with its own head; the feature is the head's input at the last position.

    Args:
        causal: a Hugging Face model for causal language modelling; its base and its head stay in it.
        reading: has the ids of padding and of the end of a response.
    """

    default_trainable: str = "all"
    feature_boundary: tuple[str, ...] = ()
    feature_layer = "head"

    def __init__(self, causal: nn.Module, reading: Reading) -> None:
        super().__init__()
        inside: Any = causal
        self.base: nn.Module = inside.base_model
        self.head: nn.Module = inside.get_output_embeddings()
        self.reading = reading
        self.tokens = Tokens(causal, reading)
        # Not as a submodule: it consists of the two above, whose names must not depend on it.
        self.__dict__["_causal"] = causal

    @property
    def causal(self) -> Any:
        """The whole model, with the current head: a method may have replaced it."""
        causal: Any = self.__dict__["_causal"]
        if causal.get_output_embeddings() is not self.head:
            causal.set_output_embeddings(self.head)
        return causal

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length] int64, padded on the left -> logits of the next token, [batch, length, vocabulary]."""
        logits: Tensor = self.causal(**self.tokens(x, _dtype(self.base))).logits
        return logits

    @torch.no_grad()
    def generate(self, ids: Tensor, max_new_tokens: int, num_beams: int = 1) -> Tensor:
        """Return prompts with the likeliest responses, int64 [n, length + max_new_tokens]; padding after the end.

        `ids` int64 [n, length], padded on the left. A response ends with the token `end`; with one beam it is
        the greedy one.

        Raises:
            ModelError: the module has no state in place, or a number is below 1.
        """
        if max_new_tokens < 1 or num_beams < 1:
            raise ModelError(
                f"generate needs max_new_tokens and num_beams of at least 1, got {max_new_tokens} and {num_beams}."
            )
        if any(t.is_meta for t in self.parameters()):
            raise ModelError("generate needs a state; call it inside `with model.bound(state):`.")
        transformers: Any = importlib.import_module("transformers")
        settings = transformers.GenerationConfig(
            max_new_tokens=max_new_tokens,
            num_beams=num_beams,
            do_sample=False,
            eos_token_id=self.reading.end,
            pad_token_id=self.reading.pad,
        )
        mask = (ids != self.reading.pad).long()
        generated: Tensor = self.causal.generate(ids, attention_mask=mask, generation_config=settings)
        short = ids.shape[1] + max_new_tokens - generated.shape[1]
        return nn.functional.pad(generated, (0, short), value=self.reading.pad)
