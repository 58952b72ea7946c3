"""A user's own data: tensors, tables, image folders and Hugging Face datasets, by client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from tailorfl.arguments import check_kind
from tailorfl.data.columns import (
    check_features,
    name_doubles,
    need_columns,
    outputs_of,
    owned_table,
    target_columns,
    target_tensor,
    test_column,
)
from tailorfl.data.constants import Constants
from tailorfl.data.folder import from_folder
from tailorfl.data.huggingface import from_datasets
from tailorfl.data.intake import check_roles, client_ids, flags, real_tensor
from tailorfl.data.labels import check_classes, from_zero, named
from tailorfl.data.making import make_source
from tailorfl.data.preparing import TABLE, RawTable, by_constants
from tailorfl.data.scaling import Channels
from tailorfl.data.source import Source, Task
from tailorfl.data.summaries import made_roles
from tailorfl.data.table_files import reading_info
from tailorfl.errors import DataError, unknown

if TYPE_CHECKING:
    import pandas as pd  # at run time only where tables are read: it takes 60 MB

__all__ = ["from_datasets", "from_folder", "from_table", "from_tensors"]


def from_tensors(
    x: Any,
    y: Any,
    clients: Any = None,
    task: Task = "classification",
    test: Any = None,
    name: str = "tensors",
    scaling: Channels = "train",
) -> Source:
    """A source from tensors or arrays.

    Args:
        x: `[samples, ...]`, images as `[samples, channels, height, width]`; uint8 with four axes stays an image
            set, everything else becomes float32.
        y: `[samples]` classes counted from 0 or their names for classification and binary; `[samples]` or
            `[samples, outputs]` for multilabel, regression and counts; `[samples, 2]` (event, time) for survival.
        clients: `[samples]` ids, numbers or names, or None for a set without natural clients.
        task: what `y` means; the number of outputs follows from `y`.
        test: `[samples]` bool, True for test samples, or None for no given split.
        name: for messages and tables.
        scaling: of uint8 images; "train" scales a channel by its mean and deviation over the training part, "public",
            which privacy of a sample needs, to -1 ... 1.

    Raises:
        DataError: for lengths that differ, images with the channels last, classes that are no whole numbers or are
            counted from 1, missing ids, NaN or infinity.
    """
    check_kind("task", task, str)
    classes = named(y) if task in ("classification", "binary") else None
    features = real_tensor(x, f"source '{name}': x")
    targets = real_tensor(y, f"source '{name}': y") if classes is None else classes[0]
    owners = None if clients is None else client_ids(clients, name)
    mask = None if test is None else flags(test, f"source '{name}': test")
    lengths = {"x": len(features), "y": len(targets)}
    lengths |= {
        what: len(column) for what, column in (("clients", owners), ("test", mask)) if column is not None
    }
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{what} has {length}" for what, length in lengths.items())
        raise DataError(f"source '{name}': samples differ in number: {counts}")
    if features.dtype != torch.uint8 or features.dim() != 4:
        features = features.to(torch.float32)
    if task == "classification":
        numbers = targets.numpy(force=True).reshape(-1)
        check_classes(f"source '{name}': y", numbers if classes is None else np.array(classes[1])[numbers])
    targets = target_tensor(name, targets, task)
    if task == "classification":
        targets = from_zero(f"source '{name}': y", targets)
    info = {} if classes is None else {"classes": classes[1]}
    return make_source(name, features, targets, task, outputs_of(targets, task), owners, mask, info, scaling)


def from_table(
    path: str | Path | pd.DataFrame,
    label: str | Sequence[str],
    client: str | None = None,
    features: Sequence[str] | None = None,
    task: Task = "classification",
    split: str | None = None,
    words: str | Sequence[str] = (),
    impute: Literal["mean", "median"] = "mean",
    indicator: bool = False,
    na_values: str | Sequence[str] = (),
    min_count: int = 1,
    constants: str | Path | Constants | None = None,
    exclude: str | Sequence[str] = (),
    sep: str | None = None,
    decimal: str | None = None,
) -> Source:
    """A source from a CSV, TSV or parquet file, a folder of such files, or a data frame, one row a sample.

    Args:
        path: the file, a folder in which each file is a client of its name, or a data frame in memory.
        label: the target column, of any kind for classification and binary (values are numbered in sorted
            order and named in `info["classes"]`); for multilabel, regression and counts one column or several; for
            survival the columns (event, time).
        client: the column that says whose a row is; None for a table without natural clients, and for a folder
            whose files are the clients.
        features: the input columns; by default every column not named otherwise. Words and empty cells become numbers
            when a federation is built with `normalise`, after the split (`tailorfl.data.preparing`).
        task: what the label means.
        split: the column that holds "train" or "test"; None for no given split.
        words, impute, indicator, na_values, min_count: how features are prepared, see `tailorfl.data.summaries.Roles`.
        constants: prepare the features at once by these, which looked at none of the rows; or a JSON file of them.
        exclude: columns that are no features, such as ids and dates.
        sep, decimal: how a text file is written, see `tailorfl.data.table_files.read_table`; by default found out.

    Raises:
        DataError: for an unreadable file, missing columns, empty or non-numeric cells (names column and row).
    """
    import pandas as pd

    check_kind("path", path, str, Path, pd.DataFrame)
    check_kind("task", task, str)
    check_kind("constants", constants, str, Path, Constants, None)
    if task not in get_args(Task):
        raise unknown("task", str(task), get_args(Task))
    check_roles(label, client, features, split, words, na_values, exclude)
    roles = made_roles(
        label, client, features, task, split, words, impute, indicator, na_values, min_count, exclude
    )
    excluded = [column for column in roles.others if column not in (client, split)]
    reading: dict[str, Any] = {"sep": sep, "decimal": decimal, "exclude": excluded}
    needed = [*roles.label, *((split,) if split is not None else ())]
    name, frame, owners = owned_table(path, client, needed, **reading)
    inputs = roles.inputs(frame)
    need_columns(name, frame, [*roles.label, *roles.others, *(roles.features or inputs)])
    if not len(frame) or not inputs:
        raise DataError(
            f"table '{name}' has {len(frame)} rows and {len(inputs)} feature columns; both must be above 0"
        )
    check_features(name, frame, inputs, roles.words)
    y, outputs, classes = target_columns(name, frame, roles.label, task, roles.na_values)
    name_doubles(name, frame[[*roles.label, *inputs, *excluded]])
    test = None if split is None else test_column(name, frame, split)
    table = RawTable(frame, roles)
    info = {
        "features": tuple(inputs),
        "label": roles.label,
        **classes,
        TABLE: table,
        **reading_info(**reading),
    }
    source = make_source(name, table.numbers(name), y, task, outputs, owners, test, info, unprepared=True)
    return source if constants is None else by_constants(source, constants)
