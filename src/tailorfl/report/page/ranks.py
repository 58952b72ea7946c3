"""The page of several federations: methods by federations, their average ranks, and every federation's own table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailorfl.evaluation.ranks import LEVEL
from tailorfl.report.page.others import comparison
from tailorfl.report.page.page import render
from tailorfl.report.page.parts import Cell, PagePart, Table
from tailorfl.report.rank_plot import svg
from tailorfl.report.tables import MISSING
from tailorfl.report.warnings import caveats

if TYPE_CHECKING:
    from tailorfl.evaluation.ranks import Ranking
    from tailorfl.report.matrix import Matrix


def page(matrix: Matrix) -> str:
    """Return the page."""
    parts = [_numbers(matrix)]
    left_out = [
        f"{label} is not ranked: not every federation has it."
        for label in matrix.labels
        if label not in matrix.ranked
    ]
    found = matrix.ranking
    if found is None:
        left_out.append("Ranks: they need two methods that every federation has.")
    else:
        parts += [_ranks(matrix, found), _signed_ranks(matrix, found)]
    for number, (name, result) in enumerate(matrix.results.items()):
        first, other = comparison(result, result.marked(result.table))
        part = PagePart(f"federation-{number}", name, tables=[first, *([other] if other else [])])
        part.notes += [*result.remarks, *result.worst_clients, f"From {', '.join(map(str, result.folders))}."]
        part.tables += [Table.of(s.title, s.head, s.rows) for s in caveats(result)]
        parts.append(part)
    if left_out:
        parts.append(PagePart("left-out", "Not in this report", left_out))
    lead = [
        f"{len(matrix.labels)} methods on {len(matrix.results)} federations: {', '.join(matrix.results)}."
    ]
    return render("Methods by federations", "", lead, parts, {})


def _numbers(matrix: Matrix) -> PagePart:
    part = PagePart("matrix", "Methods by federations")
    part.notes.append(
        "Mean over clients of each federation's own metric (deployed models, own test parts), mean over seeds ± half "
        "width of the 95 % interval; bold: better than every other line of the column beyond the noise. Average rank "
        "over federations: 1 is the best."
    )
    rows = []
    for label, rank in matrix.ordered:
        row = [Cell(label)]
        for name in matrix.results:
            value, _, is_best = matrix.cells.get((name, label), (None, None, False))
            row.append(Cell(matrix.text(name, label), value, is_best))
        rows.append([*row, Cell(MISSING if rank is None else f"{rank:.2f}", rank)])
    head = ["Method", *map(matrix.title, matrix.results), "average rank"]
    part.tables.append(Table("Methods by federations", head, rows))
    return part


def _ranks(matrix: Matrix, found: Ranking) -> PagePart:
    part = PagePart("ranks", "Average ranks")
    k, n = len(matrix.ranked), len(matrix.results)
    part.notes.append(
        f"Friedman's test of all methods being equal: χ² = {found.chi2:.3g} with {k - 1} degrees of freedom, p = "
        f"{found.chi2_p:.3g}; Iman and Davenport's F = {found.f:.3g} with {k - 1} and {(k - 1) * (n - 1)}, p = "
        f"{found.f_p:.3g}. {'They are not' if found.f_p < LEVEL else 'Nothing says that they are not'} equal (5 %)."
    )
    part.notes.append(
        f"Nemenyi: average ranks of {k} methods on {n} federations differ at 5 % where they are {found.critical:.2f} "
        "apart or more; a bar joins methods that are not."
    )
    drawn = matrix.picture("nemenyi")
    part.alt = "Critical-difference diagram (Nemenyi): " + _words(matrix, found.nemenyi_groups)
    part.picture = "" if drawn is None else svg(drawn, part.alt)
    rows = [
        [Cell(name), *(Cell(f"{rank:g}", rank) for rank in ranks)]
        for name, ranks in zip(matrix.results, found.ranks.tolist(), strict=True)
    ]
    part.tables.append(Table("Ranks in each federation", ["Federation", *matrix.ranked], rows))
    return part


def _signed_ranks(matrix: Matrix, found: Ranking) -> PagePart:
    part = PagePart("wilcoxon", "Pairs over federations")
    part.notes.append(
        "Wilcoxon's signed-rank test of each pair over federations, corrected by Holm for all pairs; a bar joins "
        "neighbours that do not differ at 5 %."
    )
    least = len(found.wilcoxon) * 2.0 ** (1 - len(matrix.results))  # where one is better everywhere
    if least >= LEVEL:
        part.notes.append(
            f"Of {len(matrix.results)} federations and {len(found.wilcoxon)} pairs this test finds no difference, "
            "whatever the numbers: that takes more federations."
        )
    drawn = matrix.picture("wilcoxon")
    part.alt = "Average ranks with groups of Wilcoxon and Holm: " + _words(matrix, found.wilcoxon_groups)
    part.picture = "" if drawn is None else svg(drawn, part.alt)
    rows = [
        [Cell(f"{matrix.ranked[a]} and {matrix.ranked[b]}"), Cell(f"{p:.3g}", p, p < LEVEL)]
        for (a, b), p in found.wilcoxon.items()
    ]
    part.tables.append(Table("Corrected p-values", ("Pair", "p (Wilcoxon, Holm)"), rows))
    return part


def _words(matrix: Matrix, groups: list[tuple[int, ...]]) -> str:
    """Return the diagram in words."""
    order = ", ".join(f"{label} {rank:.2f}" for label, rank in matrix.ordered if rank is not None)
    joined = "; ".join(" – ".join(matrix.ranked[k] for k in group) for group in groups)
    return f"{order}. Not told apart: {joined or 'none'}."
