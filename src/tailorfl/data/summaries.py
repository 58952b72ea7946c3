"""The summary of its table that a client sends so that all prepare theirs alike: counts, sums and levels, no rows.

A federation of tables is prepared in three steps, each a pure function, whether all clients are simulated in one
process or each has a process that sees only its own file:

    summarise(frame, roles, train_rows) -> Summary      at each client; `Summary.to_dict()` is JSON
    combine([summaries in the order of the clients]) -> Constants      at the server (`tailorfl.data.constants`)
    constants.apply(frame) -> (x, y)      at each client

If each client standardises by its own numbers (`data.normalise=client`), `constants.fitted_to(frame, train_rows)`
replaces the constants; nothing more leaves the client.

With the same files, roles and training rows, x and y are bit-identical wherever the steps run: sums are rounded once
(`math.fsum`), and JSON restores numbers exactly. `made_roles` turns the options of a table into roles.
`tailorfl.partition.splits.own_rows` returns the training rows of a client that knows only the sizes of the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tailorfl.data.columns import (
    Kind,
    class_names,
    in_order,
    kind_of,
    need_columns,
    numbers_of,
    tidy,
    word_of,
    words_of,
)
from tailorfl.data.source import Task
from tailorfl.errors import DataError
from tailorfl.partition.rows import Ints
from tailorfl.settings.base import Names, listed

if TYPE_CHECKING:
    import pandas as pd  # at run time only when tables are read: it takes 60 MB

CLASSES = ("classification", "binary")
"""Tasks whose label is a class."""
OTHER = "(other)"
"""The level of all words that are too rare to be sent, see `Roles.min_count`."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(allow_inf_nan=False, ge=0)]


class JsonRecord(BaseModel):
    """A frozen record that can be written as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a JSON-compatible dictionary."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], location: str = "") -> Self:
        """Return the record of a `to_dict`. Raises DataError for anything else; `location` is for the message."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "it"
            raise DataError(
                f"{location or f'a {cls.__name__}'} is not as expected: {field}: {first['msg']}"
            ) from None


class OrderedColumns(JsonRecord):
    """A record of features in an order, which JSON keeps even if the keys of objects are sorted."""

    @model_validator(mode="before")
    @classmethod
    def _ordered(cls, values: Any) -> Any:
        columns = values.get("columns") if isinstance(values, dict) else None
        if not isinstance(columns, dict):
            return values
        order = values.get("order") or list(columns)
        if sorted(order) != sorted(columns):
            raise ValueError("order should name each column once")
        return {**values, "order": tuple(order), "columns": {name: columns[name] for name in order}}


def _as_words(values: Any) -> Any:
    """Return words or numbers in the form of `word_of`, by which cells are compared; -9.0 is -9."""
    many = [values] if isinstance(values, float) else listed(values)
    if not isinstance(many, list | tuple):
        return values
    return [
        word_of(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else value
        for value in many
    ]


class Roles(JsonRecord):
    """The meaning of a table's columns, the same for all clients of a federation.

    Attributes:
        label: the target columns; for survival (event, time).
        task: the meaning of the label.
        features: the input columns in order; None: all without another role, in the order of the first client's table.
        others: columns that are neither, such as the client column and excluded ones.
        words: features that are words although they look like numbers, such as codes.
        impute: the fill of missing numbers: the mean of training rows, or (for each client separately) the median.
        indicator: whether each feature with missing cells gets a column that marks them.
        na_values: words or numbers that mean that a cell is empty, such as "?" and -9.
        min_count: values in fewer training rows of a client are not sent: rare words become the level "(other)", and a
            column with fewer filled cells counts as empty there.
    """

    label: Names
    task: Task = "classification"
    features: Names | None = None
    others: Names = ()
    words: Names = ()
    impute: Literal["mean", "median"] = "mean"
    indicator: bool = False
    na_values: Annotated[Names, BeforeValidator(_as_words)] = ()
    min_count: Annotated[int, Field(ge=1)] = 1

    def inputs(self, frame: pd.DataFrame) -> list[str]:
        """Return the names of the features that a table has."""
        columns = dict.fromkeys(str(column) for column in frame.columns)
        if self.features is not None:
            return [feature for feature in self.features if feature in columns]
        taken = {*self.label, *self.others}
        return [column for column in columns if column not in taken]


def made_roles(
    label: str | Sequence[str],
    client: str | None = None,
    split: str | None = None,
    exclude: str | Sequence[str] = (),
    **options: Any,
) -> Roles:
    """Return the roles given by options of the source `table` (`data.options` except `constants`).

    Raises:
        DataError: columns with a role are not given by name, or the value of an option is invalid.
    """
    for role, columns, kinds in (
        ("client", client, str | None),
        ("split", split, str | None),
        ("exclude", exclude, str | int | list | tuple),
    ):
        if not isinstance(columns, kinds):
            raise DataError(f"{role} should be given as column names, got a {type(columns).__name__}")
    not_features = [column for column in (client, split, *listed(exclude)) if column is not None]
    return Roles.from_dict(
        {"label": label, "others": not_features, **options}, "one of the options of the table"
    )


class ColumnSummary(JsonRecord):
    """A client's summary of one feature, over its training rows alone.

    Attributes:
        kind: of its cells.
        count: cells that are not empty.
        total: their sum.
        squares: the sum of their squared distances from their own mean.
        levels: the different words.
    """

    kind: Kind
    count: Annotated[int, Field(ge=0)] = 0
    total: Finite = 0.0
    squares: NotNegative = 0.0
    levels: tuple[str, ...] = ()


class Summary(OrderedColumns):
    """A client's summary of its table.

    Attributes:
        name: of the client, for messages.
        roles: of its columns.
        rows: training rows.
        columns: by feature.
        order: of the features in its table; by default that of `columns`.
        classes: the names of the classes that it has, in its training rows or others; empty for other tasks.
    """

    name: str
    roles: Roles
    rows: Annotated[int, Field(ge=0)]
    columns: dict[str, ColumnSummary]
    order: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _of_its_rows(self) -> Self:
        if any(column.count > self.rows for column in self.columns.values()):
            raise ValueError("a column has more filled cells than there are training rows")
        return self


def summarise(
    frame: pd.DataFrame, roles: Roles, train_rows: Ints | Sequence[int], name: str = "table"
) -> Summary:
    """Return a client's summary of its table.

    Args:
        frame: its table, as `tailorfl.data.table_files.read_table` reads it, all rows.
        roles: the meaning of the columns.
        train_rows: int64 rows that it trains on, counted from 0; features of other rows are not read.
        name: of the client.

    Raises:
        DataError: a column is missing, or holds values that are neither numbers nor words.
    """
    inputs = roles.inputs(frame)
    need_columns(name, frame, [*roles.label, *inputs])
    train = frame.iloc[np.asarray(train_rows, dtype=np.int64)]
    columns = {column: _column(name, column, train[column], roles) for column in inputs}
    classes = class_names(name, frame, roles.label, roles.na_values) if roles.task in CLASSES else ()
    return Summary(name=name, roles=roles, rows=len(train), columns=columns, classes=classes)


def moments(values: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[int, float, float]:
    """Return (number of values not NaN, their sum, their sum of squared distances from their mean), rounded once."""
    filled = values[~np.isnan(values)]
    if not len(filled):
        return 0, 0.0, 0.0
    total = math.fsum(filled)
    return len(filled), total, math.fsum((filled - total / len(filled)) ** 2)


def _column(name: str, column: str, values: pd.Series[Any], roles: Roles) -> ColumnSummary:
    plain = tidy(values, roles.na_values)
    kind = kind_of(plain)
    if int(plain.notna().sum()) < roles.min_count:
        return ColumnSummary(kind="empty")
    if kind == "word" or column in roles.words:
        counts = Counter(word for word in words_of(plain) if word is not None)
        return ColumnSummary(kind="word", count=counts.total(), levels=_levels(counts, roles.min_count))
    count, total, squares = moments(numbers_of(name, column, plain))
    return ColumnSummary(kind=kind, count=count, total=total, squares=squares)


def _levels(counts: Mapping[str, int], least: int) -> tuple[str, ...]:
    """Return the words that `least` rows have, in order, and `OTHER` if as many rows have one of the rarer words."""
    common = [word for word, count in counts.items() if count >= least]
    rare = sum(count for count in counts.values() if count < least)
    return tuple(in_order([*common, OTHER] if rare >= least else common))
