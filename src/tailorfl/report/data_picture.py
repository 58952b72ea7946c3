"""A picture of a federation: clients × classes (or bins of a target), and the clients' sizes beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tailorfl.errors import ConfigError
from tailorfl.report.plots import CAPTION, COLOURS, literal, save

if TYPE_CHECKING:
    from tailorfl.data.overview import Overview

FORMATS = (".png", ".pdf", ".svg")
MOST_CLIENTS = 1_000
"""More are drawn as that many of them, evenly spaced by size."""
MOST_NAMES = 60
"""With more clients, or cells, names would lie on one another."""
LONGEST_LINE = 40
"""Characters of a name on an axis; longer ones are folded."""


def draw_federation(federation: Overview, path: Path) -> None:
    """Write the picture as PNG, PDF or SVG.

    Raises:
        ConfigError: for another suffix.
        RunError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"a picture is written as {', '.join(FORMATS)}, but '{path}' ends otherwise")
    chosen = federation.from_large_to_small(MOST_CLIENTS)
    named = len(chosen) <= MOST_NAMES
    rows = np.arange(len(chosen))
    height = min(12.0, max(3.0, 1.5 + 0.22 * len(chosen)))
    figure = Figure(figsize=(10.0 if federation.cells else 6.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, 2 if federation.cells else 1, sharey=True, squeeze=False)[0]
    if federation.cells:
        axes = grid[0]
        shares, most = federation.shares[chosen], float(max(federation.shares.max(), 1e-9))
        drawn = axes.imshow(shares, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=most)
        figure.colorbar(drawn, ax=axes, label="share of the client's training samples")
        axes.set_xlabel(federation.what)
        if len(federation.cells) <= MOST_NAMES:
            cells = [literal(name, LONGEST_LINE) for name in federation.cells]
            axes.set_xticks(range(len(cells)), cells, rotation=90, fontsize=7)
    axes = grid[-1]
    start, thickness = np.zeros(len(chosen)), 0.8 if named else 1.0
    for (part, sizes), colour in zip(federation.sizes.items(), COLOURS, strict=False):
        counts = sizes[chosen].astype(np.float64)
        label = {"val": "validation"}.get(part, part)
        axes.barh(rows, counts, left=start, height=thickness, color=colour, label=label)
        start += counts
    axes.set_xlabel("samples")
    figure.legend(loc="outside lower right", ncols=3, fontsize=8, frameon=False)
    grid[0].set_ylim(len(chosen) - 0.5, -0.5)
    if named:
        grid[0].set_yticks(
            rows, [literal(federation.clients[client], LONGEST_LINE) for client in chosen], fontsize=7
        )
    else:
        grid[0].set_yticks([])
        some = (
            "" if len(chosen) == len(federation.clients) else f", {len(chosen):,} of them from large to small"
        )
        grid[0].set_ylabel(f"{len(federation.clients):,} clients{some}")
    figure.suptitle(literal(f"{federation.name}: {len(federation.clients):,} clients", CAPTION), fontsize=10)
    save(figure, path)
