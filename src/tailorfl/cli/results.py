"""Results for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from tailorfl.cli.estimates import show_reductions
from tailorfl.cli.screen import fits, remark, say, show_table, stderr, stdout

if TYPE_CHECKING:
    from tailorfl.report.matrix import Matrix
    from tailorfl.report.result import ExperimentResult

MATRIX_COLUMNS = 3
"""Federations that stand side by side in a terminal."""
DETAILS = ("std", "best10", "weighted_mean", "gradients_each")
"""Columns that a narrow terminal goes without, the least needed first; all others stay."""


def show_result(result: ExperimentResult, target: float | None = None) -> None:
    """Print the findings, the comparison table, what there is beside it, and where the results lie."""
    from tailorfl.report.curves import sections
    from tailorfl.report.findings import findings
    from tailorfl.report.published import notes, published_table

    config, console, displayed = result.config, stdout(), result.displayed
    for line in findings(displayed):
        say(console, line, style="bold")
    show_comparison(console, displayed, config.name)
    for folder, difference in result.unlike:
        _warn("not the same experiment:", f"{folder}: {difference}")
    for reason in result.missing:
        _warn("not in the table:", reason)
    target = config.eval.target if target is None else target
    if target is not None:
        section = sections(displayed, target)[0]
        show_table(console, section.rich())
        say(console, section.note, style="dim")
    if config.published:
        show_table(console, published_table(result).rich())
        for note in notes(config.published):
            say(console, note, style="dim")
    say(console, f"results: {result.path}")


def _warn(mark: str, text: str) -> None:
    stderr().print(remark(mark, text, "bold yellow"), soft_wrap=True)


def show_comparison(console: Console, result: ExperimentResult, name: str) -> None:
    """Print the comparison table; in a narrow console without details, and in several parts if need be."""
    from tailorfl.report.tables import as_table, without_seeds

    frame, spread = without_seeds(result.marked(result.table))
    columns = list(result.columns)
    left_out = []
    for key in DETAILS:
        if fits(as_table(frame, columns).rich(), console.width):
            break
        left_out += [column.title for column in columns if column.key == key]
        columns = [column for column in columns if column.key != key]
    table = as_table(frame, columns, f"{name}: {spread}").rich()
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
    table, count = matrix.table, len(matrix.results)
    for begin in range(0, count, MATRIX_COLUMNS):
        shown = range(begin + 1, min(begin + MATRIX_COLUMNS, count) + 1)
        title = "methods by federations" if begin == 0 else "further federations"
        show_table(console, table.pick([0, count + 1, *shown], title).rich())
    ranking = matrix.ranking
    if ranking is not None:
        say(
            console,
            f"Friedman: F = {ranking.f:.3g}, p = {ranking.f_p:.3g}; ranks differ from {ranking.critical:.2f} apart "
            "(Nemenyi)",
        )


def result_lines(variant: str, result: ExperimentResult) -> list[dict[str, Any]]:
    """Return the comparison table as plain values: a row a method, with what comparison.csv has of it."""
    frame = result.table.reset_index()
    rows = [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
    return [{"variant": variant, "folder": str(result.path), **row} for row in rows]
