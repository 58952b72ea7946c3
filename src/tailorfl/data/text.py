"""Texts with a class: sentiment, inference, paraphrase, yes/no questions, and airline tweets by their authors.

Files of the data folder (see `tailorfl.data.locations`), none of them part of this package; read the terms of each
set before sharing anything made from it. Texts become token ids, see `tailorfl.data.tokenizers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tailorfl.data.locations import data_file
from tailorfl.data.source import Source
from tailorfl.data.thinning import thinned
from tailorfl.data.tokenizers import Tokenizer, load_tokenizer, pair, single, stacked
from tailorfl.errors import ConfigError, DataError, unknown

if TYPE_CHECKING:
    import pandas as pd

CORPORA = ("sst2", "sentiment140", "snli", "anli", "mrpc", "boolq")
SIDES = ("right", "left")
TEXTS = "texts"
"""Key of `Source.info`: how a table of texts becomes token ids, see `reading_of`."""


def text(
    set: str = "sst2",
    tokenizer: str = "byte",
    length: int = 64,
    padding: str = "right",
    samples: int | None = None,
) -> Source:
    """One of six sets of 2,000 + 400 texts, or pairs of texts, with a class.

    sst2 (film reviews) and sentiment140 (tweets): sentiment; snli and anli: does the second text follow from the first;
    mrpc: do both say the same; boolq: a passage and a yes/no question. No natural clients.

    Args:
        set: which.
        tokenizer: byte, minilm, a folder, or a name on the Hugging Face hub.
        length: tokens of a sample, marks included; of a longer text, the first third and the last two are kept.
        padding: right for encoders, left for causal models.
        samples: at most so many of each part.

    Raises:
        ConfigError: for an unknown set or side.
        DataError, MissingExtraError: if the file or the tokenizer is missing.
    """
    if set not in CORPORA:
        raise unknown("set of data source 'text'", set, CORPORA)
    frame = _read(f"text/{set}.parquet")
    places = [frame.index[frame["split"] == part] for part in ("train", "test")]
    frame = frame.loc[[i for part in places for i in part[thinned(len(part), samples)]]]
    words = load_tokenizer(tokenizer)
    rows = [
        pair(words, a, b, length) if b else single(words, a, length)
        for a, b in zip(frame["text_a"], frame["text_b"], strict=True)
    ]
    return _source("text", frame, rows, words, length, padding)


def airline(min_tweets: int = 5, tokenizer: str = "byte", length: int = 64, padding: str = "right") -> Source:
    """Sentiment (negative, neutral, positive) of tweets to six airlines by those who wrote them.

    About a fifth of each user's tweets are test. Published elsewhere as CC BY-NC-SA 4.0.

    Args:
        min_tweets: users with fewer tweets are left out: 2 leaves 2,948 users, 5 leaves 460, 10 leaves 74.
        tokenizer, length, padding: as for `text`.

    Returns:
        A source with groups `client` (user) and `domain` (airline).

    Raises:
        ConfigError: if no user has `min_tweets`, or for an unknown side.
        DataError, MissingExtraError: if the file or the tokenizer is missing.
    """
    frame = _read("text/airline_tweets.parquet")
    frame = frame[frame.groupby("user")["user"].transform("size") >= min_tweets]
    if frame.empty:
        raise ConfigError(f"no user of data source 'airline' has min_tweets={min_tweets} tweets; use fewer")
    words = load_tokenizer(tokenizer)
    rows = [single(words, tweet, length) for tweet in frame["text_a"]]
    groups, names = {}, {}
    for kind, column in (("client", "user"), ("domain", "domain")):
        groups[kind], names[kind] = numbered(frame[column].tolist())
    return _source("airline", frame, rows, words, length, padding, groups=groups, group_names=names)


def numbered(values: Sequence[Any], order: Sequence[Any] = ()) -> tuple[Tensor, tuple[str, ...]]:
    """int64 ids of values and the name of each id: those of `order` first, the others sorted."""
    known = list(dict.fromkeys([*(v for v in order if v in values), *sorted({*values})]))
    place = {value: i for i, value in enumerate(known)}
    return torch.tensor([place[value] for value in values]), tuple(str(value) for value in known)


def token_info(words: Tokenizer) -> dict[str, Any]:
    """What a source of tokens says about them in `info`."""
    return {"tokenizer": words.name, "pad": words.pad, "end": words.end, "vocabulary": words.size}


def reading_of(text: str, second: str | None, length: int, padding: str) -> dict[str, Any]:
    """What a source of texts says in `info[TEXTS]`: columns of a table of such texts, tokens a sample, side of padding.

    Raises:
        ConfigError: for an unknown side.
    """
    left_of(padding)
    columns = {"text": text} if second is None else {"text": text, "second": second}
    return {**columns, "length": length, "padding": padding}


def left_of(padding: str) -> bool:
    """Whether rows are padded on the left.

    Raises:
        ConfigError: for an unknown side.
    """
    if padding not in SIDES:
        raise unknown("padding", padding, SIDES)
    return padding == "left"


def _read(file: str) -> pd.DataFrame:
    import pandas as pd

    path = data_file(file)
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise DataError(f"data file {path} cannot be read: {error}; fetch it again") from error


def _source(
    name: str,
    frame: pd.DataFrame,
    rows: Sequence[Sequence[int]],
    words: Tokenizer,
    length: int,
    padding: str,
    **groups: Any,
) -> Source:
    second = "second" if "text_b" in frame and bool(frame["text_b"].astype(bool).any()) else None
    reading = reading_of("text", second, length, padding)
    named = frame.drop_duplicates("label").set_index("label")["label_text"].sort_index()
    return Source(
        name=name,
        x=stacked(rows, length, words.pad, left=left_of(padding)),
        y=torch.tensor(frame["label"].tolist()),
        task="classification",
        outputs=len(named),
        test=torch.tensor((frame["split"] == "test").tolist()),
        info={"classes": tuple(str(n) for n in named), **token_info(words), TEXTS: reading},
        **groups,
    )
