"""PNG picture of a function of two variables: lines of equal height, and marked points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailorfl.errors import RunError
from tailorfl.runs.files import replacing
from tailorfl.runs.plots import literal

LEVELS = 14
DPI = 150


def contours(
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    height: NDArray[np.float64],
    marks: Mapping[str, tuple[float, float]],
    path: Path,
    *,
    title: str,
) -> None:
    """Writes lines of equal `height` [b, a], their spacing even on a logarithmic scale above the lowest point.

    Raises RunError where no height is finite, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    finite = height[np.isfinite(height)]
    if not len(finite):
        raise RunError("no loss on the grid is finite, so there is nothing to draw; take a smaller radius")
    low, high = float(finite.min()), float(finite.max())
    span = max(high - low, 1e-12)
    levels = low + span * np.geomspace(1e-2, 1.0, LEVELS)
    figure = Figure(figsize=(6.4, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    drawn = axes.contour(a, b, np.where(np.isfinite(height), height, high), levels=levels, cmap="viridis")
    axes.clabel(drawn, fontsize=7, fmt="%.3g")
    for number, (name, (x, y)) in enumerate(marks.items()):
        axes.plot(x, y, "oD^"[number % 3], color="#D55E00", markersize=7, label=literal(name))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    axes.set_aspect("equal")  # both axes are in the same unit
    axes.set_title(literal(title), fontsize=9, wrap=True)
    axes.set_xlabel("a (along the first direction)")
    axes.set_ylabel("b (along the second direction)")
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=DPI)
