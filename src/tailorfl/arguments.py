"""Arguments of functions that people call: of the kind that is expected, or an error that names them."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from tailorfl.errors import ConfigError
from tailorfl.printable import shown

_NAMES = {
    str: "a text",
    Integral: "a whole number",
    Real: "a number",
    type(None): "None",
    bool: "True or False",
    Path: "a path",
    Mapping: "a mapping",
}


def check_kind(name: str, value: Any, *kinds: type | None) -> None:
    """Check that an argument is of one of some kinds, of which None stands for itself; True and False are no numbers.

    Where a path may stand, a text is one, and not several lines, which may be a table.

    Raises:
        ConfigError: it is of none; the message says of what kind it is, and shows no data.
    """
    types = tuple(type(None) if kind is None else kind for kind in kinds)
    is_flag = isinstance(value, bool) and bool not in types
    is_no_path = isinstance(value, str) and Path in types and value.count("\n") > 1
    if is_flag or is_no_path or not isinstance(value, types):
        expected = " or ".join(_NAMES.get(kind) or f"of type {kind.__name__}" for kind in types)
        raise ConfigError(f"{name} should be {expected}, but is {shown(value)}")


def check_texts(name: str, values: Any, *kinds: type | None) -> None:
    """Check that an argument is a sequence of texts, or of one of some other kinds. Raises ConfigError."""
    if isinstance(values, list | tuple) and not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{name} should hold texts, but is {shown(values)}")
    check_kind(name, values, list, tuple, *kinds)
