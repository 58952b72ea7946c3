"""A user's own data: tensors, tables, image folders and Hugging Face datasets, by client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from tailorfl.data.folder import channel_scaling, from_folder, stack_images
from tailorfl.data.intake import check_roles, client_ids, flags, read_table, real_tensor
from tailorfl.data.labels import check_classes, from_zero, named
from tailorfl.data.scaling import Channels
from tailorfl.data.source import Source, Task, check_finite
from tailorfl.errors import DataError, MissingExtraError, nearest, unknown

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
            `[samples, outputs]` for multilabel and regression; `[samples, 2]` (event, time) for survival.
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
        check_classes(f"source '{name}': y", targets.numpy(force=True).reshape(-1))
    targets = _target_tensor(name, targets, task)
    if task == "classification":
        targets = from_zero(f"source '{name}': y", targets)
    info = {} if classes is None else {"classes": classes[1]}
    return _source(name, features, targets, task, _outputs(targets, task), owners, mask, info, scaling)


def from_table(
    path: str | Path | pd.DataFrame,
    label: str | Sequence[str],
    client: str | None = None,
    features: Sequence[str] | None = None,
    task: Task = "classification",
    split: str | None = None,
) -> Source:
    """A source from a CSV, TSV or parquet file, or a data frame, one row a sample.

    Args:
        path: the file, or a data frame in memory.
        label: the target column, of any kind for classification and binary (values are numbered in sorted
            order and named in `info["classes"]`); for multilabel and regression one column or several; for
            survival the columns (event, time).
        client: the column that says whose a row is; None for a table without natural clients.
        features: the numeric input columns; by default every column not named otherwise.
        task: what the label means.
        split: the column that holds "train" or "test"; None for no given split.

    Raises:
        DataError: for an unreadable file, missing columns, empty or non-numeric cells (names column and row).
    """
    name, frame = read_table(path)
    if task not in get_args(Task):
        raise unknown("task", str(task), get_args(Task))
    check_roles(label, client, features, split)
    labels = [label] if isinstance(label, str) else list(label)
    roles = [*labels, *(column for column in (client, split) if column is not None)]
    inputs = (
        [str(column) for column in frame.columns if column not in roles]
        if features is None
        else list(features)
    )
    _need_columns(name, frame, [*roles, *inputs])
    if not len(frame) or not inputs:
        raise DataError(
            f"table '{name}' has {len(frame)} rows and {len(inputs)} feature columns; both must be above 0"
        )
    y, outputs, classes = _target_columns(name, frame, labels, task)
    test = None if split is None else _test_column(name, frame, split)
    owners = None if client is None else _filled(name, frame, client)
    info = {"features": tuple(inputs)} | classes
    return _source(name, _numeric(name, frame, inputs), y, task, outputs, owners, test, info)


def from_datasets(
    dataset: Any,
    label: str,
    image: str | None = None,
    features: Sequence[str] | None = None,
    client: str | None = None,
    task: Task = "classification",
    scaling: Channels = "train",
) -> Source:
    """A source from a Hugging Face `datasets.Dataset`, or a `DatasetDict` of "train" and "test".

    Args:
        dataset: held in memory or on disk, not streamed.
        label: the target column; a `ClassLabel` keeps its numbers and names.
        image: the image column, or
        features: the numeric input columns; give exactly one of the two.
        client: the column that says whose a sample is.
        task: what the label means.
        scaling: of images, as in `from_tensors`.

    Raises:
        MissingExtraError: if `datasets` is not installed.
        DataError: for another type of data set, other parts than "train" and "test", or a column as in
            `from_table`.
    """
    try:
        import datasets
    except ImportError as missing:
        raise MissingExtraError("datasets", "data") from missing
    if isinstance(dataset, datasets.Dataset):
        parts = {"train": dataset}
    elif (
        isinstance(dataset, datasets.DatasetDict) and "train" in dataset and set(dataset) <= {"train", "test"}
    ):
        parts = {part: dataset[part] for part in ("train", "test") if part in dataset}
    else:
        found = f"with parts {', '.join(dataset)}" if isinstance(dataset, Mapping) else ""
        raise DataError(
            f"expected a datasets.Dataset or a DatasetDict with the parts 'train' and 'test', "
            f"but got a {type(dataset).__name__} {found}".rstrip()
        )
    if (image is None) == (features is None):
        raise DataError(
            "give either image= (one column) or features= (numeric columns), not both and not neither"
        )
    name = "datasets"
    columns = [label, *(features or []), *([] if client is None else [client])]
    first = parts["train"]
    _need_columns(
        name, pd.DataFrame(columns=first.column_names), [*columns, *([] if image is None else [image])]
    )
    frame = pd.concat(
        [part.select_columns(columns).to_pandas() for part in parts.values()], ignore_index=True
    )
    test = torch.arange(len(frame)) >= len(first) if "test" in parts else None
    kind = first.features[label]
    if task == "classification" and isinstance(kind, datasets.ClassLabel):
        y, outputs = (
            torch.from_numpy(_filled(name, frame, label).to_numpy(dtype=np.int64, copy=True)),
            len(kind.names),
        )
        classes: dict[str, Any] = {"classes": tuple(kind.names)}
    else:
        y, outputs, classes = _target_columns(name, frame, [label], task)
    if image is not None:
        pictures = chain.from_iterable(part[image] for part in parts.values())
        x = stack_images(pictures, [f"row {row}" for row in range(len(frame))])
    else:
        x = _numeric(name, frame, list(features or []))
    owners = None if client is None else _filled(name, frame, client)
    return _source(name, x, y, task, outputs, owners, test, classes, scaling)


def _source(
    name: str,
    x: Tensor,
    y: Tensor,
    task: Task,
    outputs: int,
    owners: pd.Series[Any] | None,
    test: Tensor | None,
    info: Mapping[str, Any],
    scaling: Channels = "train",
) -> Source:
    if not len(x) or (test is not None and bool(test.all())):
        raise DataError(f"source '{name}' has no training samples")
    groups, names, mean, std = {}, {}, None, None
    if owners is not None:
        ids, found = _numbered(owners)
        groups, names = {"client": ids}, {"client": found}
    if x.dtype == torch.uint8:
        mean, std, scaled = channel_scaling(x if test is None else x[~test], scaling)
        info = {**info, **scaled}
    source = Source(name, x, y, task, outputs, test, groups, names, mean, std, info)
    check_finite(source)
    return source


def _need_columns(name: str, frame: pd.DataFrame, columns: Sequence[str]) -> None:
    known = [str(column) for column in frame.columns]
    for column in columns:
        if column not in known:
            hint = nearest(column, known)
            suggestion = f" Did you mean '{hint}'?" if hint else ""
            raise DataError(
                f"table '{name}' has no column '{column}'.{suggestion} Columns: {', '.join(known)}."
            )
    repeated = sorted({column for column in columns if columns.count(column) > 1})
    if repeated:
        raise DataError(
            f"table '{name}': column '{repeated[0]}' is used for two things (label, client, split, feature)"
        )


def _bad_cell(name: str, column: str, bad: Any, what: str) -> DataError:
    rows = np.flatnonzero(np.asarray(bad))
    return DataError(
        f"table '{name}': column '{column}' {what} in {len(rows)} of {len(bad)} rows, "
        f"the first is row {rows[0]} (the first data row is 0)"
    )


def _filled(name: str, frame: pd.DataFrame, column: str) -> pd.Series[Any]:
    values = frame[column]
    if values.isna().any():
        raise _bad_cell(name, column, values.isna(), "is empty (NaN)")
    return values


def _numeric(name: str, frame: pd.DataFrame, columns: Sequence[str]) -> Tensor:
    """float32 `[rows, columns]`, every cell a finite number."""
    numbers = []
    for column in columns:
        values = _filled(name, frame, column)
        if np.iscomplexobj(values):
            raise DataError(
                f"table '{name}': column '{column}' holds complex numbers, of which a part would be lost"
            )
        # text first: dates and categories would otherwise turn into numbers that mean nothing
        plain = values if pd.api.types.is_numeric_dtype(values) else values.astype(str)
        parsed = pd.to_numeric(plain, errors="coerce")
        if parsed.isna().any():
            first = values[parsed.isna()].iloc[0]
            raise _bad_cell(name, column, parsed.isna(), f"is not a number (for example '{str(first)[:50]}')")
        with np.errstate(over="ignore"):
            array = parsed.to_numpy(dtype=np.float32)
        if not np.isfinite(array).all():
            raise _bad_cell(name, column, ~np.isfinite(array), "is infinite, or too large for float32,")
        numbers.append(array)
    return torch.from_numpy(np.stack(numbers, axis=1))


def _numbered(values: pd.Series[Any]) -> tuple[Tensor, tuple[str, ...]]:
    """int64 ids in sorted order of the values, and the values as names; mixed types are taken as text."""
    if values.isna().any():
        raise _bad_cell("tensors", str(values.name), values.isna(), "is empty (NaN)")
    plain = values.astype(str) if values.dtype == object else values
    ids, found = pd.factorize(plain, sort=True)
    return torch.from_numpy(np.asarray(ids, dtype=np.int64)), tuple(str(value) for value in found)


def _target_columns(
    name: str, frame: pd.DataFrame, labels: Sequence[str], task: Task
) -> tuple[Tensor, int, dict[str, Any]]:
    """(y, outputs, {"classes": names} for a task with classes) from the label columns."""
    if task not in ("classification", "binary"):
        y = _target_tensor(name, _numeric(name, frame, labels), task)
        return y, _outputs(y, task), {}
    if len(labels) != 1:
        raise DataError(f"table '{name}': a {task} task has one label column, but {len(labels)} are given")
    column = _filled(name, frame, labels[0])
    if task == "classification":
        check_classes(
            f"table '{name}': column '{labels[0]}'", column, "task='regression' (data.options.task)"
        )
    ids, classes = _numbered(column)
    if task == "binary" and len(classes) != 2:
        shown = ", ".join(classes[:10])
        raise DataError(
            f"table '{name}': a binary label has two values, but '{labels[0]}' has {len(classes)}: {shown}"
        )
    return ids, 1 if task == "binary" else len(classes), {"classes": classes}


def _test_column(name: str, frame: pd.DataFrame, split: str) -> Tensor:
    part = _filled(name, frame, split)
    if not part.isin(["train", "test"]).all():
        raise _bad_cell(name, split, ~part.isin(["train", "test"]), "is neither 'train' nor 'test'")
    return torch.from_numpy((part == "test").to_numpy(dtype=bool, copy=True))


def _target_tensor(name: str, y: Tensor, task: Task) -> Tensor:
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


def _outputs(y: Tensor, task: Task) -> int:
    if task == "classification":
        return int(y.max()) + 1 if y.numel() else 1
    return 1 if task in ("binary", "survival") else y.shape[1]
