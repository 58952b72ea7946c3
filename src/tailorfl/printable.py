"""Texts that terminals, tables and pages show as they are: no escape code, no line end, nothing that turns text round.

Settings with such characters are refused, names out of data are cleaned, and what the command line says of anything
else (a file's name, say) is cleaned where it is printed.
"""

from __future__ import annotations

import re

_HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line and paragraph ends, marks of the direction of writing, and halves of characters."""


def harmful(text: str, but: str = "") -> str | None:
    """Returns the first character that must not be printed as it is, or None; those in `but` may.

    >>> harmful("a\\x1b[31mb")
    '\\x1b'
    """
    return next((found[0] for found in _HARMFUL.finditer(text) if found[0] not in but), None)


def visible(text: str, but: str = "") -> str:
    """Returns a text with such characters written out, as Python writes them.

    >>> print(visible("clinic\\n\\x1b[31m7"))
    clinic\\n\\x1b[31m7
    """
    return _HARMFUL.sub(lambda found: found[0] if found[0] in but else _written(found[0]), text)


def _written(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
