"""The constants that turn raw tables into model inputs: fills of gaps, scales of numbers, levels of words."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tailorfl.data.columns import (
    class_numbers,
    counted,
    in_order,
    is_date,
    is_decimal,
    need_columns,
    numbers_of,
    numeric,
    target_tensor,
    tidy,
    word_of,
    words_of,
)
from tailorfl.data.labels import FEW_ROWS
from tailorfl.data.summaries import (
    CLASSES,
    OTHER,
    ColumnSummary,
    Finite,
    JsonRecord,
    OrderedColumns,
    Roles,
    Summary,
    moments,
)
from tailorfl.errors import DataError, first_few
from tailorfl.partition.rows import Ints

if TYPE_CHECKING:
    import pandas as pd  # at run time only when tables are read: it takes 60 MB

MOST_LEVELS = 100
"""Maximum number of levels of a word column; one with more holds names, patient numbers or texts, not a feature."""
MOST_NUMBERS = 10
"""Maximum number of numbers among a column's words; a column with more, mostly numbers, is numeric with odd cells."""
_CONSTANT = 1e-12
_ODD_WORDS = (
    "if the column is a code, name it in data.options.words; if the word means an empty cell, name the word in "
    "data.options.na_values; otherwise correct the table"
)
Positive = Annotated[float, Field(allow_inf_nan=False, gt=0)]


class NumberColumn(JsonRecord):
    """A number v becomes (v - mean) / deviation, a gap (fill - mean) / deviation.

    With `indicator` a column follows that is 1 where the cell was missing.
    """

    kind: Literal["number"] = "number"
    mean: Finite = 0.0
    deviation: Positive = 1.0
    fill: Finite = 0.0
    indicator: bool = False


class WordColumn(JsonRecord):
    """A word becomes one 0/1 column per level; a missing or unknown word is 0 in all of them.

    If `OTHER` is a level, unknown words have that level.

    With `indicator` a column follows that is 1 where the cell was missing.
    """

    kind: Literal["word"] = "word"
    levels: tuple[str, ...]
    indicator: bool = False


class Constants(OrderedColumns):
    """The constants that turn raw rows into inputs and targets of a model; JSON by `to_dict`, `from_dict`.

    Attributes:
        roles: the meaning of the columns.
        columns: by feature.
        order: features in the order in which models read them; by default that of `columns`.
        classes: names of the classes in the order of their numbers; empty for other tasks.
        absent: features without any cell at the client that these constants are for; its tables may lack them.
    """

    roles: Roles
    columns: dict[str, Annotated[NumberColumn | WordColumn, Field(discriminator="kind")]]
    order: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns of x, such as "age", "pain=typical" and "age missing"."""
        names: list[str] = []
        for name, column in self.columns.items():
            names += [name] if column.kind == "number" else [f"{name}={level}" for level in column.levels]
            names += [f"{name} missing"] if column.indicator else []
        return tuple(names)

    @property
    def outputs(self) -> int:
        """Outputs of a model: classes, labels or targets; 1 for binary and survival."""
        if self.roles.task == "classification":
            return len(self.classes)
        return 1 if self.roles.task in ("binary", "survival") else len(self.roles.label)

    def apply(self, frame: pd.DataFrame, name: str = "table") -> tuple[Tensor, Tensor]:
        """Return (x float32 `[rows, len(names)]`, y as in `tailorfl.data.source.Source`) of raw rows.

        Raises:
            DataError: a column is missing, a number column has a word, a label is empty or an unknown class.
        """
        return self.inputs(frame, name), self.targets(frame, name)

    def inputs(self, frame: pd.DataFrame, name: str = "table") -> Tensor:
        """Return x, float32 `[rows, len(names)]`, of raw rows; label columns are ignored.

        Raises:
            DataError: a column is missing that is not `absent`, or a number column has a word.
        """
        lacking = [feature for feature in self.absent if feature not in frame.columns]
        frame = frame.assign(**dict.fromkeys(lacking, np.nan)) if lacking else frame
        need_columns(name, frame, list(self.columns))
        blocks: list[Any] = []
        for feature, column in self.columns.items():
            values = tidy(frame[feature], self.roles.na_values)
            if column.kind == "number":
                numbers = numbers_of(name, feature, values)
                filled = np.where(np.isnan(numbers), column.fill, numbers)
                blocks.append(((filled - column.mean) / column.deviation)[:, None])
            else:
                code_of = {word_of(level): number for number, level in enumerate(column.levels)}
                other_code = code_of.get(OTHER, -1)
                words = [-1 if word is None else code_of.get(word, other_code) for word in words_of(values)]
                codes = np.array(words, dtype=np.int64)
                blocks.append(codes[:, None] == np.arange(len(code_of)))
            if column.indicator:
                blocks.append(values.isna().to_numpy(dtype=bool)[:, None])
        x = np.concatenate([np.empty((len(frame), 0), dtype=np.float32), *blocks], axis=1, dtype=np.float32)
        return torch.from_numpy(x)

    def targets(self, frame: pd.DataFrame, name: str = "table") -> Tensor:
        """Return y of raw rows, in the shape and type of the task.

        Raises:
            DataError: a label is missing, empty, out of range or an unknown class.
        """
        label, task = self.roles.label, self.roles.task
        need_columns(name, frame, list(label))
        if task not in CLASSES:
            return target_tensor(name, numeric(name, frame, label, self.roles.na_values), task)
        return class_numbers(name, frame, label[0], self.classes)

    def fitted_to(self, frame: pd.DataFrame, train_rows: Ints | Sequence[int]) -> Constants:
        """Return the same columns with a client's own means, deviations and fills, which never leave it.

        A column without any number here keeps the constants of all clients. Levels and classes stay the same.

        Args:
            frame: the client's table.
            train_rows: int64 rows that it trains on.
        """
        train = frame.iloc[np.asarray(train_rows, dtype=np.int64)]
        columns: dict[str, Any] = {}
        for feature, column in self.columns.items():
            columns[feature] = column
            if column.kind == "number":
                values = numbers_of("table", feature, tidy(train[feature], self.roles.na_values))
                filled = values[~np.isnan(values)]
                if len(filled):
                    fitted = _number(*moments(values), indicator=column.indicator)
                    if self.roles.impute == "median":
                        fitted = fitted.model_copy(update={"fill": float(np.median(filled))})
                    columns[feature] = fitted
        return self.model_copy(update={"columns": columns})


def combine(summaries: Sequence[Summary]) -> Constants:
    """Return the constants of all training rows of the clients together, gaps filled by means.

    Medians are not sums: with `impute` "median" each client computes its own in `Constants.fitted_to`.

    A column that a client lacks counts as empty there.

    Args:
        summaries: one per client, in the order of the clients, which decides the order of the features.

    Raises:
        DataError: clients differ in the roles or kinds of their columns (the message names them); a column is empty
            everywhere, or holds dates, names or numbers with odd words; a binary label does not have two classes.
    """
    first = summaries[0]
    for summary in summaries[1:]:
        if summary.roles != first.roles:
            raise DataError(
                f"'{summary.name}' and '{first.name}' give their columns different roles; give all clients the same "
                "file"
            )
    rows = sum(summary.rows for summary in summaries)
    empty = ColumnSummary(kind="empty")
    columns = {
        name: _column(
            name,
            [(summary.name, summary.columns.get(name, empty)) for summary in summaries],
            rows,
            first.roles,
        )
        for name in dict.fromkeys(column for summary in summaries for column in summary.columns)
    }
    classes = in_order([name for summary in summaries for name in summary.classes])
    if first.roles.task == "binary" and len(classes) != 2:
        raise DataError(f"a binary label has two values, but '{first.roles.label[0]}' has {counted(classes)}")
    return Constants(roles=first.roles, columns=columns, classes=tuple(classes))


def read_constants(path: str | Path) -> Constants:
    """Return the constants in a JSON file. Raises DataError if it cannot be read or holds something else."""
    file = Path(path).expanduser()
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"constants '{file}' cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"constants '{file}' should be an object with roles, columns and classes")
    return Constants.from_dict(content, f"constants '{file}'")


def _column(
    name: str, summaries: Sequence[tuple[str, ColumnSummary]], rows: int, roles: Roles
) -> NumberColumn | WordColumn:
    filled = [summary for _, summary in summaries if summary.kind != "empty"]
    if not filled:
        raise DataError(f"column '{name}' is empty in all training rows; leave it out of the features")
    kinds = {
        kind: [client for client, summary in summaries if summary.kind == kind] for kind in ("number", "word")
    }
    if kinds["number"] and kinds["word"]:
        odd = in_order(
            [level for _, summary in summaries for level in summary.levels if not is_decimal(level)]
        )
        raise DataError(
            f"column '{name}' holds numbers at {first_few(kinds['number'], 5)} and words at "
            f"{first_few(kinds['word'], 5)} ({counted(odd)}); {_ODD_WORDS}"
        )
    count = sum(summary.count for summary in filled)
    indicator = roles.indicator and count < rows
    if kinds["word"]:
        levels = in_order([level for summary in filled for level in summary.levels])
        _check_words(name, levels, count, code=name in roles.words)
        return WordColumn(levels=tuple(levels), indicator=indicator)
    total = math.fsum(summary.total for summary in filled)
    mean = total / count
    squares = math.fsum(
        part
        for summary in filled
        for part in (summary.squares, summary.count * (summary.total / summary.count - mean) ** 2)
    )
    return _number(count, total, squares, indicator=indicator)


def _check_words(name: str, levels: Sequence[str], count: int, *, code: bool) -> None:
    """Raise DataError if the words of a column are not categories; for a `code` only if there are too many."""
    out = "leave it out with data.options.exclude"
    many = len(levels) > FEW_ROWS and 2 * len(levels) > count and not code
    numbers = [level for level in levels if is_decimal(level)]
    if not code and all(is_date(level) for level in levels):
        raise DataError(
            f"column '{name}' holds dates ({len(levels)} different ones), which models cannot use; {out}, or turn it "
            "into a number, such as an age in years"
        )
    if not code and len(numbers) > MOST_NUMBERS and 2 * len(numbers) > len(levels):
        odd = [level for level in levels if not is_decimal(level)]
        raise DataError(
            f"column '{name}' holds {len(numbers)} different numbers and also words ({counted(odd)}); {_ODD_WORDS}"
        )
    if many or len(levels) > MOST_LEVELS:
        raise DataError(
            f"column '{name}' has {len(levels)} different words in {count} cells; at most {MOST_LEVELS} are encoded, "
            f"since more, or nearly one per row, are usually names, patient numbers or texts; {out}, or group them"
            + ("" if len(levels) > MOST_LEVELS else "; if they are categories, name it in data.options.words")
        )


def _number(count: int, total: float, squares: float, *, indicator: bool) -> NumberColumn:
    mean = total / count
    deviation = math.sqrt(squares / (count - 1)) if count > 1 else 0.0
    if deviation <= _CONSTANT * (1 + abs(mean)):
        deviation = 1.0  # a constant is only shifted
    return NumberColumn(mean=mean, deviation=deviation, fill=mean, indicator=indicator)
