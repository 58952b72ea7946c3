"""Evaluation of generation tasks: generated texts are compared with the right responses.

A prompt is the part of a sample before the response. The model's own module continues it (`generate`), greedily or with
beam search, without sampling. The source's tokenizer decodes both texts before they are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.data.instructions import rouge1
from tailorfl.data.source import NO_TARGET, Source
from tailorfl.data.tokenizers import Tokenizer, load_tokenizer
from tailorfl.engines.base import Engine, Inference
from tailorfl.errors import DataError, ModelError
from tailorfl.evaluation.metrics import compute_parts
from tailorfl.models.functional import Model
from tailorfl.partition.rows import spread_indices
from tailorfl.settings.eval import GenerationConfig
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort, rows_at_once
from tailorfl.training.objective import next_tokens, response_losses

PROMPTS_AT_ONCE = 32
"""Number of prompts that are continued together."""


class Texts:
    """Judges a generation task: by each token, given the right ones before it, and by generated texts.

    The logits of a whole vocabulary for every token of a test set would not fit into memory, so they are dropped after
    each batch. The results for a sample are (loss, right tokens, tokens, ROUGE-1 precision, recall, F1), the last three
    NaN if no text was generated.
    """

    def __init__(self, engine: Engine, settings: GenerationConfig) -> None:
        self.engine, self.settings = engine, settings

    def own(self, cohort: Cohort, models: TensorDict, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the results of every client's model on its own rows, [rows, 6] each."""
        step, source = rows_at_once(cohort.source, len(rows)), cohort.source
        blocks: list[list[Tensor]] = [[] for _ in rows]
        for start in range(0, max(len(r) for r in rows), step):
            parts = [r[start : start + step] for r in rows]
            outputs = self.engine.predict(Inference(cohort.model, models, source, parts))
            for forced, some, part in zip(blocks, outputs, parts, strict=True):
                forced.append(teacher_forced(some, source.y[part]))
        return [
            torch.cat([_joined(forced), self._texts(cohort, models, k, source, r)], dim=1)
            for k, (forced, r) in enumerate(zip(blocks, rows, strict=True))
        ]

    def common(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> list[Tensor]:
        """Return the results of every client's model on the same rows, [rows, 6] each."""
        forced = self._forced(cohort, models, source, rows)
        return [
            torch.cat([tokens, self._texts(cohort, models, k, source, rows)], dim=1)
            for k, tokens in enumerate(forced)
        ]

    def shared(
        self, cohort: Cohort, model: TensorDict, source: Source, rows: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the results of one model on several lists of rows, [rows, 6] each."""
        models = model.unsqueeze(0)
        forced = self._forced(cohort, models, source, torch.cat(list(rows)))[0]
        parts = torch.split(forced, [len(r) for r in rows])
        return [
            torch.cat([tokens, self._texts(cohort, models, 0, source, r)], dim=1)
            for tokens, r in zip(parts, rows, strict=True)
        ]

    def numbers(
        self, by_list: Sequence[Tensor], source: Source, rows: Sequence[Tensor]
    ) -> dict[str, list[float]]:
        """Return the loss and the task's metrics."""
        outputs, sizes = torch.cat(list(by_list)), [len(f) for f in by_list]
        losses = [float(f[:, 0].mean()) if len(f) else float("nan") for f in by_list]
        measured = compute_parts(source.task, outputs[:, 1:], source.targets(torch.cat(list(rows))), sizes)
        return {"loss": losses, **{name: values.tolist() for name, values in measured.items()}}

    def _forced(self, cohort: Cohort, models: TensorDict, source: Source, rows: Tensor) -> list[Tensor]:
        """Return (loss, right tokens, tokens) of every client's model, [rows, 3] each."""
        clients = models.batch_size[0]
        blocks: list[list[Tensor]] = [[] for _ in range(clients)]
        for part in torch.split(rows, rows_at_once(source, clients)):
            outputs = self.engine.predict(Inference(cohort.model, models, source, part))
            for of_client, some in zip(blocks, outputs, strict=True):
                of_client.append(teacher_forced(some, source.y[part]))
        return [_joined(of_client) for of_client in blocks]

    def _texts(self, cohort: Cohort, models: TensorDict, k: int, source: Source, rows: Tensor) -> Tensor:
        """Return ROUGE-1 precision, recall and F1 of the texts of model `k`, [rows, 3]."""
        scores = torch.full((len(rows), 3), float("nan"))
        chosen = torch.tensor(spread_indices(len(rows), self.settings.samples), dtype=torch.int64)
        if len(chosen):
            state = {name: tensor[k] for name, tensor in tree.tensors(models).items()}
            scores[chosen] = earned(cohort.model, state, source, rows[chosen], self.settings)
        return scores


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, 3)


def teacher_forced(outputs: Tensor, y: Tensor) -> Tensor:
    """Return (loss, right tokens, tokens) of responses, predicting tokens from the right ones before, [batch, 3].

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
    """Return ROUGE-1 precision, recall and F1 of a model's responses to samples `rows`, [rows, 3] in [0, 1].

    They are 0 for a model that has diverged to NaN or infinite weights.

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
                f"a generation task needs a model that generates, but a {type(module).__name__} has no `generate`; use "
                "a causal language model"
            )
        for k, part in enumerate(torch.split(rows, PROMPTS_AT_ONCE)):
            tokens = prompts(source, part, words.pad)
            generated = generate(tokens, max_new_tokens=settings.max_new_tokens, num_beams=settings.beams)
            for i, row in enumerate(part.tolist()):
                text = words.decode(generated[i, tokens.shape[1] :].tolist())
                scores[k * PROMPTS_AT_ONCE + i] = torch.tensor(rouge1(text, reference(source, row, words)))
    return scores


def prompts(source: Source, rows: Tensor, pad: int) -> Tensor:
    """Return the prompts of samples, int64 [rows, longest], padded on the left.

    Samples are padded on the left already, so prompts are only shifted to the right.
    """
    x, start = source.x[rows], (source.y[rows] != NO_TARGET).int().argmax(1)
    longest = int(start.max())
    positions = torch.arange(longest)[None] - (longest - start)[:, None]
    taken = x.gather(1, positions.clamp(min=0))
    shifted = torch.where(positions >= 0, taken, pad)
    return shifted[:, int((shifted != pad).int().argmax(1).min()) :]  # without padding that all prompts share


def reference(source: Source, row: int, words: Tokenizer) -> str:
    """Return the right response of a sample, decoded from its tokens."""
    y = source.y[row]
    return words.decode(y[y != NO_TARGET].tolist())


def tokenizer_of(source: Source) -> Tokenizer:
    """Return the tokenizer of a source.

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
