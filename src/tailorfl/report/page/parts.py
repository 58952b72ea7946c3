"""The building blocks of a page: parts with a title, which hold tables, charts and text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tailorfl.report.tables import Table

Rows = list[dict[str, Any]]
Spec = dict[str, Any]
"""A piece of a Vega-Lite specification."""


@dataclass(frozen=True)
class Chart:
    """A picture that the page's script draws: a Vega-Lite specification whose data are named sets of the page.

    `alt` says what it shows to those who do not see it; several of those that are small stand side by side.
    """

    name: str
    spec: Spec
    alt: str
    is_small: bool = False


@dataclass
class PagePart:
    """A part of a page.

    Attributes:
        name, title: its address on the page and its heading.
        notes, tables, charts, code: its content, in this order.
        data: rows by name, which charts ask for.
        left_out: a sentence for everything that could not be shown.
        folded: whether its tables are shown only on demand.
        keys, clients: whether the legend of methods, and a choice of one client, stand above the charts.
        picture, alt: an SVG element of the library's own, and what it shows.
    """

    name: str
    title: str
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    data: dict[str, Rows] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    folded: bool = False
    keys: bool = False
    clients: bool = False
    picture: str = ""
    alt: str = ""

    @classmethod
    def of(cls, table: Table, name: str) -> PagePart:
        """Return a table with its note as a part."""
        return cls(name, table.title, [table.note] if table.note else [], [table])
