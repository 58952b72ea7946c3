"""Texts that are safe in terminals, tables and pages: no escape codes, no line ends, no reversal of text direction.

Settings with such characters are refused, names from data are cleaned, and other texts on the command line (such as
file names) are cleaned when they are printed. Of values that may be rows of data only the kind is shown.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LONGEST_SHOWN = 80
"""Largest number of characters of a text that a message quotes."""
MOST_SHOWN = 10
"""Largest number of numbers in a list that a message quotes."""
_HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line and paragraph separators, marks of text direction, and surrogates."""


def harmful(text: str, but: str = "") -> str | None:
    r"""Return the first character that must not be printed literally, or None; those in `but` may be.

    >>> harmful("a\x1b[31mb")
    '\x1b'
    """
    return next((match[0] for match in _HARMFUL.finditer(text) if match[0] not in but), None)


def visible(text: str, but: str = "") -> str:
    r"""Return a text with such characters escaped as in Python.

    >>> print(visible("clinic\n\x1b[31m7"))
    clinic\n\x1b[31m7
    """
    return _HARMFUL.sub(lambda match: match[0] if match[0] in but else _written(match[0]), text)


def shown(value: Any) -> str:
    """Return a value for a message: short texts and numbers unchanged, for all others only the kind.

    Possible rows of data (a frame, an array, a list with texts, a text of several lines) are never quoted.

    >>> print(shown("mlp"), shown([16, 16]), shown(["Miller", 61]))
    'mlp' [16, 16] a list of 2 values
    """
    if isinstance(value, str):
        is_short = len(value) <= LONGEST_SHOWN and harmful(value) is None
        return repr(value) if is_short else f"a text of {len(value):,} characters"
    if value is None or isinstance(value, int | float | complex):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset):
        numbers = all(entry is None or isinstance(entry, int | float) for entry in value)
        name = "list" if isinstance(value, list) else type(value).__name__
        return repr(value) if numbers and len(value) <= MOST_SHOWN else f"a {name} of {len(value):,} values"
    if isinstance(value, Mapping):
        return f"a mapping of {len(value):,} values"
    return f"a {type(value).__name__}"


def quoted(path: str | Path) -> str:
    """Return a path quoted for a shell, for commands to type.

    >>> print(quoted("my runs/a"))
    'my runs/a'
    """
    return shlex.quote(str(path))


def _written(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
