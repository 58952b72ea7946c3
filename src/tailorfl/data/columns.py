"""Columns of a table: cells, features, targets and ids as tensors; errors name every cell that does not fit."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailorfl.data.folder import channel_scaling
from tailorfl.data.labels import FEW_ROWS, check_classes
from tailorfl.data.scaling import Channels
from tailorfl.data.source import Source, Task, check_finite
from tailorfl.data.table_files import FILE, SHOWN, is_unnamed, read_table
from tailorfl.errors import DataError, did_you_mean, first_few
from tailorfl.printable import shown

if TYPE_CHECKING:
    import pandas as pd  # at run time only when tables are read: it takes 60 MB

Floats = NDArray[np.float64]
Kind = Literal["number", "word", "empty"]
_DECIMAL = re.compile(r"[+-]?\d+(\.\d+)?")
BOOLEANS = ("true", "TRUE", "false", "FALSE")
"""Words that pandas reads as True and False in a column without other words."""
_SEVERAL = (list, tuple, dict, set, bytes, np.ndarray)
"""Types that one cell cannot have."""
_DATE = re.compile(r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})([ T]\d{1,2}:\d\d.*)?")


def bad_cell(name: str, column: str, bad: Any, problem: str) -> DataError:
    """Return the error that names a column, how many of its cells are `bad` `[rows]`, and the first of them."""
    rows = np.flatnonzero(np.asarray(bad))
    return DataError(
        f"table '{name}': column '{column}' {problem} in {len(rows)} of {len(bad)} rows, "
        f"the first is row {rows[0]} (the first data row is 0)"
    )


def tidy(values: pd.Series[Any], na_values: Sequence[str]) -> pd.Series[Any]:
    """Return a column as plain Python values; blanks, `na_values` and what pandas calls missing are NaN.

    Raises:
        DataError: cells are lists, records or bytes.
    """
    import pandas as pd

    if pd.api.types.is_numeric_dtype(values) and not na_values:
        return values
    plain = values.astype(object)
    stripped = plain[plain.notna()].map(_stripped)
    several = [type(value).__name__ for value in stripped if isinstance(value, _SEVERAL)]
    if several:
        raise DataError(
            f"column '{values.name}' holds a value of type {several[0]} in {len(several)} of {len(values)} rows, but a "
            "cell should hold one number or word; split it into several columns, or leave it out with "
            "data.options.exclude"
        )
    filled_cells = stripped[[value != "" and word_of(value) not in na_values for value in stripped]]
    if len(filled_cells) == len(plain) and pd.api.types.is_numeric_dtype(values):
        return values
    return filled_cells.reindex(plain.index)


def kind_of(values: pd.Series[Any]) -> Kind:
    """Return the kind of a tidy column: "number" (True and False are 1 and 0), "word" or "empty"."""
    filled_cells = values[values.notna()]
    if filled_cells.empty:
        return "empty"
    return "word" if _parsed(filled_cells).isna().any() else "number"


def numbers_of(table: str, column: str, values: pd.Series[Any]) -> Floats:
    """Return a tidy column as float64 `[rows]`, NaN where a cell is missing.

    Raises:
        DataError: a cell is not a number, or too large for float32; names the column and the first such row.
    """
    is_filled = values.notna().to_numpy()
    filled_cells = values[is_filled]
    if np.iscomplexobj(filled_cells) or (
        filled_cells.dtype == object and any(isinstance(value, complex) for value in filled_cells)
    ):
        raise DataError(
            f"table '{table}': column '{column}' holds complex numbers, whose imaginary parts would be lost"
        )
    parsed = _parsed(filled_cells)
    numbers = np.full(len(values), np.nan)
    numbers[is_filled] = parsed.to_numpy(dtype=np.float64)
    wrong = is_filled & np.isnan(numbers)
    if wrong.any():
        raise bad_cell(table, column, wrong, "is not a number")
    with np.errstate(over="ignore"):
        infinite = np.isinf(numbers.astype(np.float32))
    if infinite.any():
        raise bad_cell(table, column, infinite, "is infinite, or too large for float32,")
    return numbers


def words_of(values: pd.Series[Any]) -> list[str | None]:
    """Return the words of a tidy column, None where a cell is missing."""
    is_filled = values.notna().to_numpy()
    return [word_of(value) if has_word else None for value, has_word in zip(values, is_filled, strict=True)]


def word_of(value: Any) -> str:
    """Return a cell as a word; 1, 1.0 and "1.0" give the same, and True and "TRUE", as other cells decide the form."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, str) and not is_decimal(value.strip()):
        return value.strip().capitalize() if value.strip() in BOOLEANS else value.strip()
    if isinstance(value, str | int | float | np.integer | np.floating):
        number = float(value)
        if number.is_integer():
            return str(int(number)) if abs(number) < 2**53 else str(value).strip()
        return str(number)
    return str(value)


def words_in(values: pd.Series[Any]) -> list[str]:
    """Return the words of a column without empty cells."""
    import pandas as pd

    if values.dtype == object:  # factorize takes True and 1 for the same key
        return [word_of(value) for value in values]
    codes, different = pd.factorize(values)
    names = [word_of(value) for value in different]
    return [names[code] for code in codes]


def in_order(words: Sequence[str]) -> list[str]:
    """Return the distinct words, numbers first; the order of two words does not depend on the others."""
    numbers = {word: float(word) for word in words if is_decimal(word)}
    return sorted(set(words), key=lambda word: (word not in numbers, numbers.get(word, 0.0), word))


def is_date(word: str) -> bool:
    """Return whether a word is a date, with or without a time, such as 2024-03-01, 1.3.2024 or 3/1/24 10:30."""
    return _DATE.fullmatch(word) is not None


def is_decimal(word: str) -> bool:
    """Return whether a word is a number."""
    return _DECIMAL.fullmatch(word) is not None


def _stripped(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _parsed(cells: pd.Series[Any]) -> pd.Series[Any]:
    """Return non-empty cells as numbers, NaN for those that are not numbers."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(cells):
        return cells
    # text first: dates and categories would otherwise turn into numbers that mean nothing
    texts = [str(float(value)) if isinstance(value, bool | np.bool_) else str(value) for value in cells]
    return pd.to_numeric(pd.Series(texts, cells.index, dtype=str), errors="coerce")


log = logging.getLogger(__name__)

FEW = 5
"""Maximum number of classes that a message names; a longer list may be names of persons."""
MOST_COLUMNS = 50_000
"""Maximum number of columns of a table; checking one for words and gaps takes half a millisecond."""


def need_columns(name: str, frame: pd.DataFrame, columns: Sequence[str]) -> None:
    """Check that a table has these columns and none is listed twice. Raises DataError with the nearest name."""
    present = dict.fromkeys(str(column) for column in frame.columns)
    if len(present) > MOST_COLUMNS:
        raise DataError(
            f"table '{name}' has {len(present):,} columns; a table has at most {MOST_COLUMNS:,}. Pass so many numbers "
            "as an array: from_tensors(x, y, clients) of tailorfl.data.own"
        )
    for column in columns:
        if column not in present:
            raise DataError(
                f"table '{name}' has no column {shown(column)}.{did_you_mean(column, present)} "
                f"Columns: {first_few(list(present), SHOWN)}."
            )
    repeated = sorted(column for column, times in Counter(columns).items() if times > 1)
    if repeated:
        raise DataError(
            f"table '{name}': column '{repeated[0]}' is given more than one role (label, client, split, exclude, "
            "feature); give it only one"
        )


def check_features(name: str, frame: pd.DataFrame, features: Sequence[str], words: Sequence[str]) -> None:
    """Check that columns can be features; warn of those that look like row numbers or dates.

    Raises:
        DataError: a feature has no name, or one of `words` is not a feature; names the nearest.
    """
    for word in words:
        if word not in features:
            raise DataError(
                f"table '{name}': words names {shown(word)}, which is not a feature.{did_you_mean(word, features)} "
                f"Features: {first_few(features, SHOWN)}."
            )
    unnamed = [feature for feature in features if is_unnamed(feature)]
    if unnamed:
        raise DataError(
            f"table '{name}': a column has no name ('{unnamed[0]}' here), such as the index that pandas writes; leave "
            f"it out with data.options.exclude=['{unnamed[0]}'], or give it a name"
        )
    for feature in features:
        kind = "" if feature in words else _no_measurement(frame[feature])
        if kind:
            text = (
                f"table '{name}': column '{feature}' looks like {kind} but is used as a feature; leave it out with "
                f"data.options.exclude=[{feature}]"
            )
            log.warning("%s", text, extra={"once": text})


def _no_measurement(values: pd.Series[Any]) -> str:
    """Return a description of whole numbers that do not look like measurements, otherwise ""."""
    import pandas as pd

    if pd.api.types.is_float_dtype(values) and values.isna().any():
        filled_cells = values.dropna()  # whole numbers are read as floats if a cell is empty
        if (filled_cells % 1 == 0).all() and filled_cells.abs().max() < 2**53:
            values = filled_cells.astype(np.int64)
    if not pd.api.types.is_integer_dtype(values) or len(values) <= FEW_ROWS or values.isna().any():
        return ""
    numbers = values.to_numpy(dtype=np.int64)
    if (np.diff(numbers) > 0).all():
        return "a row or patient number (it increases from row to row)"
    month, day = numbers // 100 % 100, numbers % 100
    of_our_time = (numbers >= 19_000_101) & (numbers <= 21_001_231)
    if (of_our_time & (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)).all():
        return "dates (year, month and day)"
    return ""


def name_doubles(name: str, frame: pd.DataFrame) -> None:
    """Warn of rows that repeat another row in every column: a patient may be in both training and test part."""
    import pandas as pd

    plain = frame.astype({c: str for c in frame.columns if not pd.api.types.is_numeric_dtype(frame[c])})
    doubles = int(plain.duplicated().sum())
    if doubles:
        text = (
            f"table '{name}': {doubles} of {len(frame)} rows are exact copies of other rows; remove them unless they "
            "are different patients, since copies may be in both the training and the test part"
        )
        log.warning("%s", text, extra={"once": text})


def filled(name: str, frame: pd.DataFrame, column: str, na_values: Sequence[str] = ()) -> pd.Series[Any]:
    """Return a column. Raise DataError if a cell is empty, blank, or one of `na_values`."""
    values = frame[column]
    empty = tidy(values, na_values).isna()
    if empty.any():
        raise bad_cell(name, column, empty, "is empty (or NA, None, NaN or null)")
    return values


def owned_table(
    table: str | Path | pd.DataFrame, client: str | None, needed: Sequence[str], **reading: Any
) -> tuple[str, pd.DataFrame, pd.Series[Any] | None]:
    """Return (name, frame, client of each row); the files of a folder are the clients unless a column is named.

    Args:
        table: a file, a folder or a frame.
        client: the column with the client of each row.
        needed: columns that every file of a folder must have.
        reading: options of `read_table`.

    Raises:
        DataError: it cannot be read, or has no column `client`, or an empty cell there.
    """
    import pandas as pd

    named = [column for column in (*needed, client) if column is not None]
    name, frame = read_table(table, **reading, needed=named)
    owners = None
    if not isinstance(table, pd.DataFrame) and Path(table).expanduser().is_dir():
        if client is None:
            owners = frame[FILE]
        if client != FILE:
            frame = frame.drop(columns=FILE)
    if client is not None:
        need_columns(name, frame, [client])
        owners = filled(name, frame, client)
        if not pd.api.types.is_numeric_dtype(owners):
            owners = owners.map(_stripped)
    return name, frame, owners


def numeric(name: str, frame: pd.DataFrame, columns: Sequence[str], na_values: Sequence[str] = ()) -> Tensor:
    """Return columns as float32 `[rows, columns]`, every cell a finite number and none of `na_values`."""
    numbers = [numbers_of(name, column, filled(name, frame, column, na_values)) for column in columns]
    return torch.from_numpy(np.stack(numbers, axis=1).astype(np.float32))


def numbered(values: pd.Series[Any]) -> tuple[Tensor, tuple[str, ...]]:
    """Return int64 ids in sorted order of the values, and the values as names; mixed types are read as text."""
    import pandas as pd

    if values.isna().any():
        raise bad_cell("tensors", str(values.name), values.isna(), "is empty (NaN)")
    plain = values.astype(str) if values.dtype == object else values
    ids, unique_values = pd.factorize(plain, sort=True)
    return torch.from_numpy(np.asarray(ids, dtype=np.int64)), tuple(str(value) for value in unique_values)


def target_columns(
    name: str, frame: pd.DataFrame, labels: Sequence[str], task: Task, na_values: Sequence[str] = ()
) -> tuple[Tensor, int, dict[str, Any]]:
    """Return (y, outputs, {"classes": names} for a task with classes) from the label columns."""
    if task not in ("classification", "binary"):
        y = target_tensor(name, numeric(name, frame, labels, na_values), task)
        return y, outputs_of(y, task), {}
    classes = class_names(name, frame, labels, na_values)
    column = frame[labels[0]]
    if task == "classification":
        check_classes(
            f"table '{name}': column '{labels[0]}'", column, "task='regression' (data.options.task)"
        )
    if task == "binary" and len(classes) != 2:
        raise DataError(
            f"table '{name}': a binary label has two values, but '{labels[0]}' has {counted(classes)}"
        )
    y = class_numbers(name, frame, labels[0], classes)
    return y, 1 if task == "binary" else len(classes), {"classes": classes}


def counted(words: Sequence[str]) -> str:
    """Return the number of words for a message, and the words themselves if they are few."""
    return f"{len(words)}" + (f": {', '.join(words)}" if len(words) <= FEW else "")


def class_names(
    name: str, frame: pd.DataFrame, labels: Sequence[str], na_values: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the names of the classes of a label column, in order.

    Raises:
        DataError: there are several such columns, or a cell is empty.
    """
    if len(labels) != 1:
        raise DataError(
            f"table '{name}': a task with classes has one label column, but {len(labels)} are given"
        )
    return tuple(in_order(words_in(filled(name, frame, labels[0], na_values))))


def unknown_class(name: str, classes: Sequence[str]) -> DataError:
    """Return the error for a class that the training data do not have; it names a few that they have."""
    return DataError(
        f"class '{name[:SHOWN]}' does not occur in the training data, whose classes are {first_few(classes, FEW)}"
    )


def class_numbers(name: str, frame: pd.DataFrame, label: str, classes: Sequence[str]) -> Tensor:
    """Return int64 `[rows]`, each row's class as an index into `classes`. Raises DataError for an unknown class."""
    number_of = {name_of_class: number for number, name_of_class in enumerate(classes)}
    words = words_in(filled(name, frame, label))
    if unknown := [word for word in words if word not in number_of]:
        raise unknown_class(unknown[0], classes)
    return torch.tensor([number_of[word] for word in words], dtype=torch.int64)


def test_column(name: str, frame: pd.DataFrame, split: str) -> Tensor:
    """Return `[rows]` bool, True where a column is 'test', not 'train'. Raises DataError for anything else."""
    part = filled(name, frame, split)
    if not part.isin(["train", "test"]).all():
        raise bad_cell(name, split, ~part.isin(["train", "test"]), "is neither 'train' nor 'test'")
    return torch.from_numpy((part == "test").to_numpy(dtype=bool, copy=True))


def target_tensor(name: str, y: Tensor, task: Task) -> Tensor:
    """Return `y` in the shape and type that the task requires."""
    if task in ("classification", "binary"):
        integers = y.to(torch.int64)
        if not torch.equal(integers.to(y.dtype), y):
            raise DataError(
                f"source '{name}': classes must be whole numbers counted from 0; to predict numbers, set "
                "task='regression'"
            )
        return integers
    y = y.to(torch.float32)
    if y.dim() == 1:
        y = y.unsqueeze(1)
    return y


def outputs_of(y: Tensor, task: Task) -> int:
    """Return how many outputs a model needs for targets `y` of a task."""
    if task == "classification":
        return int(y.max()) + 1 if y.numel() else 1
    return 1 if task in ("binary", "survival") else y.shape[1]


def make_source(
    name: str,
    x: Tensor,
    y: Tensor,
    task: Task,
    outputs: int,
    owners: pd.Series[Any] | None,
    test: Tensor | None,
    info: Mapping[str, Any],
    scaling: Channels = "train",
    *,
    unprepared: bool = False,
) -> Source:
    """Return the checked source; `owners` are ids of any kind, `scaling` applies to images.

    `unprepared` features may be NaN.

    Raises:
        DataError: no training samples, or numbers that are not finite.
    """
    if not len(x) or (test is not None and bool(test.all())):
        raise DataError(f"source '{name}' has no training samples")
    groups, names, mean, std = {}, {}, None, None
    if owners is not None:
        ids, client_names = numbered(owners)
        groups, names = {"client": ids}, {"client": client_names}
    if x.dtype == torch.uint8:
        mean, std, scaled = channel_scaling(x if test is None else x[~test], scaling)
        info = {**info, **scaled}
    source = Source(name, x, y, task, outputs, test, groups, names, mean, std, info)
    if not unprepared:
        check_finite(source)
    return source
