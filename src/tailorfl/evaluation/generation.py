"""Texts that a model generates, and what they earn: the responses of test samples against the right ones.

A prompt is what stands before the response of a sample. The model's own module continues it (`generate`), greedily or
with beams, without sampling. Both texts are decoded by the tokenizer of the source before they are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tailorfl.data.instructions import rouge1
from tailorfl.data.source import NO_TARGET, Source
from tailorfl.data.tokenizers import Tokenizer, load_tokenizer
from tailorfl.errors import DataError, ModelError
from tailorfl.models.functional import Model
from tailorfl.settings.eval import GenerationConfig
from tailorfl.training.objective import next_tokens, response_losses

PROMPTS_AT_ONCE = 32
"""Prompts that are continued together."""


def teacher_forced(outputs: Tensor, y: Tensor) -> Tensor:
    """(loss, right tokens, tokens) of every response, each token predicted from the right ones before it, [batch, 3].

    `outputs` [batch, length, vocabulary], `y` [batch, length] int64. A NaN output predicts no token.
    """
    if not len(y):
        return torch.zeros(0, 3)
    target = next_tokens(y)
    is_response = target != NO_TARGET
    likeliest, predicted = outputs.max(-1)
    right = is_response & (predicted == target) & ~likeliest.isnan()
    return torch.stack([response_losses(outputs, y), right.sum(1), is_response.sum(1)], dim=1)


def earned(
    model: Model, state: Mapping[str, Tensor], source: Source, rows: Tensor, settings: GenerationConfig
) -> Tensor:
    """ROUGE-1 precision, recall and F1 of the responses that a model generates to samples `rows`, [rows, 3] in [0, 1].

    0 for a model that has diverged: nothing can be read out of NaN.

    Raises:
        DataError: the source does not name its tokenizer.
        ModelError: the module cannot generate.
        MissingExtraError: rouge-score is not installed.
    """
    scores = torch.zeros(len(rows), 3)
    if not all(bool(t.isfinite().all()) for t in state.values() if t.is_floating_point()):
        return scores
    words = tokenizer_of(source)
    with torch.no_grad(), model.bound(state) as module:
        generate = getattr(module, "generate", None)
        if generate is None:
            raise ModelError(
                f"a generation task needs a model that generates, but a {type(module).__name__} has no `generate`; "
                "take a causal language model"
            )
        for k, part in enumerate(torch.split(rows, PROMPTS_AT_ONCE)):
            tokens = prompts(source, part, words.pad)
            generated = generate(tokens, max_new_tokens=settings.max_new_tokens, num_beams=settings.beams)
            for i, row in enumerate(part.tolist()):
                text = words.decode(generated[i, tokens.shape[1] :].tolist())
                scores[k * PROMPTS_AT_ONCE + i] = torch.tensor(rouge1(text, reference(source, row, words)))
    return scores


def prompts(source: Source, rows: Tensor, pad: int) -> Tensor:
    """Return what stands before the responses of samples, int64 [rows, longest], padded on the left.

    Samples are padded on the left themselves, so a prompt only has to move to the right.
    """
    x, start = source.x[rows], (source.y[rows] != NO_TARGET).int().argmax(1)
    longest = int(start.max())
    positions = torch.arange(longest)[None] - (longest - start)[:, None]
    taken = x.gather(1, positions.clamp(min=0))
    shifted = torch.where(positions >= 0, taken, pad)
    return shifted[
        :, int((shifted != pad).int().argmax(1).min()) :
    ]  # what all of them are padded with helps nobody


def reference(source: Source, row: int, words: Tokenizer) -> str:
    """Return the right response of a sample, as its tokens say it."""
    y = source.y[row]
    return words.decode(y[y != NO_TARGET].tolist())


def tokenizer_of(source: Source) -> Tokenizer:
    """Return the tokenizer that a source was made with.

    Raises:
        DataError: the source does not name it.
    """
    name: Any = source.info.get("tokenizer")
    if not isinstance(name, str):
        raise DataError(
            f"source '{source.name}' does not name its tokenizer, so generated tokens cannot be read; set "
            "info['tokenizer'], such as 'byte'"
        )
    return load_tokenizer(name)
