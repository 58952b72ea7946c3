"""Columns of a table as tensors: features, targets and ids, with every cell that does not fit named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from tailorfl.data.intake import FILE, read_table
from tailorfl.data.labels import check_classes
from tailorfl.data.source import Task
from tailorfl.data.words import in_order, words_in
from tailorfl.errors import DataError, nearest
from tailorfl.printable import shown

MOST_COLUMNS = 50_000
"""Of a table: each is looked at for words and gaps, which takes half a millisecond."""


def need_columns(name: str, frame: pd.DataFrame, columns: Sequence[str]) -> None:
    """Nothing if a table has these columns, none of them twice. Raises DataError with the nearest name."""
    known = dict.fromkeys(str(column) for column in frame.columns)
    if len(known) > MOST_COLUMNS:
        raise DataError(
            f"table '{name}' has {len(known):,} columns; at most {MOST_COLUMNS:,} are looked at one by one. Hand so "
            "many numbers over as an array: from_tensors(x, y, clients) of tailorfl.data.own"
        )
    for column in columns:
        if column not in known:
            hint = nearest(column, known)
            suggestion = f" Did you mean '{hint}'?" if hint else ""
            raise DataError(
                f"table '{name}' has no column {shown(column)}.{suggestion} Columns: {', '.join(known)}."
            )
    repeated = sorted(column for column, times in Counter(columns).items() if times > 1)
    if repeated:
        raise DataError(
            f"table '{name}': column '{repeated[0]}' is used for two things (label, client, split, feature)"
        )


def bad_cell(name: str, column: str, bad: Any, what: str) -> DataError:
    """Returns the error that names a column, how many of its cells are `bad` `[rows]`, and the first of them."""
    rows = np.flatnonzero(np.asarray(bad))
    return DataError(
        f"table '{name}': column '{column}' {what} in {len(rows)} of {len(bad)} rows, "
        f"the first is row {rows[0]} (the first data row is 0)"
    )


def filled(name: str, frame: pd.DataFrame, column: str) -> pd.Series[Any]:
    """Returns a column. Raises DataError where a cell is empty."""
    values = frame[column]
    if values.isna().any():
        raise bad_cell(name, column, values.isna(), "is empty (NaN)")
    return values


def owned_table(
    table: str | Path | pd.DataFrame, client: str | None
) -> tuple[str, pd.DataFrame, pd.Series[Any] | None]:
    """(name, frame, whose each row is) of a table; of a folder the files are the clients unless a column is named.

    Raises:
        DataError: it cannot be read, or has no column `client`, or an empty cell there.
    """
    name, frame = read_table(table)
    owners = None
    if not isinstance(table, pd.DataFrame) and Path(table).expanduser().is_dir():
        if client is None:
            owners = frame[FILE]
        if client != FILE:
            frame = frame.drop(columns=FILE)
    if client is not None:
        need_columns(name, frame, [client])
        owners = filled(name, frame, client)
    return name, frame, owners


def numeric(name: str, frame: pd.DataFrame, columns: Sequence[str]) -> Tensor:
    """float32 `[rows, columns]`, every cell a finite number."""
    numbers = []
    for column in columns:
        values = filled(name, frame, column)
        if np.iscomplexobj(values):
            raise DataError(
                f"table '{name}': column '{column}' holds complex numbers, of which a part would be lost"
            )
        # text first: dates and categories would otherwise turn into numbers that mean nothing
        plain = values if pd.api.types.is_numeric_dtype(values) else values.astype(str)
        parsed = pd.to_numeric(plain, errors="coerce")
        if parsed.isna().any():
            raise bad_cell(name, column, parsed.isna(), "is not a number")
        with np.errstate(over="ignore"):
            array = parsed.to_numpy(dtype=np.float32)
        if not np.isfinite(array).all():
            raise bad_cell(name, column, ~np.isfinite(array), "is infinite, or too large for float32,")
        numbers.append(array)
    return torch.from_numpy(np.stack(numbers, axis=1))


def numbered(values: pd.Series[Any]) -> tuple[Tensor, tuple[str, ...]]:
    """int64 ids in sorted order of the values, and the values as names; mixed types are taken as text."""
    if values.isna().any():
        raise bad_cell("tensors", str(values.name), values.isna(), "is empty (NaN)")
    plain = values.astype(str) if values.dtype == object else values
    ids, found = pd.factorize(plain, sort=True)
    return torch.from_numpy(np.asarray(ids, dtype=np.int64)), tuple(str(value) for value in found)


def target_columns(
    name: str, frame: pd.DataFrame, labels: Sequence[str], task: Task
) -> tuple[Tensor, int, dict[str, Any]]:
    """(y, outputs, {"classes": names} for a task with classes) from the label columns."""
    if task not in ("classification", "binary"):
        y = target_tensor(name, numeric(name, frame, labels), task)
        return y, outputs_of(y, task), {}
    classes = class_names(name, frame, labels)
    column = frame[labels[0]]
    if task == "classification":
        check_classes(
            f"table '{name}': column '{labels[0]}'", column, "task='regression' (data.options.task)"
        )
    if task == "binary" and len(classes) != 2:
        shown = ", ".join(classes[:10])
        raise DataError(
            f"table '{name}': a binary label has two values, but '{labels[0]}' has {len(classes)}: {shown}"
        )
    y = class_numbers(name, frame, labels[0], classes)
    return y, 1 if task == "binary" else len(classes), {"classes": classes}


def class_names(name: str, frame: pd.DataFrame, labels: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the classes of a label column, in order.

    Raises:
        DataError: there are several such columns, or a cell is empty.
    """
    if len(labels) != 1:
        raise DataError(
            f"table '{name}': a task with classes has one label column, but {len(labels)} are given"
        )
    return tuple(in_order(words_in(filled(name, frame, labels[0]))))


def class_numbers(name: str, frame: pd.DataFrame, label: str, classes: Sequence[str]) -> Tensor:
    """int64 `[rows]` place of each row's class among `classes`. Raises DataError for a class that is none of them."""
    place = {known: number for number, known in enumerate(classes)}
    words = words_in(filled(name, frame, label))
    if unknown := [word for word in words if word not in place]:
        shown = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
        raise DataError(f"class '{unknown[0]}' does not occur in the training data, which have {shown}")
    return torch.tensor([place[word] for word in words], dtype=torch.int64)


def test_column(name: str, frame: pd.DataFrame, split: str) -> Tensor:
    """Returns `[rows]` bool of a column of 'train' and 'test'. Raises DataError for anything else."""
    part = filled(name, frame, split)
    if not part.isin(["train", "test"]).all():
        raise bad_cell(name, split, ~part.isin(["train", "test"]), "is neither 'train' nor 'test'")
    return torch.from_numpy((part == "test").to_numpy(dtype=bool, copy=True))


def target_tensor(name: str, y: Tensor, task: Task) -> Tensor:
    """`y` in the shape and type that the task asks for."""
    if task in ("classification", "binary"):
        whole = y.to(torch.int64)
        if not torch.equal(whole.to(y.dtype), y):
            raise DataError(
                f"source '{name}': classes must be whole numbers counted from 0; for numbers to be predicted set "
                "task='regression'"
            )
        return whole
    y = y.to(torch.float32)
    if y.dim() == 1:
        y = y.unsqueeze(1)
    if task in ("multilabel", "survival"):
        flags = y if task == "multilabel" else y[:, :1]
        if not ((flags == 0) | (flags == 1)).all():
            what = "labels" if task == "multilabel" else "events (the first of the two targets)"
            raise DataError(f"source '{name}': {what} of a {task} task must be 0 or 1")
    return y


def outputs_of(y: Tensor, task: Task) -> int:
    """Returns how many outputs a model needs for targets `y` of a task."""
    if task == "classification":
        return int(y.max()) + 1 if y.numel() else 1
    return 1 if task in ("binary", "survival") else y.shape[1]
