"""The critical-difference diagram of Demšar (2006): methods on a line of average ranks, bars over those that are alike.

It is laid out once, in points with y downwards, and drawn as SVG, as TikZ, and as a file of PNG or PDF.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

from tailorfl.report.plots import literal, save
from tailorfl.report.tables import tex

AXIS, TOP = 260.0, 48.0
"""Length and position of the axis of ranks."""
LEAST = 190.0
"""Room for names on either side of the axis."""
LETTER = 0.62
"""Width of a letter, as a share of its size."""
STEP = 19.0
"""Between the lines of two methods."""
BAR = 7.0
"""Between two bars."""
SIZE = 12.0
"""Of letters."""


@dataclass(frozen=True)
class Stroke:
    """From one point to another."""

    x1: float
    y1: float
    x2: float
    y2: float
    width: float = 1.0


@dataclass(frozen=True)
class Label:
    """A text whose middle (or begin, or end) is at a point of its baseline."""

    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Diagram:
    """Lines and texts, `width` points wide and `height` high."""

    lines: list[Stroke]
    labels: list[Label]
    width: float
    height: float


def diagram(
    names: Sequence[str], average: Sequence[float], groups: Sequence[Sequence[int]], critical: float | None
) -> Diagram:
    """Lay the diagram out: the best rank on the left, half of the methods on each side.

    `groups` are those that do not differ, as places in `names`; `critical` is drawn as a length above the axis where it
    is given.
    """
    count = len(names)
    order = sorted(range(count), key=lambda k: average[k])
    texts = [f"{name} ({rank:.2f})" for name, rank in zip(names, average, strict=True)]
    left = max(LEAST, 24 + LETTER * SIZE * max(map(len, texts)))
    right, unit = left + AXIS, AXIS / max(count - 1, 1)
    width = left + right

    def at(rank: float) -> float:
        return left + (rank - 1) * unit

    lines = [Stroke(left, TOP, right, TOP)]
    labels = []
    for rank in range(1, count + 1):
        lines.append(Stroke(at(rank), TOP, at(rank), TOP - 6))
        labels.append(Label(at(rank), TOP - 10, str(rank), "middle"))
    if critical is not None:
        end = min(left + critical * unit, width - 10)
        lines += [Stroke(left, 16, end, 16, 2), Stroke(left, 12, left, 20, 2), Stroke(end, 12, end, 20, 2)]
        labels.append(Label((left + end) / 2, 10, f"critical difference {critical:.2f}", "middle"))
    for number, group in enumerate(groups):
        ranks = [average[k] for k in group]
        y = TOP + 8 + BAR * number
        lines.append(Stroke(at(min(ranks)) - 3, y, at(max(ranks)) + 3, y, 3.5))
    begin = TOP + 22 + BAR * len(groups)
    half = (count + 1) // 2
    for place, k in enumerate(order):
        is_left = place < half
        row = place if is_left else count - 1 - place
        y, x = begin + STEP * row, at(average[k])
        side = left - 20 if is_left else right + 20
        lines += [Stroke(x, TOP, x, y), Stroke(x, y, side, y)]
        labels.append(Label(side + (-4 if is_left else 4), y + 4, texts[k], "end" if is_left else "start"))
    return Diagram(lines, labels, width, begin + STEP * half)


def svg(drawn: Diagram, alt: str) -> str:
    """Return an SVG element in the colour of the text around it; `alt` says what it shows."""
    parts = [
        f'<line x1="{n.x1:.1f}" y1="{n.y1:.1f}" x2="{n.x2:.1f}" y2="{n.y2:.1f}" stroke="currentColor" '
        f'stroke-width="{n.width:g}"/>'
        for n in drawn.lines
    ]
    parts += [
        f'<text x="{t.x:.1f}" y="{t.y:.1f}" text-anchor="{t.anchor}" fill="currentColor">{escape(t.text)}</text>'
        for t in drawn.labels
    ]
    head = f'viewBox="0 0 {drawn.width:g} {drawn.height:g}" width="{drawn.width:g}" font-size="{SIZE:g}" role="img"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {head} aria-label="{escape(alt)}">{"".join(parts)}</svg>'


def tikz(drawn: Diagram) -> str:
    """Return a TikZ picture, for documents that use the package tikz."""
    anchor = {"start": "base west", "middle": "base", "end": "base east"}
    lines = [
        rf"\draw[line width={n.width / 2:g}pt] ({n.x1:.1f},{-n.y1:.1f}) -- ({n.x2:.1f},{-n.y2:.1f});"
        for n in drawn.lines
    ]
    lines += [
        rf"\node[anchor={anchor[t.anchor]}, inner sep=0] at ({t.x:.1f},{-t.y:.1f}) {{\small {tex(t.text)}}};"
        for t in drawn.labels
    ]
    body = "\n".join(f"  {line}" for line in lines)
    return f"\\begin{{tikzpicture}}[x=0.7pt, y=0.9pt]\n{body}\n\\end{{tikzpicture}}\n"


def draw(drawn: Diagram, path: Path) -> None:
    """Write the picture in the format of the suffix. Raises RunError where the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(drawn.width / 72, drawn.height / 72))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    for line in drawn.lines:
        axes.plot([line.x1, line.x2], [line.y1, line.y2], color="black", linewidth=line.width)
    side = {"start": "left", "middle": "center", "end": "right"}
    for label in drawn.labels:
        axes.text(
            label.x,
            label.y,
            literal(label.text, len(label.text)),
            ha=side[label.anchor],
            fontsize=SIZE * 0.85,
        )
    axes.set_xlim(0, drawn.width)
    axes.set_ylim(drawn.height, 0)
    axes.set_axis_off()
    save(figure, path)
