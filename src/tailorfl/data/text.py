"""Texts with a label: a user's own table of texts, six public sets, and airline tweets by their authors.

The public sets are files of the data folder (see `tailorfl.data.storage`), none of them part of this package; read
the terms of each set before sharing anything made from it. Texts become token ids, see `tailorfl.data.tokenizers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from tailorfl.data.columns import filled, make_source, need_columns, owned_table, target_columns, test_column
from tailorfl.data.registry import data_source
from tailorfl.data.source import Source, Task, labelled
from tailorfl.data.storage import read_data_file
from tailorfl.data.summaries import made_roles
from tailorfl.data.table_files import reading_info
from tailorfl.data.tokenizers import Tokenizer, load_tokenizer, pair, single, stacked
from tailorfl.errors import ConfigError, DataError, check_known
from tailorfl.partition.rows import spread_indices

if TYPE_CHECKING:
    import pandas as pd

CORPORA = ("sst2", "sentiment140", "snli", "anli", "mrpc", "boolq")
SIDES = ("right", "left")
TEXTS = "texts"
"""Key of `Source.info`: how a table of texts becomes token ids, see `reading_of`."""


@data_source(
    "sst2, sentiment140, snli, anli, mrpc or boolq (option set), 2,000 + 400 texts each",
    files="text/SET.parquet",
)
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
        set: sst2, sentiment140, snli, anli, mrpc or boolq.
        tokenizer: byte, minilm, a folder, or a name on the Hugging Face hub.
        length: tokens of a sample, marks included; a longer text keeps a third of them from its start, the rest from
            its end.
        padding: right for encoders, left for causal models.
        samples: maximum number of texts of each part.

    Raises:
        ConfigError: for an unknown set or side.
        DataError, MissingExtraError: if the file or the tokenizer is missing.
    """
    import pandas as pd

    check_known("set of data source 'text'", set, CORPORA)
    frame = read_data_file(f"text/{set}.parquet", pd.read_parquet)
    indices = [frame.index[frame["split"] == part] for part in ("train", "test")]
    frame = frame.loc[[i for part in indices for i in part[spread_indices(len(part), samples)]]]
    return text_classes("text", frame, tokenizer, length, padding)


@data_source(
    "tweets to airlines by their authors, 3 sentiments (groups 'client', 'domain')",
    files="text/airline_tweets.parquet",
)
def airline(min_tweets: int = 5, tokenizer: str = "byte", length: int = 64, padding: str = "right") -> Source:
    """Sentiment (negative, neutral, positive) of tweets to six airlines, by author.

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
    import pandas as pd

    frame = read_data_file("text/airline_tweets.parquet", pd.read_parquet)
    frame = frame[frame.groupby("user")["user"].transform("size") >= min_tweets]
    if frame.empty:
        raise ConfigError(f"no user of data source 'airline' has min_tweets={min_tweets} tweets; use fewer")
    groups = {
        kind: numbered(frame[column].tolist()) for kind, column in (("client", "user"), ("domain", "domain"))
    }
    return text_classes("airline", frame, tokenizer, length, padding, groups)


def numbered(values: Sequence[Any], order: Sequence[Any] = ()) -> tuple[Tensor, tuple[str, ...]]:
    """Return int64 ids of values and the name of each id: those of `order` first, the others sorted."""
    ordered = list(dict.fromkeys([*(v for v in order if v in values), *sorted({*values})]))
    id_of = {value: i for i, value in enumerate(ordered)}
    return torch.tensor([id_of[value] for value in values]), tuple(str(value) for value in ordered)


def token_info(words: Tokenizer) -> dict[str, Any]:
    """Return the entries of `Source.info` about a tokenizer."""
    return {"tokenizer": words.name, "pad": words.pad, "end": words.end, "vocabulary": words.size}


def reading_of(text: str, second: str | None, length: int, padding: str) -> dict[str, Any]:
    """Return the `info[TEXTS]` of a source of texts.

    It holds the columns of a table of such texts, the tokens of a sample and the side of padding.

    Raises:
        ConfigError: for an unknown side.
    """
    left_of(padding)
    columns = {"text": text} if second is None else {"text": text, "second": second}
    return {**columns, "length": length, "padding": padding}


def left_of(padding: str) -> bool:
    """Return whether rows are padded on the left.

    Raises:
        ConfigError: for an unknown side.
    """
    check_known("padding", padding, SIDES)
    return padding == "left"


def text_classes(
    name: str,
    frame: pd.DataFrame,
    tokenizer: str,
    length: int,
    padding: str,
    groups: Mapping[str, tuple[Tensor, tuple[str, ...]]] = {},
) -> Source:
    """Return a source of texts with a class.

    Args:
        name: of the source.
        frame: its columns `label` (a number), `label_text`, `split` and `text_a`, and `text_b` for pairs of texts.
        tokenizer, length, padding: as for `text`.
        groups: by kind of group, the group number of each sample, and the names.

    Raises:
        ConfigError: for an unknown side.
        DataError, MissingExtraError: a text or the tokenizer is missing.
    """
    frame = frame.rename(columns={"text_a": "text", "text_b": "second"})
    second = "second" if "second" in frame and bool(frame["second"].astype(bool).any()) else None
    reading = reading_of("text", second, length, padding)
    classes = frame.drop_duplicates("label").set_index("label")["label_text"].sort_index()
    return labelled(
        name,
        tokenized(name, frame, reading, tokenizer),
        frame["label"].tolist(),
        classes,
        test=torch.tensor((frame["split"] == "test").tolist()),
        info={**token_info(load_tokenizer(tokenizer)), TEXTS: reading},
        groups=groups,
    )


@data_source(
    "own texts with a label, in a table or a folder with one per client (options path, label, text, tokenizer, ...)",
    name="text_table",
)
def from_texts(
    path: str | Path | pd.DataFrame,
    label: str | Sequence[str],
    text: str = "text",
    second: str | None = None,
    client: str | None = None,
    task: Task = "classification",
    split: str | None = None,
    tokenizer: str = "byte",
    length: int = 64,
    padding: str = "right",
    sep: str | None = None,
    decimal: str | None = None,
) -> Source:
    """Return a source from a CSV, TSV or parquet file, a folder of such files, or a data frame, one text a row.

    Args:
        path: the file, a folder in which each file is the client of that name, or a data frame in memory.
        label, client, split: as for `tailorfl.data.own.from_table`.
        task: as for `tailorfl.data.own.from_table`; not generation.
        text: the column of texts.
        second: the column of a second text that goes with it, for pairs such as a question and a note; may be empty.
        tokenizer: byte, minilm, a folder, or a name on the Hugging Face hub; that of the model.
        length: tokens of a sample, marks included; a longer text keeps a third of them from its start, the rest from
            its end.
        padding: right for encoders, left for causal models.
        sep, decimal: as for `tailorfl.data.table_files.read_table`.

    Raises:
        ConfigError: for an unknown side, or a length with room for marks only.
        DataError, MissingExtraError: for an unreadable file, missing columns, empty cells, or a missing tokenizer.
    """
    check_known("task of texts", task, [kind for kind in get_args(Task) if kind != "generation"])
    labels = made_roles(label, client, split, features=text).label
    columns = [*labels, text, *(column for column in (second, split) if column is not None)]
    texts = [column for column in (text, second) if column is not None]
    name, frame, owners = owned_table(path, client, columns, sep=sep, decimal=decimal, exclude=texts)
    need_columns(name, frame, [*columns, *([client] if client is not None else [])])
    reading = reading_of(text, second, length, padding)
    if not len(frame):
        raise DataError(f"table '{name}' has no rows")
    y, outputs, classes = target_columns(name, frame, labels, task)
    test = None if split is None else test_column(name, frame, split)
    info = {**classes, **token_info(load_tokenizer(tokenizer)), TEXTS: reading, **reading_info(sep, decimal)}
    x = tokenized(name, frame, reading, tokenizer)
    return make_source(name, x, y, task, outputs, owners, test, info)


def tokenized(name: str, frame: pd.DataFrame, reading: Mapping[str, Any], tokenizer: str) -> Tensor:
    """Return int64 `[rows, length]` ids of the texts of a table.

    Args:
        name: of the table, for messages.
        frame: has the columns of the reading.
        reading: `Source.info["texts"]`.
        tokenizer: name of the tokenizer.

    Raises:
        DataError: a text is missing.
    """
    words, length = load_tokenizer(tokenizer), int(reading["length"])
    first = filled(name, frame, reading["text"]).astype(str)
    second: Iterable[Any] = repeat("", len(frame))
    if (column := reading.get("second")) is not None:
        second = frame[column].astype(object).where(frame[column].notna(), "").map(str)
    rows = [
        pair(words, a, b, length) if b else single(words, a, length)
        for a, b in zip(first, second, strict=True)
    ]
    return stacked(rows, length, words.pad, left=left_of(reading["padding"]))
