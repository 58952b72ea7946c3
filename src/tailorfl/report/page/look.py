"""How numbers and methods look on a page: units of the metric, colours and dashes of labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tailorfl.errors import first_few
from tailorfl.report.plots import COLOURS, SHARES
from tailorfl.report.tables import MISSING

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
        return cls(result.metric, tuple(dict.fromkeys(str(summary["label"]) for summary, _ in result.jobs)))

    @property
    def name(self) -> str:
        """The metric as text."""
        return self.metric.replace("_", " ")

    @property
    def is_share(self) -> bool:
        """Whether it is shown in percent."""
        return self.metric in SHARES

    @property
    def format(self) -> str:
        """Of numbers on axes and in tips."""
        return ".1%" if self.is_share else ".4~g"

    def text(self, value: float, sign: bool = False) -> str:
        """Return a number of the metric, or a difference with its sign: in percent where the metric is a share."""
        if math.isnan(value):
            return MISSING
        form = "+" if sign else ""
        return f"{100 * value:{form}.2f}" if self.is_share else f"{value:{form}.4g}"

    def spread(self, mean: float, half_width: float, sign: bool = False) -> str:
        """Return a mean with the half width of its interval, where it has one."""
        low = "" if math.isnan(half_width) or math.isnan(mean) else f" ± {self.text(half_width)}"
        return self.text(mean, sign) + low

    @property
    def unit(self) -> str:
        """What stands behind a title."""
        return " (%)" if self.is_share else ""

    @property
    def colours(self) -> list[str]:
        """Of every label; what is black in print is the page's ink."""
        found = [COLOURS[k % len(COLOURS)] for k in range(len(self.labels))]
        return [INK if colour == "#000000" else colour for colour in found]

    @property
    def dashes(self) -> list[str]:
        """Of every label, as SVG writes them."""
        return [DASHES[k // len(COLOURS) % len(DASHES)] for k in range(len(self.labels))]

    def colour(self) -> dict[str, Any]:
        """Return the channel of a chart that colours by label; the page has one legend for all charts."""
        scale = {"domain": list(self.labels), "range": self.colours}
        return {"field": "label", "type": "nominal", "scale": scale, "legend": None}

    def dash(self) -> dict[str, Any]:
        """Return the channel that dashes lines by label."""
        dashes = [[int(n) for n in dash.split()] or [1, 0] for dash in self.dashes]
        scale = {"domain": list(self.labels), "range": dashes}
        return {"field": "label", "type": "nominal", "scale": scale, "legend": None}


def named(labels: Sequence[str]) -> str:
    """Labels as running text, the first few of many."""
    return first_few(labels, 8)
