"""Cells of a raw table: which columns hold numbers and which words, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailorfl.data.columns import bad_cell
from tailorfl.data.words import word_of
from tailorfl.errors import DataError

Floats = NDArray[np.float64]
Kind = Literal["number", "word", "empty"]


def tidy(values: pd.Series[Any], na_values: Sequence[str]) -> pd.Series[Any]:
    """Returns a column as plain Python values; blanks, `na_values` and what pandas calls missing are NaN."""
    if pd.api.types.is_numeric_dtype(values) and not na_values:
        return values
    plain = values.astype(object)
    known = plain[plain.notna()].map(_stripped)
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
        first = str(values[wrong].iloc[0])[:50]
        raise bad_cell(table, column, wrong, f"is not a number (for example '{first}')")
    with np.errstate(over="ignore"):
        infinite = np.isinf(found.astype(np.float32))
    if infinite.any():
        raise bad_cell(table, column, infinite, "is infinite, or too large for float32,")
    return found


def words_of(values: pd.Series[Any]) -> list[str | None]:
    """Returns the words of a tidy column, None where a cell is missing."""
    there = values.notna().to_numpy()
    return [word_of(value) if held else None for value, held in zip(values, there, strict=True)]


def _stripped(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _parsed(held: pd.Series[Any]) -> pd.Series[Any]:
    """Numbers of cells that are there, NaN for those that are none."""
    if pd.api.types.is_numeric_dtype(held):
        return held
    if all(isinstance(value, bool | np.bool_) for value in held):
        return held.astype(float)
    # text first: dates and categories would otherwise turn into numbers that mean nothing
    return pd.to_numeric(held.astype(str), errors="coerce")
