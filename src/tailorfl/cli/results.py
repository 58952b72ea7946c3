"""Results for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailorfl.cli.estimates import show_reductions
from tailorfl.cli.screen import PROSE, fits, say, show_table
from tailorfl.report.tables import MISSING

if TYPE_CHECKING:
    from tailorfl.report.curves import Section
    from tailorfl.report.matrix import Matrix
    from tailorfl.report.result import ExperimentResult

FIRST = ("mean", "worst10", "epsilon", "bytes", "share_beating_local")
"""How good, for the worst clients too, at what cost: what stands in the first table where one has no room for all."""
MATRIX_COLUMNS = 3
"""Federations that stand side by side in a terminal."""
DETAILS = ("std", "best10", "weighted_mean", "gradients_each")
"""Columns that a narrow terminal goes without, the least needed first; all others stay."""


def show_comparison(console: Console, result: ExperimentResult, name: str) -> None:
    """Print the comparison table; in a narrow console without details, and in several parts if need be."""
    from tailorfl.report.tables import rich_table

    frame, columns = result.marked(result.table), list(result.columns)
    for column in columns:
        # Their spread over seeds says little and takes much room; comparison.md has it.
        if column.key == "std" or column.unit in ("bytes", "seconds"):
            frame[f"{column.key}_ci"] = math.nan
    counts = set(frame["seeds"])
    seeds = int(max(counts))
    title = (
        f"{name}: mean over {seeds} seeds ± half width of the 95 % interval"
        if seeds > 1
        else f"{name}: 1 seed"
    )
    left_out = []
    for key in DETAILS:
        if fits(rich_table(frame, columns), console.width):
            break
        left_out += [column.title for column in columns if column.key == key]
        columns = [column for column in columns if column.key != key]
    table = rich_table(frame, columns)
    if not fits(table, console.width):
        columns.sort(key=lambda column: FIRST.index(column.key) if column.key in FIRST else len(FIRST))
        table = rich_table(frame, columns, seeds=len(counts) > 1)
    table.title = Text(title)
    for line in result.without_effect:
        say(console, line, style="bold yellow")
    show_table(console, table)
    show_reductions(console, result.reductions)
    for line in result.worst_clients:
        say(console, line, style="dim")
    if left_out:
        say(console, f"further columns are in comparison.md: {', '.join(left_out)}", style="dim")


def show_matrix(console: Console, matrix: Matrix) -> None:
    """Print methods by federations with their average ranks, in several tables where there are many federations."""
    names = list(matrix.results)
    for begin in range(0, len(names), MATRIX_COLUMNS):
        table = Table(title=Text("methods by federations" if begin == 0 else "further federations"))
        table.add_column("Method")
        table.add_column("average rank", justify="right")
        shown = names[begin : begin + MATRIX_COLUMNS]
        for name in shown:
            table.add_column(Text(matrix.title(name)), justify="right")
        for label, rank in matrix.ordered:
            cells = [
                Text(
                    matrix.text(name, label),
                    style="bold" if matrix.cells.get((name, label), (0, 0, False))[2] else "",
                )
                for name in shown
            ]
            table.add_row(Text(label), MISSING if rank is None else f"{rank:.2f}", *cells)
        show_table(console, table)
    found = matrix.ranking
    if found is not None:
        say(
            console,
            f"Friedman: F = {found.f:.3g}, p = {found.f_p:.3g}; ranks differ from {found.critical:.2f} apart (Nemenyi)",
        )


def published_table(result: ExperimentResult, published: Mapping[str, Any]) -> Table:
    """Return a paper's numbers beside ours, one row each, with the half width of our 95 % interval over seeds."""
    from tailorfl.report.published import beside

    table = Table(title="published and ours")
    for number, name in enumerate(("Method", "Number", "Published", "Ours", "Difference")):
        table.add_column(
            name, justify="left" if number < 2 else "right", ratio=PROSE if number == 1 else None
        )
    for row in beside(result, published).to_dict("records"):
        spread = "" if math.isnan(row["ours_ci"]) else f" ± {row['ours_ci']:.4f}"
        ours = "–" if math.isnan(row["ours"]) else f"{row['ours']:.4f}{spread}"
        difference = "–" if math.isnan(row["difference"]) else f"{row['difference']:+.4f}"
        table.add_row(Text(row["label"]), Text(row["quantity"]), f"{row['published']:.4f}", ours, difference)
    return table


def section_table(section: Section) -> Table:
    """Return a small table of a report for the terminal."""
    table = Table(title=Text(section.title))
    for number, name in enumerate(section.head):
        table.add_column(Text(name), justify="right" if number else "left")
    for row in section.rows:
        table.add_row(*map(Text, row))
    return table


def result_lines(variant: str, result: ExperimentResult) -> list[dict[str, Any]]:
    """Return the comparison table as plain values: a line a method, with what comparison.csv has of it."""
    frame = result.marked(result.table).reset_index()
    rows = [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
    return [{"variant": variant, "folder": str(result.path), **row} for row in rows]
