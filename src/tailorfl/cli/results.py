"""Results for the terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tailorfl.cli.estimates import show_reductions

if TYPE_CHECKING:
    from tailorfl.experiments.curves import Section
    from tailorfl.experiments.result import ExperimentResult


WIDEST = 1000
LESS_NEEDED = ("best10", "weighted_mean", "share_beating_local", "std")
"""Columns that a narrow terminal goes without, the least needed first, after those of further test sets."""


def show_comparison(console: Console, result: ExperimentResult, name: str) -> None:
    """Prints the comparison table; where the console is too narrow, without its less needed columns."""
    from tailorfl.runs.tables import rich_table

    frame, columns = result.marked(result.table), list(result.columns)
    for column in columns:
        # Their spread over seeds says little and takes much room; comparison.md has it.
        if column.key == "std" or column.unit in ("bytes", "seconds"):
            frame[f"{column.key}_ci"] = math.nan
    seeds = int(frame["seeds"].max())
    title = (
        f"{name}: mean over {seeds} seeds ± half width of the 95 % interval"
        if seeds > 1
        else f"{name}: 1 seed"
    )
    further = [column.key for column in reversed(columns) if column.key.startswith("deployed.")]
    table, left_out = _unbroken(rich_table(frame, columns, title)), []
    for key in (*further, *LESS_NEEDED):
        if Measurement.get(console, console.options.update(width=WIDEST), table).maximum <= console.width:
            break
        left_out += [column.title for column in columns if column.key == key]
        columns = [column for column in columns if column.key != key]
        table = _unbroken(rich_table(frame, columns, title))
    console.print(table)
    show_reductions(console, result.reductions)
    if left_out:
        more = f"not shown for want of width: {', '.join(left_out)}; all columns are in comparison.md"
        console.print(more, style="dim", highlight=False)


def _unbroken(table: Table) -> Table:
    """The table with titles folded to the width of their cells, and nothing else that wraps."""
    whole = Table(title=table.title)
    cells = [[Text.from_markup(str(cell)) for cell in column.cells] for column in table.columns]
    for column, texts in zip(table.columns, cells, strict=True):
        widest = max((text.cell_len for text in texts), default=0)
        head = str(column.header)
        folded = textwrap.fill(head, max(widest, *map(len, head.split())), break_long_words=False)
        whole.add_column(folded, justify=column.justify, no_wrap=True)
    for row in zip(*cells, strict=True):
        whole.add_row(*row)
    return whole


def published_table(result: ExperimentResult, published: Mapping[str, Any]) -> Table:
    """A paper's numbers beside ours, one row each, with the half width of our 95 % interval over seeds."""
    from tailorfl.experiments.published import beside

    table = Table(title="published and ours")
    for number, name in enumerate(("Method", "Number", "Published", "Ours", "Difference")):
        table.add_column(name, justify="left" if number < 2 else "right")
    for row in beside(result, published).to_dict("records"):
        spread = "" if math.isnan(row["ours_ci"]) else f" ± {row['ours_ci']:.4f}"
        ours = "–" if math.isnan(row["ours"]) else f"{row['ours']:.4f}{spread}"
        difference = "–" if math.isnan(row["difference"]) else f"{row['difference']:+.4f}"
        table.add_row(
            escape(row["label"]), escape(row["quantity"]), f"{row['published']:.4f}", ours, difference
        )
    return table


def section_table(section: Section) -> Table:
    """A small table of a report for the terminal."""
    table = Table(title=section.title)
    for number, name in enumerate(section.head):
        table.add_column(escape(name), justify="right" if number else "left")
    for row in section.rows:
        table.add_row(*map(escape, row))
    return table
