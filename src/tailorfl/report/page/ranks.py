"""The page of several federations: methods by federations, their average ranks, and every federation's own table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailorfl.evaluation.ranks import LEVEL
from tailorfl.report.page.others import comparison
from tailorfl.report.page.page import render
from tailorfl.report.page.parts import PagePart
from tailorfl.report.rank_plot import svg
from tailorfl.report.tables import Cell, Table
from tailorfl.report.warnings import caveats

if TYPE_CHECKING:
    from tailorfl.evaluation.ranks import Ranking
    from tailorfl.report.matrix import Matrix


def page(matrix: Matrix) -> str:
    """Return the page."""
    first = PagePart.of(matrix.table, "matrix")
    unranked = [label for label in matrix.labels if label not in matrix.ranked]
    first.left_out = [f"{label} is not ranked: not every federation has it." for label in unranked]
    parts = [first]
    if matrix.ranking is None:
        first.left_out.append("Ranks: they need two methods that every federation has.")
    else:
        parts += [_ranks(matrix, matrix.ranking), _signed_ranks(matrix, matrix.ranking)]
    for number, (name, result) in enumerate(matrix.results.items()):
        notes = [
            *result.remarks,
            *result.worst_clients,
            f"From {', '.join(map(str, result.folders))}.",
        ]
        tables = [*comparison(result), *caveats(result)]
        parts.append(PagePart(f"federation-{number}", name, notes, tables))
    lead = f"{len(matrix.labels)} methods on {len(matrix.results)} federations: {', '.join(matrix.results)}."
    return render("Methods by federations", (), [lead], parts)


def _ranks(matrix: Matrix, ranking: Ranking) -> PagePart:
    part = PagePart("ranks", "Average ranks")
    k, n = len(matrix.ranked), len(matrix.results)
    part.notes.append(
        f"Friedman's test of all methods being equal: χ² = {ranking.chi2:.3g} with {k - 1} degrees of freedom, p = "
        f"{ranking.chi2_p:.3g}; Iman and Davenport's F = {ranking.f:.3g} with {k - 1} and {(k - 1) * (n - 1)}, p = "
        f"{ranking.f_p:.3g}. {'They are not' if ranking.f_p < LEVEL else 'Nothing says that they are not'} equal (5 %)."
    )
    part.notes.append(
        f"Nemenyi: average ranks of {k} methods on {n} federations differ at 5 % where they are {ranking.critical:.2f} "
        "apart or more; a bar joins methods that are not."
    )
    _draw(part, matrix, "nemenyi", "Critical-difference diagram (Nemenyi)", ranking.nemenyi_groups)
    rows = [
        [name, *(f"{rank:g}" for rank in ranks)]
        for name, ranks in zip(matrix.results, ranking.ranks.tolist(), strict=True)
    ]
    part.tables.append(Table.of("Ranks in each federation", ["Federation", *matrix.ranked], rows))
    return part


def _signed_ranks(matrix: Matrix, ranking: Ranking) -> PagePart:
    part = PagePart("wilcoxon", "Pairs over federations")
    part.notes.append(
        "Wilcoxon's signed-rank test of each pair over federations, corrected by Holm for all pairs; a bar joins "
        "neighbours that do not differ at 5 %."
    )
    least = len(ranking.wilcoxon) * 2.0 ** (1 - len(matrix.results))  # where one is better everywhere
    if least >= LEVEL:
        part.notes.append(
            f"Of {len(matrix.results)} federations and {len(ranking.wilcoxon)} pairs this test finds no difference, "
            "whatever the numbers: that takes more federations."
        )
    _draw(part, matrix, "wilcoxon", "Average ranks with groups of Wilcoxon and Holm", ranking.wilcoxon_groups)
    rows = [
        [f"{matrix.ranked[a]} and {matrix.ranked[b]}", Cell(f"{p:.3g}", p, p < LEVEL)]
        for (a, b), p in ranking.wilcoxon.items()
    ]
    part.tables.append(Table.of("Corrected p-values", ("Pair", "p (Wilcoxon, Holm)"), rows))
    return part


def _draw(part: PagePart, matrix: Matrix, which: str, what: str, groups: list[tuple[int, ...]]) -> None:
    """Put a diagram on a part, with words that say what it shows."""
    order = ", ".join(f"{label} {rank:.2f}" for label, rank in matrix.ordered if rank is not None)
    joined = "; ".join(" – ".join(matrix.ranked[k] for k in group) for group in groups)
    part.alt = f"{what}: {order}. Not told apart: {joined or 'none'}."
    drawn = matrix.picture(which)
    part.picture = "" if drawn is None else svg(drawn, part.alt)
