"""Methods by federations: several experiments on different data, average ranks of methods over them, and a diagram.

Each federation is ranked by its own metric. Only methods that are in every federation, by label, are ranked.

The critical-difference diagram of Demšar (2006) has the methods on a line of average ranks, and bars over groups that
do not differ. It is laid out once, in points with y downwards, and drawn as SVG, as TikZ, and as a PNG or PDF file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tailorfl.evaluation.comparisons import Ranking, ranking
from tailorfl.report.merging import merge
from tailorfl.report.page.charts import Look
from tailorfl.report.plots import empty_figure, literal, save
from tailorfl.report.result import ExperimentResult
from tailorfl.report.tables import MISSING, Cell, Table, tex
from tailorfl.runs.files import encode
from tailorfl.runs.fingerprint import samples_of

ALIKE = 2
"""Fewest federations, and fewest methods, that can be ranked."""
AXIS, TOP = 260.0, 48.0
"""Length and position of the axis of ranks."""
LEAST = 190.0
"""Least space for names on either side of the axis."""
LETTER = 0.62
"""Width of a letter, as a share of its size."""
STEP = 19.0
"""Distance between the lines of two methods."""
BAR = 7.0
"""Distance between two bars."""
SIZE = 12.0
"""Font size."""


@dataclass(frozen=True)
class Matrix:
    """Results by the name of their federation; methods are in order of first appearance."""

    results: Mapping[str, ExperimentResult]

    @property
    def displayed(self) -> Matrix:
        """The matrix with display names as labels."""
        return Matrix({name: result.displayed for name, result in self.results.items()})

    @cached_property
    def labels(self) -> list[str]:
        """Labels of all methods."""
        return list(dict.fromkeys(label for result in self.results.values() for label in result.labels))

    @cached_property
    def cells(self) -> dict[tuple[str, str], tuple[float, float, bool]]:
        """(federation, method) -> (mean, half width of its interval, whether it is clearly the federation's best)."""
        return {
            (name, str(label)): (float(row["mean"]), float(row["mean_ci"]), bool(row["mean_best"]))
            for name, result in self.results.items()
            for label, row in result.table.iterrows()
        }

    @cached_property
    def ranked(self) -> list[str]:
        """The methods that have a number in every federation."""
        return [
            label
            for label in self.labels
            if not any(np.isnan(self.cells.get((name, label), (np.nan,))[0]) for name in self.results)
        ]

    @cached_property
    def ranking(self) -> Ranking | None:
        """The ranks of `ranked`; None if there are too few federations or methods."""
        if min(len(self.results), len(self.ranked)) < ALIKE:
            return None
        scores = [[self.cells[name, label][0] for label in self.ranked] for name in self.results]
        higher = [not result.lower_is_better for result in self.results.values()]
        return ranking(scores, higher_is_better=higher)

    @cached_property
    def ordered(self) -> list[tuple[str, float | None]]:
        """(method, average rank), the best first, methods without a rank last."""
        averages = [] if self.ranking is None else self.ranking.average.tolist()
        ranks: dict[str, float] = dict(zip(self.ranked, averages, strict=False))
        unranked = [label for label in self.labels if label not in ranks]
        return [*sorted(ranks.items(), key=lambda pair: pair[1]), *((label, None) for label in unranked)]

    @property
    def table(self) -> Table:
        """Table of methods, best first, by federations, with average ranks; bold is best beyond the noise."""
        looks = {name: Look.of(result) for name, result in self.results.items()}
        rows = []
        for label, rank in self.ordered:
            row = [Cell(label)]
            for name, look in looks.items():
                mean, half_width, is_best = self.cells.get((name, label), (np.nan, np.nan, False))
                row.append(Cell(look.spread(mean, half_width), mean, is_best))
            rows.append([*row, Cell(MISSING if rank is None else f"{rank:.2f}", rank)])
        head = [
            "Method",
            *(f"{name}: {look.name}" for name, look in looks.items()),
            "Average rank",
        ]
        note = (
            "Mean over clients of each federation's own metric (deployed models, own test parts), mean over seeds ± "
            "half width of the 95 % interval; bold: better than every other method of the column beyond the noise. "
            "Average rank over federations: 1 is the best."
        )
        return Table("Methods by federations", head, rows, note)

    def picture(self, which: str) -> Diagram | None:
        """Return the diagram with the groups of "nemenyi" or "wilcoxon"; None without ranks."""
        ranks = self.ranking
        if ranks is None:
            return None
        groups, critical = {
            "nemenyi": (ranks.nemenyi_groups, ranks.critical),
            "wilcoxon": (ranks.wilcoxon_groups, None),
        }[which]
        return diagram(self.ranked, ranks.average.tolist(), groups, critical)

    @property
    def latex(self) -> str:
        """A booktabs table, the best of a federation beyond the noise in bold, and the diagram in TikZ."""
        drawn = self.picture("nemenyi")
        head = "% needs \\usepackage{booktabs} and \\usepackage{tikz}\n"
        return head + self.table.latex() + ("" if drawn is None else "\n" + tikz(drawn))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of methods: label, rank (None without), then for every federation mean and, as "NAME_ci", half width."""
        rows = []
        for label, rank in self.ordered:
            row: dict[str, Any] = {"label": label, "rank": rank}
            for name in self.results:
                row[name], row[f"{name}_ci"], _ = self.cells.get((name, label), (np.nan, np.nan, False))
            rows.append(row)
        return rows

    @property
    def csv(self) -> str:
        """The rows as CSV, without rounding."""
        import pandas as pd

        return str(pd.DataFrame(self.rows).to_csv(index=False, lineterminator="\n"))


def by_federation(results: Mapping[Path, ExperimentResult]) -> dict[str, list[Path]]:
    """Group folders with experiments on the same data.

    A group has the name of its first folder, or the folder's path if several groups would have that name.
    """
    groups: dict[str, list[Path]] = {}
    for folder, result in results.items():
        samples = samples_of(result.jobs[0][1].config)
        data = encode([result.config.data.model_dump(mode="json"), samples])
        groups.setdefault(data, []).append(folder)
    names = [folders[0].name for folders in groups.values()]
    return {
        name if names.count(name) == 1 else str(folders[0]): folders
        for name, folders in zip(names, groups.values(), strict=True)
    }


def matrix(results: Mapping[Path, ExperimentResult], groups: Mapping[str, Sequence[Path]]) -> Matrix:
    """Return the matrix of results by folder; folders of one federation are merged.

    Raises:
        RunError: folders of one federation cannot be merged, see `merging.merge`.
    """
    return Matrix(
        {
            name: results[folders[0]] if len(folders) == 1 else merge(folders, None)[""]
            for name, folders in groups.items()
        }
    )


@dataclass(frozen=True)
class Stroke:
    """A line from one point to another."""

    x1: float
    y1: float
    x2: float
    y2: float
    width: float = 1.0


@dataclass(frozen=True)
class Label:
    """A text with its middle (or start, or end) at a point of its baseline."""

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

    `groups` are methods that do not differ, as positions in `names`; `critical`, if given, is drawn as a length above
    the axis.
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
    """Return an SVG element in the colour of the surrounding text; `alt` describes it."""
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
    """Write the picture in the format of the suffix. Raises RunError if the file cannot be written."""
    figure = empty_figure((drawn.width / 72, drawn.height / 72))
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
