"""The summary of its table that a client sends so that all can prepare theirs alike: counts, sums, levels, no row.

A federation of tables is prepared in three steps, each a pure function, whether all clients are simulated in one
process or each is a process of its own that sees only its own file:

    summarise(frame, roles, train_rows) -> Summary      at each client; `Summary.to_dict()` is JSON
    combine([summaries in the order of the clients]) -> Constants      at the server (`tailorfl.data.constants`)
    constants.apply(frame) -> (x, y)      at each client

Where each client standardises by its own numbers (`data.normalise=client`), `constants.fitted_to(frame, train_rows)`
takes the place of the constants; nothing more leaves the client.

With the same files, roles and training rows x and y are the same to the bit, wherever the steps run: sums are rounded
once (`math.fsum`), and JSON writes numbers so that they come back as they were. `made_roles` makes roles of the options
of a table. Training rows of a client that knows nothing of the others but their sizes:
`tailorfl.partition.splits.own_rows`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tailorfl.data.columns import (
    Kind,
    class_names,
    in_order,
    kind_of,
    need_columns,
    numbers_of,
    tidy,
    words_of,
)
from tailorfl.data.source import Task
from tailorfl.errors import DataError
from tailorfl.partition.rows import Ints
from tailorfl.settings.base import Names, listed

if TYPE_CHECKING:
    import pandas as pd  # at run time only where tables are read: it takes 60 MB

CLASSES = ("classification", "binary")
"""Tasks whose label is a class."""
OTHER = "(other)"
"""The level that stands for all words too rare to be told, see `Roles.min_count`."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(allow_inf_nan=False, ge=0)]


class JsonRecord(BaseModel):
    """A frozen record that JSON can hold."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON can hold it."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], location: str = "") -> Self:
        """Return what `to_dict` gave. Raises DataError for anything else; `location` it was found, for the message."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "it"
            raise DataError(
                f"{location or f'a {cls.__name__}'} is not as expected: {field}: {first['msg']}"
            ) from None


class OrderedColumns(JsonRecord):
    """A record of features in an order, which JSON keeps even where something sorts the keys of objects."""

    @model_validator(mode="before")
    @classmethod
    def _ordered(cls, values: Any) -> Any:
        columns = values.get("columns") if isinstance(values, dict) else None
        if not isinstance(columns, dict):
            return values
        order = values.get("order") or list(columns)
        if sorted(order) != sorted(columns):
            raise ValueError("order should name each of the columns once")
        return {**values, "order": tuple(order), "columns": {name: columns[name] for name in order}}


class Roles(JsonRecord):
    """The meaning of a table's columns, the same for all clients of a federation.

    Attributes:
        label: the target columns; for survival (event, time).
        task: what the label means.
        features: the input columns in order; None: all that are nothing else, in the order of the first client's table.
        others: columns that are neither, such as the client's and those that are excluded.
        words: features that are words although they look like numbers, such as codes.
        impute: what fills the gaps of a number: the mean of training rows, or (of each client by itself) the median.
        indicator: whether each feature that is missing somewhere gets a column that says where.
        na_values: words that mean that a cell is empty, such as "?".
        min_count: what fewer training rows of a client have is not told: rare words become the level "(other)", and a
            column with fewer filled cells counts as empty there.
    """

    label: Names
    task: Task = "classification"
    features: Names | None = None
    others: tuple[str, ...] = ()
    words: Names = ()
    impute: Literal["mean", "median"] = "mean"
    indicator: bool = False
    na_values: Names = ()
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
    """Return the roles that options of the source `table` mean (`data.options` but for `constants`).

    Raises:
        DataError: columns that mean something are not given by name, or a value is none of an option's.
    """
    for role, columns, kinds in (
        ("client", client, str | None),
        ("split", split, str | None),
        ("exclude", exclude, str | list | tuple),
    ):
        if not isinstance(columns, kinds):
            raise DataError(f"{role} should be given by the names of columns, got a {type(columns).__name__}")
    not_features = [column for column in (client, split, *listed(exclude)) if column is not None]
    return Roles.from_dict({"label": label, "others": not_features, **options}, "options of the table")


class ColumnSummary(JsonRecord):
    """A client's summary of one feature, over its training rows alone.

    Attributes:
        kind: what its cells are.
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
        roles: what it took the columns for.
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


def summarise(
    frame: pd.DataFrame, roles: Roles, train_rows: Ints | Sequence[int], name: str = "table"
) -> Summary:
    """Return what a client tells of its table.

    Args:
        frame: its table, as `tailorfl.data.table_files.read_table` reads it, all rows.
        roles: what the columns mean.
        train_rows: int64 rows that it trains on, counted from 0; features of others are not looked at.
        name: of the client.

    Raises:
        DataError: a column is missing, or holds what is neither a number nor a word.
    """
    inputs = roles.inputs(frame)
    need_columns(name, frame, [*roles.label, *inputs])
    train = frame.iloc[np.asarray(train_rows, dtype=np.int64)]
    columns = {column: _column(name, column, train[column], roles) for column in inputs}
    classes = class_names(name, frame, roles.label, roles.na_values) if roles.task in CLASSES else ()
    return Summary(name=name, roles=roles, rows=len(train), columns=columns, classes=classes)


def moments(values: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[int, float, float]:
    """(how many are not NaN, their sum, the sum of their squared distances from their mean), rounded once."""
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
    """Return the words that `least` rows have, in order, and `OTHER` if so many rows have one of the others."""
    common = [word for word, count in counts.items() if count >= least]
    rare = sum(count for count in counts.values() if count < least)
    return tuple(in_order([*common, OTHER] if rare >= least else common))
