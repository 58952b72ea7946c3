"""What may stand under `published`: notes, and numbers by label and column, see `tailorfl.experiments.published`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

CLIENTS = "clients"


def check_published(key: str, value: Any) -> None:
    """Nothing if `value` is a note, or numbers by column, those of `clients` in a list.

    Raises:
        ValueError: it is neither; says which entry.
    """
    if not isinstance(value, Mapping):
        if value is None or isinstance(value, list | tuple):
            raise ValueError(
                f"has {key} = {value!r}, which is neither a note (a text) nor numbers such as {{mean: 0.9}}"
            )
        return
    for column, number in value.items():
        several = column == CLIENTS and isinstance(number, list | tuple)
        for one in number if several else [number]:
            if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
                wanted = "a list of numbers" if column == CLIENTS else "a number"
                raise ValueError(f"has {key}.{column} = {number!r}, which should be {wanted}")
        if column == CLIENTS and not several:
            raise ValueError(f"has {key}.{column} = {number!r}, which should be a list of numbers")
