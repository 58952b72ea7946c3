"""Pieces of Vega-Lite specifications: channels, layers, and the signals that all charts of the page share."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from tailorfl.report.page.parts import Spec


def number(value: float) -> float | None:
    """Return a number as JSON has it: one that is not finite is none. Seven digits are more than a picture shows."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def evenly(count: int, most: int) -> list[int]:
    """Return the places of `most` of `count` things, evenly chosen; of all where there are no more."""
    return [int(k) for k in np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int))]


def folded(text: str, width: int = 18) -> list[str]:
    """Return a text as the lines of a label or title, of so many letters, which has no room in one."""
    return textwrap.wrap(text, width) or [text]


def quantity(name: str, title: str | list[str] | None = None, **more: Any) -> Spec:
    """Return the channel of a field of numbers."""
    return {"field": name, "type": "quantitative"} | ({} if title is None else {"title": title}) | more


def category(name: str, title: str | None = None, **more: Any) -> Spec:
    """Return the channel of a field of names."""
    return quantity(name, title, **more) | {"type": "nominal"}


def layer(name: str, mark: str, encoding: Spec, transform: Sequence[Spec] = (), **look: Any) -> Spec:
    """Return a layer of a chart; `look` is of its mark, which has a tip only where the encoding names one."""
    tip = {} if "tooltip" in encoding else {"tooltip": None}
    return {
        "name": name,
        "mark": {"type": mark, **tip, **look},
        "encoding": encoding,
        **({"transform": list(transform)} if transform else {}),
    }


def layers(data: str, *parts: Spec, encoding: Spec | None = None, **more: Any) -> Spec:
    """Return a chart of layers over a named set of data, with the page's signals: the client shown, methods hidden."""
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


SHOWN = [{"filter": "datum.id === shown"}]
"""Leaves the client that is marked."""
VISIBLE = [{"filter": "indexof(hidden, datum.label) < 0"}]
"""Leaves the methods that are not hidden."""
LIT = {"condition": {"test": "datum.label === lit", "value": 4}, "value": 2}
"""The width of a line, thicker for the method that is pointed at in the legend."""
