"""Plots of runs and pictures of federations.

For runs: a metric per round, its distribution over clients, and the metric against communicated bytes. For a
federation: clients × classes (or bins of a target), next to the clients' sizes.

Plots of runs take a long DataFrame with a "label" column (one line or box each, in order of first appearance). All
write the file atomically in the format of its suffix (png, pdf or svg), and use matplotlib's objects directly: without
pyplot there is no global state and no display.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tailorfl.errors import ConfigError, RunError
from tailorfl.evaluation.metrics import UNIT_METRICS
from tailorfl.report.columns import metric_name
from tailorfl.report.tables import human_bytes, over_seeds
from tailorfl.runs.files import replacing

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from tailorfl.data.overview import Overview

# Okabe and Ito's palette (2008), suitable for all types of colour vision, without its yellow, which is too light on
# white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")  # the second seven lines are dashed, and so on
DPI = 150
LEGEND_ROWS = 17  # lines in a column of the legend
COLUMN_WIDTH = 2.0  # inches of figure that a further column takes
LINE_HEIGHT = 0.19  # inches of figure that a line of a label takes
LONGEST_LINE = 24  # characters; longer labels are folded
USUAL_LINE, LETTER = 12, 0.1  # characters of a label, and inches of figure that each further one takes
CAPTION = 62  # characters in a line above or below the axes
MARKS = 12  # markers on a line, whatever its number of rounds
FORMATS = (".png", ".pdf", ".svg")
MOST_CLIENTS = 1_000
"""Largest number of drawn clients; of more, that many are drawn, evenly spaced by size."""
MOST_NAMES = 60
"""Largest number of clients or cells with names, which would overlap with more."""
LONGEST_NAME = 40
"""Largest number of characters of a name on an axis; longer ones are folded."""


def metric_per_round(frame: pd.DataFrame, path: str | Path, *, metric: str = "accuracy") -> None:
    """Draw a line per label: the mean over seeds, with a band of its 95 % confidence interval, if it has one.

    `frame` has the columns label, seed, round and `metric`; rounds with NaN (not evaluated) are left out.
    Raises RunError if nothing is left to plot or the file cannot be written.
    """
    from matplotlib.ticker import MaxNLocator

    data = _usable(frame, ["label", "seed", "round", metric], metric)
    figure, axes = _figure(f"{metric_name(metric)} per round")
    for number, (label, group) in enumerate(data.groupby("label", sort=False)):
        band = bands(group, "round", metric)
        _line(axes, number, str(label), band.index, band["mean"])
        axes.fill_between(
            band.index, band["low"], band["high"], color=_colour(number), alpha=0.18, linewidth=0
        )
    axes.set_xlabel(literal("round (line: mean over seeds, band: 95 % confidence interval)", CAPTION))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _metric_axis(axes.yaxis, metric)
    _save(figure, axes, path)


def client_distribution(frame: pd.DataFrame, path: str | Path, *, metric: str = "accuracy") -> None:
    """Plot a row per label: clients as dots, quartiles as a box, 5 % to 95 % as whiskers, the mean as a diamond.

    `frame` has the columns label and `metric`, one row for each client (and seed, which are pooled); NaN are left
    out. Raises RunError if nothing is left to plot or the file cannot be written.
    """
    data = _usable(frame, ["label", metric], metric)
    groups = [(str(label), group[metric].to_numpy()) for label, group in data.groupby("label", sort=False)]
    names = [f"{literal(label)}\nn = {len(values)}" for label, values in groups]
    height = 1.6 + sum(max(0.55, LINE_HEIGHT * (name.count("\n") + 1)) for name in names)
    figure, axes = _figure(f"{metric_name(metric)} of the clients", height=height)
    jitter = np.random.default_rng(0)
    for number, (_, values) in enumerate(groups):
        heights = number + jitter.uniform(-0.22, 0.22, len(values))
        axes.scatter(values, heights, s=9, alpha=0.45, linewidth=0, color=_colour(number), zorder=2)
        _box(axes, number, values)
    axes.set_yticks(range(len(groups)), names)
    axes.invert_yaxis()  # first label on top, as in a table
    _metric_axis(axes.xaxis, metric, " (box: quartiles, line: median, diamond: mean, whiskers: 5 % to 95 %)")
    _save(figure, axes, path)


def metric_by_bytes(frame: pd.DataFrame, path: str | Path, *, metric: str = "accuracy") -> None:
    """Draw the mean over seeds against the mean bytes communicated so far, on a logarithmic axis.

    `frame` has the columns label, seed, round, bytes (cumulative, up and down) and `metric`. The last value of a label
    that never communicates is drawn as a horizontal line. Raises RunError if nothing is left to plot or the file
    cannot be written.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    data = _usable(frame, ["label", "seed", "round", "bytes", metric], metric)
    figure, axes = _figure(f"{metric_name(metric)} for communication")
    for number, (label, group) in enumerate(data.groupby("label", sort=False)):
        means = group.groupby("round")[["bytes", metric]].mean()
        sent = means[means["bytes"] > 0]
        if len(sent):
            _line(axes, number, str(label), sent["bytes"], sent[metric])
        else:
            look: Any = {"color": _colour(number), "linestyle": (0, (1, 1)), "linewidth": 1.8}
            axes.axhline(means[metric].iloc[-1], label=literal(f"{label} (no communication)"), **look)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value).replace(".0 ", " "))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bytes sent by all clients and the server so far (log scale)")
    _metric_axis(axes.yaxis, metric)
    _save(figure, axes, path)


def literal(text: str, width: int = LONGEST_LINE) -> str:
    """Escape dollar signs, which start formulas in matplotlib, and fold long texts."""
    folded = textwrap.fill(text, width) if len(text) > width else text
    return folded.replace("$", r"\$")


def _usable(frame: pd.DataFrame, columns: list[str], metric: str) -> pd.DataFrame:
    """Return these columns, without rows that lack a value in any of them."""
    absent = [name for name in columns if name not in frame]
    if absent:
        raise RunError(
            f"cannot plot {metric}: column {', '.join(absent)} is missing from {list(frame.columns)}"
        )
    data = frame[columns].dropna()
    if data.empty:
        raise RunError(f"cannot plot {metric}: no row has a value; was it evaluated?")
    return data


def bands(group: pd.DataFrame, key: str, metric: str) -> pd.DataFrame:
    """Return the mean over seeds by key, with the ends of its interval as "low" and "high" (the mean without one).

    For shares the ends are clipped to [0, 1], which Student-t intervals may exceed.
    """
    import pandas as pd

    stats = over_seeds({at: {"mean": values.tolist()} for at, values in group.groupby(key)[metric]})
    mean, width = stats["mean"], stats["mean_ci"].fillna(0.0)
    ends = (0.0, 1.0) if metric in UNIT_METRICS else (None, None)
    return pd.DataFrame({"mean": mean, "low": (mean - width).clip(*ends), "high": (mean + width).clip(*ends)})


def empty_figure(size: tuple[float, float], layout: Literal["constrained"] | None = None) -> Figure:
    """Return a figure of `size` inches, which `save` can write without pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _figure(title: str, height: float = 4.2) -> tuple[Figure, Axes]:
    figure = empty_figure((7.6, height), "constrained")
    axes = figure.add_subplot()
    axes.set_title(literal(title[:1].upper() + title[1:], CAPTION), fontsize=12)
    axes.grid(color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _line(axes: Axes, number: int, label: str, x: Any, y: pd.Series) -> None:
    axes.plot(
        x,
        y,
        label=literal(label),
        color=_colour(number),
        linestyle=DASHES[number // len(COLOURS) % len(DASHES)],
        linewidth=1.8,
        marker="osD^vPX"[number % 7],
        markersize=4.5,
        markevery=max(1, len(x) // MARKS),
    )


def _box(axes: Axes, number: int, values: np.ndarray) -> None:
    """Draw quartiles and median as a box, whiskers to 5 % and 95 %, and the mean as a diamond, at height `number`."""
    low, first, median, third, high = np.percentile(values, [5, 25, 50, 75, 95])
    colour = _colour(number)
    axes.barh(number, third - first, 0.6, first, facecolor="none", edgecolor=colour, linewidth=1.6, zorder=3)
    axes.hlines([number, number], [low, third], [first, high], color=colour, linewidth=1.6, zorder=3)
    axes.vlines(median, number - 0.3, number + 0.3, color="black", linewidth=2, zorder=3)
    axes.plot(values.mean(), number, "D", markersize=6, color="white", markeredgecolor="black", zorder=4)


def _metric_axis(axis: Axis, metric: str, legend: str = "") -> None:
    from matplotlib.ticker import PercentFormatter

    if metric in UNIT_METRICS:
        axis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=""))
    axis.set_label_text(
        literal(f"{metric_name(metric)}{' in %' if metric in UNIT_METRICS else ''}{legend}", CAPTION)
    )


def _save(figure: Figure, axes: Axes, path: str | Path) -> None:
    rows = [line for label in axes.get_legend_handles_labels()[1] for line in label.split("\n")]
    names = rows or [line for label in axes.get_yticklabels() for line in label.get_text().split("\n")]
    columns = max(1, math.ceil(len(rows) / LEGEND_ROWS))
    width, height = figure.get_size_inches()
    further = LETTER * max(0, max(map(len, names)) - USUAL_LINE)
    figure.set_size_inches(width + COLUMN_WIDTH * (columns - 1) + further * columns, height)
    if rows:
        # Next to the axes, so that it covers no line, and no taller than they are.
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9, ncols=columns)
    save(figure, Path(path))


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the suffix, with the same bytes for equal figures.

    Raises:
        RunError: the file cannot be written.
    """
    from matplotlib import rc_context

    kind = path.suffix.lower()[1:]
    date = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    # TrueType fonts, which journals require, and the same ids of parts every time.
    with (
        replacing(path) as part,
        warnings.catch_warnings(),
        rc_context({"pdf.fonttype": 42, "svg.hashsalt": ""}),
    ):
        # A letter that the font lacks is shown as a box; the warning about it would not help.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(part, format=kind, dpi=DPI, metadata=date)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def draw_federation(federation: Overview, path: Path) -> None:
    """Write a picture of a federation as PNG, PDF or SVG.

    Raises:
        ConfigError: for another suffix.
        RunError: the file cannot be written.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(
            f"'{path}' is not a picture that can be written; use a name with one of the endings {', '.join(FORMATS)}"
        )
    chosen = federation.from_large_to_small(MOST_CLIENTS)
    named = len(chosen) <= MOST_NAMES
    rows = np.arange(len(chosen))
    height = min(12.0, max(3.0, 1.5 + 0.22 * len(chosen)))
    figure = empty_figure((10.0 if federation.cells else 6.0, height), "constrained")
    grid = figure.subplots(1, 2 if federation.cells else 1, sharey=True, squeeze=False)[0]
    if federation.cells:
        axes = grid[0]
        shares, most = federation.shares[chosen], float(max(federation.shares.max(), 1e-9))
        drawn = axes.imshow(shares, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=most)
        figure.colorbar(drawn, ax=axes, label="share of the client's training samples")
        axes.set_xlabel(federation.what)
        if len(federation.cells) <= MOST_NAMES:
            cells = [literal(name, LONGEST_NAME) for name in federation.cells]
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
            rows, [literal(federation.clients[client], LONGEST_NAME) for client in chosen], fontsize=7
        )
    else:
        grid[0].set_yticks([])
        some = (
            "" if len(chosen) == len(federation.clients) else f", {len(chosen):,} of them from large to small"
        )
        grid[0].set_ylabel(f"{len(federation.clients):,} clients{some}")
    figure.suptitle(literal(f"{federation.name}: {len(federation.clients):,} clients", CAPTION), fontsize=10)
    save(figure, path)
