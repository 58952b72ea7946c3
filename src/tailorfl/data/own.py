"""A user's own data as sources: tensors, tables, frames, torch Datasets, folders of images, Hugging Face sets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tailorfl.data.columns import (
    check_features,
    make_source,
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
from tailorfl.data.labels import check_classes, from_zero, named
from tailorfl.data.preparation import TABLE, RawTable, by_constants
from tailorfl.data.registry import data_source
from tailorfl.data.scaling import Channels
from tailorfl.data.source import Source, Task
from tailorfl.data.summaries import made_roles
from tailorfl.data.table_files import joined, plain_frame, reading_info
from tailorfl.errors import DataError, check_known
from tailorfl.interface import check_kind
from tailorfl.settings.base import listed
from tailorfl.settings.data import DataConfig

if TYPE_CHECKING:
    import pandas as pd  # at run time only when tables are read: it takes 60 MB

    Data = Source | pd.DataFrame | Mapping[str, pd.DataFrame] | Dataset[Any]

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
    """Return a source from tensors or arrays.

    Args:
        x: `[samples, ...]`, images as `[samples, channels, height, width]`; uint8 with four axes stays an image
            set, everything else becomes float32.
        y: `[samples]` classes counted from 0 or their names for classification and binary; `[samples]` or
            `[samples, outputs]` for multilabel, regression and counts; `[samples, 2]` (event, time) for survival.
        clients: `[samples]` ids, numbers or names, or None for a set without natural clients.
        task: the meaning of `y`; the number of outputs follows from `y`.
        test: `[samples]` bool, True for test samples, or None for no given split.
        name: for messages and tables.
        scaling: of uint8 images; "train" scales a channel by its mean and deviation over the training part, "public",
            which sample-level privacy requires, to -1 ... 1.

    Raises:
        DataError: for lengths that differ, images with the channels last, classes that are not whole numbers or are
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
        argument: len(column)
        for argument, column in (("clients", owners), ("test", mask))
        if column is not None
    }
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{argument} has {length}" for argument, length in lengths.items())
        raise DataError(f"source '{name}': the numbers of samples differ: {counts}")
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


@data_source(
    "own table, or a folder with one per client: .csv, .tsv, .parquet (options path, label, client, ...)",
    name="table",
)
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
    na_values: str | float | Sequence[str | float] = (),
    min_count: int = 1,
    constants: str | Path | Constants | None = None,
    exclude: str | Sequence[str] = (),
    sep: str | None = None,
    decimal: str | None = None,
) -> Source:
    """Return a source from a CSV, TSV or parquet file, a folder of such files, or a data frame, one row a sample.

    Args:
        path: the file, a folder in which each file is the client of that name, or a data frame in memory.
        label: the target column, of any kind for classification and binary (values are numbered in sorted
            order and named in `info["classes"]`); for multilabel, regression and counts one column or several; for
            survival the columns (event, time).
        client: the column with the client of each row; None for a table without natural clients, and for a folder
            whose files are the clients.
        features: the input columns; by default every column without another role. Words and empty cells become numbers
            when a federation is built with `normalise`, after the split (`tailorfl.data.preparation`).
        task: the meaning of the label.
        split: the column that holds "train" or "test"; None for no given split.
        words, impute, indicator, na_values, min_count: as for `tailorfl.data.summaries.Roles`.
        constants: prepare the features at once by these, computed without any of the rows, or by a JSON file of them.
        exclude: columns that are not features, such as ids and dates.
        sep, decimal: as for `tailorfl.data.table_files.read_table`.

    Raises:
        DataError: for an unreadable file, missing columns, empty or non-numeric cells (names column and row).
    """
    import pandas as pd

    check_kind("path", path, str, Path, pd.DataFrame)
    check_kind("task", task, str)
    check_kind("constants", constants, str, Path, Constants, None)
    check_known("task", task, get_args(Task))
    options = {"features": features, "task": task, "words": words, "impute": impute, "indicator": indicator}
    roles = made_roles(label, client, split, exclude, na_values=na_values, min_count=min_count, **options)
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


CLIENT = "client"
"""The column with the client of each row, if each client has its own frame."""
ROLES = frozenset(inspect.signature(from_table).parameters) - {"path"}
"""Options of frames, see `from_table`."""
OF_DATASETS = frozenset({"clients", "task", "test", "scaling"})
"""Options of a torch Dataset, see `from_tensors`."""


def is_data(value: Any) -> bool:
    """Return whether a value is data, rather than settings."""
    import pandas as pd

    if isinstance(value, Mapping):
        settings = not value.keys().isdisjoint(DataConfig.model_fields)
        return not settings and any(isinstance(item, pd.DataFrame) for item in value.values())
    return isinstance(value, pd.DataFrame | Dataset | Source)


def as_source(data: Any, options: Mapping[str, Any]) -> Source:
    """Return a source of data in memory.

    Args:
        data: a frame, or one frame per client by name, with the options of `from_table`; a torch Dataset whose items
            are (x, y), with `clients`, `task`, `test` and `scaling` of `from_tensors`; or a Source, without options.
        options: of this kind of data.

    Raises:
        DataError: the data are none of these, or an option is missing or does not apply to them.
    """
    if isinstance(data, Source):
        _check_options(options, frozenset(), "a Source")
        return data
    if isinstance(data, Dataset):
        _check_options(options, OF_DATASETS, "a torch Dataset")
        x, y = _stacked(data)
        return from_tensors(x, y, **{"name": "dataset", **options})
    if not is_data(data):
        raise DataError(
            f"source is a {type(data).__name__}, but should be a pandas DataFrame, a DataFrame of each client by name, "
            "a torch Dataset, or a Source, such as the result of from_tensors(x, y, clients) in tailorfl.data.own"
        )
    several = isinstance(data, Mapping)
    _check_options(options, ROLES - ({CLIENT} if several else frozenset()), "a DataFrame")
    if "label" not in options:
        raise DataError("data is a DataFrame, which needs label=..., the name of the column to predict")
    if several:
        frames = _plain(data)
        made_roles(options["label"], exclude=options.get("exclude", ()))
        all_rows = joined(frames, CLIENT, listed(options.get("exclude", ())), listed(options["label"]))
        return from_table(all_rows, **{**options, CLIENT: CLIENT})
    return from_table(data, **options)


def _check_options(options: Mapping[str, Any], valid: frozenset[str], kind: str) -> None:
    for option in options:
        if option not in valid:
            takes = f"; valid options: {', '.join(sorted(valid))}" if valid else ""
            raise DataError(f"the data are {kind}, which does not take {option}=...{takes}")


def _plain(frames: Mapping[Any, Any]) -> dict[str, pd.DataFrame]:
    """Return each client's frame by its name."""
    import pandas as pd

    plain: dict[str, pd.DataFrame] = {}
    for name, frame in frames.items():
        if not isinstance(frame, pd.DataFrame):
            raise DataError(
                f"data should have one DataFrame per client, but '{name}' is a {type(frame).__name__}"
            )
        if str(name) in plain:
            raise DataError(f"data has two frames for client '{name}'; give each client one name")
        plain[str(name)] = plain_frame(frame)
        if CLIENT in frame.columns:
            raise DataError(
                f"the frame of '{name}' has a column '{CLIENT}', but each frame is a client already; rename or drop "
                f"it, or give one frame of all rows and {CLIENT}='{CLIENT}'"
            )
    return plain


def _stacked(dataset: Dataset[Any]) -> tuple[torch.Tensor, Any]:
    """Return the samples of a Dataset [samples, ...] and their targets; a PIL image becomes bytes, channels first."""
    try:
        items = [dataset[k] for k in range(len(dataset))]  # type: ignore[arg-type]
    except (TypeError, NotImplementedError) as error:
        raise DataError(
            f"{type(dataset).__name__} has no length or cannot be indexed, so its samples cannot be dealt to clients; "
            "give a Dataset with __len__ and __getitem__"
        ) from error
    if not items or not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise DataError(
            f"{type(dataset).__name__} should have at least one item, and every item should be a pair (x, y)"
        )
    try:
        x = torch.stack([_sample(item[0]) for item in items])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{type(dataset).__name__} has samples that are not numbers, or that differ in shape; let it return "
            "tensors of the same shape"
        ) from error
    targets = [np.asarray(item[1]) for item in items]
    if len({target.shape for target in targets}) > 1:
        raise DataError(f"{type(dataset).__name__} has targets that differ in shape")
    return x, np.stack(targets)


def _sample(x: Any) -> torch.Tensor:
    image = hasattr(x, "getbands")  # PIL's
    x = x.convert("RGB") if image and x.mode == "P" else x  # of which the bytes are numbers of a palette
    sample = torch.as_tensor(np.array(x) if image else x)
    if not image:
        return sample
    return sample.permute(2, 0, 1) if sample.dim() == 3 else sample[None]


def real_tensor(values: Any, name: str) -> Tensor:
    """Return `values` as a tensor.

    Args:
        values: numbers as a tensor, an array or nested lists.
        name: of the values, for messages.

    Raises:
        DataError: they are not such numbers, or sparse, or complex, of which float32 would keep only the real part.
    """
    try:
        if hasattr(values, "__array__") and not isinstance(values, Tensor | np.ndarray):
            values = np.array(values)  # a frame or a series, whose items torch would look up in its index
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(
            f"{name} must be an array of numbers, but is a {type(values).__name__} that cannot be converted to one"
        ) from error
    if tensor.is_complex():
        raise DataError(
            f"{name} holds complex numbers, of which only the real part would be kept; give real and imaginary parts "
            "as separate features"
        )
    if tensor.layout != torch.strided:
        raise DataError(f"{name} is a sparse tensor; give its to_dense()")
    if tensor.is_quantized or tensor.is_meta or not tensor.dim():
        raise DataError(f"{name} should be a plain array with one entry per sample")
    return tensor.detach()


def flags(values: Any, name: str) -> Tensor:
    """Return `values` as bool. Raises DataError for anything but True and False, 1 and 0."""
    values_tensor = real_tensor(values, name)
    if values_tensor.dtype != torch.bool and bool(((values_tensor != 0) & (values_tensor != 1)).any()):
        raise DataError(f"{name} should be True or False for each sample, but holds other values")
    return values_tensor.to(torch.bool)


def client_ids(clients: Any, name: str) -> pd.Series[Any]:
    """Return ids of any kind, one per sample. Raises DataError for anything else; `name` is the source's."""
    import pandas as pd

    try:
        ids = np.asarray(clients)
        if ids.dtype.kind == "U":
            "".join(ids.flat).encode()  # fails for lone surrogates, which no table or file can hold
    except (TypeError, ValueError) as error:
        raise DataError(
            f"source '{name}': clients cannot be read as one id per sample: {type(error).__name__}"
        ) from error
    if ids.ndim != 1 or (
        ids.dtype == object and any(isinstance(client_id, list | tuple | dict | set) for client_id in ids)
    ):
        raise DataError(
            f"source '{name}': clients should be names or numbers, one per sample, got a {type(clients).__name__} of "
            f"shape {list(ids.shape)}"
        )
    return pd.Series(ids, name="clients")
