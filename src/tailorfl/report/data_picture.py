"""A picture of a federation: clients × classes (or bins of a target), and the clients' sizes beside it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tailorfl.errors import ConfigError
from tailorfl.report.plots import COLOURS, DPI, literal
from tailorfl.runs.files import replacing

if TYPE_CHECKING:
    from tailorfl.data.overview import Overview

FORMATS = (".png", ".pdf", ".svg")
MOST_CLIENTS = 1_000
"""More are drawn as that many of them, evenly spaced by size."""
MOST_NAMES = 60
"""With more clients, or cells, names would lie on one another."""
LONGEST = 30
"""Characters of a name on an axis."""


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
        drawn = axes.imshow(
            federation.shares[chosen],
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
            vmin=0,
            vmax=float(max(federation.shares.max(), 1e-9)),
        )
        figure.colorbar(drawn, ax=axes, label="share of the client's training samples")
        axes.set_xlabel(federation.what)
        if len(federation.cells) <= MOST_NAMES:
            axes.set_xticks(
                range(len(federation.cells)),
                [_short(name) for name in federation.cells],
                rotation=90,
                fontsize=7,
            )
    axes = grid[-1]
    start = np.zeros(len(chosen))
    for (part, sizes), colour in zip(federation.sizes.items(), COLOURS, strict=False):
        counts = sizes[chosen].astype(np.float64)
        axes.barh(
            rows,
            counts,
            left=start,
            height=0.8 if named else 1.0,
            color=colour,
            label={"val": "validation"}.get(part, part),
        )
        start += counts
    axes.set_xlabel("samples")
    figure.legend(loc="outside lower right", ncols=3, fontsize=8, frameon=False)
    grid[0].set_ylim(len(chosen) - 0.5, -0.5)
    if named:
        grid[0].set_yticks(rows, [_short(federation.clients[client]) for client in chosen], fontsize=7)
    else:
        grid[0].set_yticks([])
        some = (
            "" if len(chosen) == len(federation.clients) else f", {len(chosen):,} of them from large to small"
        )
        grid[0].set_ylabel(f"{len(federation.clients):,} clients{some}")
    figure.suptitle(literal(f"{federation.name}: {len(federation.clients):,} clients"), fontsize=10)
    with replacing(path) as part_file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a letter that the font lacks shows as a box
        figure.savefig(part_file, format=path.suffix.lower()[1:], dpi=DPI)


def _short(name: str) -> str:
    return literal(name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…")
