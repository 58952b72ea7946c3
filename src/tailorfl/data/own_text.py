"""A user's own texts with a label: a table with a column of texts, or of pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor

from tailorfl.data.columns import filled, need_columns, owned_table, target_columns, test_column
from tailorfl.data.intake import check_roles
from tailorfl.data.making import make_source
from tailorfl.data.source import Source, Task
from tailorfl.data.table_files import reading_info
from tailorfl.data.text import TEXTS, left_of, reading_of, token_info
from tailorfl.data.tokenizers import load_tokenizer, pair, single, stacked
from tailorfl.errors import DataError, unknown

if TYPE_CHECKING:
    import pandas as pd  # at run time only where tables are read: it takes 60 MB


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
    """A source from a CSV, TSV or parquet file, a folder of such files, or a data frame, one text a row.

    Args:
        path: the file, a folder in which each file is a client of its name, or a data frame in memory.
        label, client, task, split: as for `tailorfl.data.own.from_table`; no generation.
        text: the column of texts.
        second: the column of a second text that goes with it, for pairs such as a question and a note; may be empty.
        tokenizer: byte, minilm, a folder, or a name on the Hugging Face hub; that of the model.
        length: tokens of a sample, marks included; of a longer text, the first third and the last two are kept.
        padding: right for encoders, left for causal models.
        sep, decimal: how a text file is written, see `tailorfl.data.table_files.read_table`; by default found out.

    Raises:
        ConfigError: for an unknown side, or a length that marks fill.
        DataError, MissingExtraError: for an unreadable file, missing columns, empty cells, or a missing tokenizer.
    """
    if task not in get_args(Task) or task == "generation":
        raise unknown("task of texts", str(task), [one for one in get_args(Task) if one != "generation"])
    check_roles(label, client, text, split)
    labels = [label] if isinstance(label, str) else list(label)
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
    """int64 `[rows, length]` ids of the texts of a table.

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
    second = reading.get("second")
    if second is None:
        rows = [single(words, one, length) for one in first]
    else:
        others = frame[second].astype(object).where(frame[second].notna(), "")
        rows = [
            pair(words, one, str(other), length) if str(other) else single(words, one, length)
            for one, other in zip(first, others, strict=True)
        ]
    return stacked(rows, length, words.pad, left=left_of(reading["padding"]))
