"""Labels of a user's own data as classes: numbered, named, and checked for values that are not meant as classes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailorfl.errors import DataError

if TYPE_CHECKING:
    import pandas as pd  # at run time only when tables are read: it takes 60 MB

log = logging.getLogger(__name__)

FEW_ROWS = 20
"""From at most this many rows nothing is concluded."""
ROWS_A_CLASS = 10
"""Average rows per class below which many labels may be numbers to be predicted."""
MANY_CLASSES = 20
NAMED = 5
"""Classes that a message names."""
MOST_CLASSES = 1_000_000


def check_classes(
    label: str, values: pd.Series[Any] | NDArray[Any], option: str = "task='regression'"
) -> None:
    """Check that values can be classes; warn if they look like numbers to be predicted.

    `label` begins the message, such as "table 'x': column 'y'"; `option` is the setting for a regression.

    Raises:
        DataError: they are numbers with fractions, or numbers with fewer than two rows per value on average.
    """
    import pandas as pd

    column = pd.Series(values)
    numeric = pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
    distinct, rows = int(column.nunique()), len(column)
    meant = f"; to predict it as a number, set {option}"
    if numeric and pd.api.types.is_float_dtype(column):
        parts = column[np.isfinite(column) & (column % 1 != 0)]
        if len(parts):
            raise DataError(
                f"{label} has {distinct} values in {rows} rows, {len(parts)} of them with fractions; classes must be "
                f"whole numbers or names{meant}"
            )
    _name_single(label, column)
    if rows <= FEW_ROWS or distinct <= MANY_CLASSES:
        return
    if numeric and 2 * distinct > rows:
        raise DataError(f"{label} has {distinct} values in {rows} rows, too many to be classes{meant}")
    if ROWS_A_CLASS * distinct > rows:
        log.warning(
            "%s has %d classes in %d rows, %.1f rows per class%s",
            label,
            distinct,
            rows,
            rows / distinct,
            meant if numeric else "; is it the right column?",
        )


def _name_single(label: str, column: pd.Series[Any]) -> None:
    """Warn of classes with one sample, which cannot be both learned and tested; few are named."""
    counts = column.value_counts()
    single = sorted(str(value) for value in counts.index[counts == 1])
    if single and len(counts) > 1:
        names = f" ({', '.join(single)})" if len(single) <= NAMED else ""
        text = (
            f"{label}: {len(single)} of {len(counts)} classes{names} have a single sample, so they cannot be in both "
            "the training and the test part"
        )
        log.warning("%s", text, extra={"once": text})


def from_zero(label: str, y: Tensor) -> Tensor:
    """Return class numbers as they are, int64.

    Raises:
        DataError: all of them are above 0, so they are not counted from 0; or one is too large for a class.
    """
    if y.numel() and int(y.max()) >= MOST_CLASSES:
        raise DataError(
            f"{label} has class {int(y.max()):,}, which would need a model with as many outputs; number classes from 0 "
            "without gaps, or give their names as text"
        )
    if y.numel() and int(y.min()) >= 1:
        low, high = int(y.min()), int(y.max())
        raise DataError(
            f"{label} has classes {low} to {high}; classes are counted from 0, so class 0 would be empty; give y - "
            f"{low}, or the classes' names as text"
        )
    return y


def named(values: Any) -> tuple[Tensor, tuple[str, ...]] | None:
    """Return (classes int64 `[samples]`, their names in sorted order) of labels that are texts, otherwise None."""
    import pandas as pd

    if isinstance(values, Tensor):
        return None
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(
            f"the labels should be a list with one label per sample, but are a {type(values).__name__} of lists of "
            "different lengths"
        ) from error
    if array.dtype.kind not in "USO" or array.ndim != 1:
        return None
    texts = pd.Series(array)
    if texts.isna().any():
        first = int(np.flatnonzero(texts.isna())[0])
        raise DataError(
            f"the labels are missing in {int(texts.isna().sum())} samples, first in sample {first}"
        )
    ids, class_names = pd.factorize(texts.astype(str), sort=True)
    return torch.from_numpy(np.asarray(ids, dtype=np.int64)), tuple(map(str, class_names))
