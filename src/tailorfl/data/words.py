"""What a cell of a table is called as a word, and the order of words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

_DECIMAL = re.compile(r"[+-]?\d+(\.\d+)?")


def word_of(value: Any) -> str:
    """Returns what a cell is called as a word; 1, 1.0 and "1.0" are one, as other cells of a file decide its form."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, str) and not _DECIMAL.fullmatch(value.strip()):
        return value.strip()
    if isinstance(value, str | int | float | np.integer | np.floating):
        number = float(value)
        if number.is_integer():
            return str(int(number)) if abs(number) < 2**53 else str(value).strip()
        return str(number)
    return str(value)


def words_in(values: pd.Series[Any]) -> list[str]:
    """Returns the words of a column without empty cells."""
    if values.dtype == object:  # where True and 1 are the same key
        return [word_of(value) for value in values]
    codes, different = pd.factorize(values)
    names = [word_of(value) for value in different]
    return [names[code] for code in codes]


def in_order(words: Sequence[str]) -> list[str]:
    """Returns different words in an order that does not depend on which others there are: numbers, then the rest."""
    numbers = {word: float(word) for word in words if _DECIMAL.fullmatch(word)}
    return sorted(set(words), key=lambda word: (word not in numbers, numbers.get(word, 0.0), word))
