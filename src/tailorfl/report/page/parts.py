"""What a page is made of: parts with a title, which hold tables, charts and text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

PROSE = 60
"""Characters from which on a cell is running text, which may be folded."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table; `value` is what its column is sorted by, where the text does not begin with it."""

    text: str
    value: float | None = None
    strong: bool = False

    @property
    def is_prose(self) -> bool:
        """Whether it may be folded."""
        return len(self.text) > PROSE


@dataclass(frozen=True)
class Table:
    """A table: what it shows, its head, and its rows, whose first cell names the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @classmethod
    def of(cls, caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
        """Return a table of texts."""
        return cls(caption, head, [[Cell(text) for text in row] for row in rows])


@dataclass(frozen=True)
class Chart:
    """A picture that the page's script draws: a Vega-Lite specification whose data are named sets of the page.

    `alt` says what it shows to those who do not see it.
    """

    name: str
    spec: dict[str, Any]
    alt: str
    is_small: bool = False
    """Whether several stand side by side."""


@dataclass(frozen=True)
class Code:
    """Text as a machine reads it."""

    text: str


@dataclass
class PagePart:
    """A part of a page. `keys` says that the legend of methods stands above its charts, `clients` a choice of one.

    `picture` is an SVG element of the library's own, `alt` what it shows.
    """

    name: str
    title: str
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    code: list[Code] = field(default_factory=list)
    keys: bool = False
    clients: bool = False
    picture: str = ""
    alt: str = ""


def number(value: float) -> float | None:
    """Return a number as JSON has it: one that is not finite is none. Seven digits are more than a picture shows."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
