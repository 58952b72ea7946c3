"""Building blocks of a page: its parts, their Vega-Lite charts, and the look of numbers and methods in both.

All charts of the page share channels, layers and signals; colours, dashes and units are those of the report's plots.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tailorfl.errors import first_few
from tailorfl.evaluation.metrics import UNIT_METRICS
from tailorfl.report.plots import COLOURS
from tailorfl.report.tables import Cell, Column, Table

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult

Rows = list[dict[str, Any]]
Spec = dict[str, Any]
"""A piece of a Vega-Lite specification."""
INK = "var(--ink)"
"""A colour variable of the page's style, which follows its light or dark theme."""
DASHES = ("", "7 4", "2 3", "7 3 2 3")
"""Dashes of the first seven lines, the second seven, and so on, as in the report's plots."""
SHOWN = [{"filter": "datum.id === shown"}]
"""Keeps only the marked client."""
VISIBLE = [{"filter": "indexof(hidden, datum.label) < 0"}]
"""Keeps only methods that are not hidden."""
LIT = {"condition": {"test": "datum.label === lit", "value": 4}, "value": 2}
"""Width of a line; thicker for the method under the pointer in the legend."""


@dataclass(frozen=True)
class Chart:
    """A picture that the page's script draws: a Vega-Lite specification on named data sets of the page.

    `alt` is its text alternative; small charts are placed side by side.
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
        data: rows by name, which charts use.
        left_out: a sentence for everything that could not be shown.
        folded: whether its tables are shown only on demand.
        keys, clients: whether the legend of methods, and a choice of one client, are above the charts.
        picture, alt: an SVG element made by this library, and its text alternative.
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
        """Return a part with a table and its note."""
        return cls(name, table.title, [table.note] if table.note else [], [table])


@dataclass(frozen=True)
class Look:
    """The metric of an experiment, and its methods in the order of the table."""

    metric: str
    labels: tuple[str, ...]

    @classmethod
    def of(cls, result: ExperimentResult) -> Look:
        """Return the look of a result."""
        return cls(result.metric, tuple(result.labels))

    @property
    def name(self) -> str:
        """The metric as text."""
        return self.metric.replace("_", " ")

    @property
    def is_share(self) -> bool:
        """Whether it is shown in percent."""
        return self.metric in UNIT_METRICS

    @property
    def format(self) -> str:
        """Format of numbers in tooltips."""
        return ".1%" if self.is_share else ".4~g"

    def axis(self, **more: Any) -> dict[str, Any]:
        """Return an axis of the metric."""
        return {"format": "%" if self.is_share else "~g", **more}

    @property
    def unit(self) -> str:
        """The unit after a title."""
        return " (%)" if self.is_share else ""

    def spread(self, mean: float, half_width: float = math.nan, sign: str = "") -> str:
        """Return a number of the metric, or a difference with `sign` "+", with the half width of its interval."""
        return Column("", "", "percent" if self.is_share else "number").text(mean, half_width, sign)

    def cell(self, mean: float, half_width: float = math.nan, sign: str = "") -> Cell:
        """Return a number as the cell of a table."""
        return Cell(self.spread(mean, half_width, sign), mean)

    @property
    def colours(self) -> list[str]:
        """Colour of every label; black in plots is the page's ink."""
        colours = [COLOURS[k % len(COLOURS)] for k in range(len(self.labels))]
        return [INK if colour == "#000000" else colour for colour in colours]

    @property
    def dashes(self) -> list[str]:
        """Dashes of every label, in SVG notation."""
        return [DASHES[k // len(COLOURS) % len(DASHES)] for k in range(len(self.labels))]

    def by_label(self, values: Sequence[Any], **more: Any) -> dict[str, Any]:
        """Return a chart's channel with a value for each label; the page has one legend for all charts."""
        scale = {"domain": list(self.labels), "range": list(values)}
        return {"field": "label", "type": "nominal", "scale": scale, "legend": None, **more}

    def line(self) -> dict[str, Any]:
        """Return the channels of methods' lines: colour and dashes."""
        dashes = [[int(n) for n in dash.split()] or [1, 0] for dash in self.dashes]
        return {"color": self.by_label(self.colours), "strokeDash": self.by_label(dashes)}


def named(labels: Sequence[str]) -> str:
    """Return labels as running text; of many labels only the first few."""
    return first_few(labels, 8)


def number(value: float) -> float | None:
    """Return a number for JSON, rounded to seven digits, which is enough for a picture; None if it is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def evenly(count: int, most: int) -> list[int]:
    """Return positions of `most` of `count` things, evenly chosen; of all if there are no more."""
    return [int(k) for k in np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int))]


def folded(text: str, width: int = 18) -> list[str]:
    """Return a text as the lines of a label or title, each of at most `width` characters."""
    return textwrap.wrap(text, width) or [text]


def quantity(name: str, title: str | list[str] | None = None, **more: Any) -> Spec:
    """Return the channel of a field of numbers."""
    return {"field": name, "type": "quantitative"} | ({} if title is None else {"title": title}) | more


def category(name: str, title: str | None = None, **more: Any) -> Spec:
    """Return the channel of a field of names."""
    return quantity(name, title, **more) | {"type": "nominal"}


def layer(name: str, mark: str, encoding: Spec, transform: Sequence[Spec] = (), **look: Any) -> Spec:
    """Return a layer of a chart; `look` sets its mark, which has a tooltip only if the encoding names one."""
    tip = {} if "tooltip" in encoding else {"tooltip": None}
    return {
        "name": name,
        "mark": {"type": mark, **tip, **look},
        "encoding": encoding,
        **({"transform": list(transform)} if transform else {}),
    }


def layers(data: str, *parts: Spec, encoding: Spec | None = None, **more: Any) -> Spec:
    """Return a chart of layers on a named data set, with the page's signals: marked client, lit and hidden methods."""
    signals: Spec = {"shown": "", "lit": "", "hidden": []}
    more.setdefault("params", [])
    params = [{"name": name, "value": value} for name, value in signals.items()] + more.pop("params")
    return {
        "data": {"name": data},
        "params": params,
        "encoding": encoding or {},
        "layer": list(parts),
        **more,
    }
