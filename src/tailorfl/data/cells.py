"""Cells of a raw table: which columns hold numbers and which words, what a word is called, and what is missing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tailorfl.errors import DataError

if TYPE_CHECKING:
    import pandas as pd  # at run time only where tables are read: it takes 60 MB

Floats = NDArray[np.float64]
Kind = Literal["number", "word", "empty"]
_DECIMAL = re.compile(r"[+-]?\d+(\.\d+)?")
_SEVERAL = (list, tuple, dict, set, bytes, np.ndarray)
"""What one cell cannot be."""
_DATE = re.compile(r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})([ T]\d{1,2}:\d\d.*)?")


def bad_cell(name: str, column: str, bad: Any, what: str) -> DataError:
    """Returns the error that names a column, how many of its cells are `bad` `[rows]`, and the first of them."""
    rows = np.flatnonzero(np.asarray(bad))
    return DataError(
        f"table '{name}': column '{column}' {what} in {len(rows)} of {len(bad)} rows, "
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
    known = plain[plain.notna()].map(_stripped)
    several = [type(value).__name__ for value in known if isinstance(value, _SEVERAL)]
    if several:
        raise DataError(
            f"column '{values.name}' holds a value of type {several[0]} in {len(several)} of {len(values)} rows, but a "
            "cell should be one number or word; make columns of its parts, or leave it out with data.options.exclude"
        )
    kept = known[[value != "" and word_of(value) not in na_values for value in known]]
    if len(kept) == len(plain) and pd.api.types.is_numeric_dtype(values):
        return values
    return kept.reindex(plain.index)


def kind_of(values: pd.Series[Any]) -> Kind:
    """What a tidy column holds: numbers (True and False are 1 and 0), words, or nothing at all."""
    held = values[values.notna()]
    if held.empty:
        return "empty"
    return "word" if _parsed(held).isna().any() else "number"


def numbers_of(table: str, column: str, values: pd.Series[Any]) -> Floats:
    """float64 `[rows]` of a tidy column, NaN where a cell is missing.

    Raises:
        DataError: a cell is no number, or too large for float32; names the column and the first such row.
    """
    there = values.notna().to_numpy()
    held = values[there]
    if np.iscomplexobj(held) or (held.dtype == object and any(isinstance(value, complex) for value in held)):
        raise DataError(
            f"table '{table}': column '{column}' holds complex numbers, of which a part would be lost"
        )
    parsed = _parsed(held)
    found = np.full(len(values), np.nan)
    found[there] = parsed.to_numpy(dtype=np.float64)
    wrong = there & np.isnan(found)
    if wrong.any():
        raise bad_cell(table, column, wrong, "is not a number")
    with np.errstate(over="ignore"):
        infinite = np.isinf(found.astype(np.float32))
    if infinite.any():
        raise bad_cell(table, column, infinite, "is infinite, or too large for float32,")
    return found


def words_of(values: pd.Series[Any]) -> list[str | None]:
    """Returns the words of a tidy column, None where a cell is missing."""
    there = values.notna().to_numpy()
    return [word_of(value) if held else None for value, held in zip(values, there, strict=True)]


def word_of(value: Any) -> str:
    """Returns what a cell is called as a word; 1, 1.0 and "1.0" are one, as other cells of a file decide its form."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, str) and not is_decimal(value.strip()):
        return value.strip()
    if isinstance(value, str | int | float | np.integer | np.floating):
        number = float(value)
        if number.is_integer():
            return str(int(number)) if abs(number) < 2**53 else str(value).strip()
        return str(number)
    return str(value)


def words_in(values: pd.Series[Any]) -> list[str]:
    """Returns the words of a column without empty cells."""
    import pandas as pd

    if values.dtype == object:  # where True and 1 are the same key
        return [word_of(value) for value in values]
    codes, different = pd.factorize(values)
    names = [word_of(value) for value in different]
    return [names[code] for code in codes]


def in_order(words: Sequence[str]) -> list[str]:
    """Returns different words in an order that does not depend on which others there are: numbers, then the rest."""
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


def _parsed(held: pd.Series[Any]) -> pd.Series[Any]:
    """Numbers of cells that are there, NaN for those that are none."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(held):
        return held
    if all(isinstance(value, bool | np.bool_) for value in held):
        return held.astype(float)
    # text first: dates and categories would otherwise turn into numbers that mean nothing
    return pd.to_numeric(held.astype(str), errors="coerce")
