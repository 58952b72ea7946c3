"""How numbers and methods look on a page: units of the metric, colours and dashes of labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tailorfl.errors import first_few
from tailorfl.evaluation.metrics import UNIT_METRICS
from tailorfl.report.plots import COLOURS
from tailorfl.report.tables import Cell, Column

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult

INK = "var(--ink)"
"""A colour of the page's style, which follows its light or dark theme; pictures name it like any other."""
DASHES = ("", "7 4", "2 3", "7 3 2 3")
"""Of the first seven lines, the second seven, and so on, as the pictures beside the report have them."""


@dataclass(frozen=True)
class Look:
    """The metric of an experiment, and its methods in the order of the table."""

    metric: str
    labels: tuple[str, ...]

    @classmethod
    def of(cls, result: ExperimentResult) -> Look:
        """Return that of a result."""
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
        """Of numbers in tips."""
        return ".1%" if self.is_share else ".4~g"

    def axis(self, **more: Any) -> dict[str, Any]:
        """Return an axis of the metric."""
        return {"format": "%" if self.is_share else "~g", **more}

    @property
    def unit(self) -> str:
        """What stands behind a title."""
        return " (%)" if self.is_share else ""

    def spread(self, mean: float, half_width: float = math.nan, sign: str = "") -> str:
        """Return a number of the metric, or a difference with `sign` "+", with the half width of its interval."""
        return Column("", "", "percent" if self.is_share else "number").text(mean, half_width, sign)

    def cell(self, mean: float, half_width: float = math.nan, sign: str = "") -> Cell:
        """Return a number as the cell of a table."""
        return Cell(self.spread(mean, half_width, sign), mean)

    @property
    def colours(self) -> list[str]:
        """Of every label; what is black in print is the page's ink."""
        colours = [COLOURS[k % len(COLOURS)] for k in range(len(self.labels))]
        return [INK if colour == "#000000" else colour for colour in colours]

    @property
    def dashes(self) -> list[str]:
        """Of every label, as SVG writes them."""
        return [DASHES[k // len(COLOURS) % len(DASHES)] for k in range(len(self.labels))]

    def by_label(self, values: Sequence[Any], **more: Any) -> dict[str, Any]:
        """Return the channel of a chart that has a value for each label; the page has one legend for all charts."""
        scale = {"domain": list(self.labels), "range": list(values)}
        return {"field": "label", "type": "nominal", "scale": scale, "legend": None, **more}

    def line(self) -> dict[str, Any]:
        """Return the channels of lines of methods: colour and dashes."""
        dashes = [[int(n) for n in dash.split()] or [1, 0] for dash in self.dashes]
        return {"color": self.by_label(self.colours), "strokeDash": self.by_label(dashes)}


def named(labels: Sequence[str]) -> str:
    """Labels as running text, the first few of many."""
    return first_few(labels, 8)
