"""Pages as single HTML files with tables, pictures and script, which load nothing else.

One kind is about an experiment, the other about several federations: methods by federations, their average ranks, and
each federation's table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tailorfl.evaluation.comparisons import LEVEL, Ranking
from tailorfl.report.curves import sections
from tailorfl.report.findings import caveats, findings
from tailorfl.report.matrix import Matrix, svg
from tailorfl.report.page.charts import Look, PagePart
from tailorfl.report.page.clients import clients, labels, single_clients
from tailorfl.report.page.curves import curves, worst_clients
from tailorfl.report.page.others import (
    comparison,
    other_sets,
    paired_differences,
    privacy,
    tuning,
    what_was_run,
)
from tailorfl.report.published import notes, published_table
from tailorfl.report.tables import Cell, Table
from tailorfl.runs.files import encode
from tailorfl.runs.schedule import budget_sentence

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult

LIBRARIES = ("vega", "vega-lite", "vega-embed")
"""Scripts of the page, in order of their dependencies: see docs/report.md."""


def page(result: ExperimentResult, target: float | None = None, further: Sequence[Table] = ()) -> str:
    """Return the page of an experiment; `target` as in `write_report`, `further` tables precede published numbers."""
    config, published, names = result.config, published_table(result), result.display_names
    result = result.displayed
    goal, look = config.eval.target if target is None else target, Look.of(result)
    parts = [
        *(PagePart.of(table, f"warning-{k}") for k, table in enumerate(caveats(result))),
        PagePart(
            "comparison", "Comparison", [*result.remarks, *result.worst_clients], comparison(result)[:1]
        ),
        paired_differences(result, look),
        curves(result, look),
        clients(result, look),
        *single_clients(result, look),
        labels(result, look),
        worst_clients(result, look),
        other_sets(result, look),
        *(PagePart.of(table, f"rounds-{k}") for k, table in enumerate(sections(result, goal))),
        *(PagePart.of(table, f"further-{k}") for k, table in enumerate(further)),
        PagePart(
            "published", published.title, notes(config.published), [published] if published.rows else []
        ),
        privacy(result),
        tuning(result.folders, look, names),
        what_was_run(result),
    ]
    seeds = {int(summary["seed"]) for summary in result.summaries}
    sizes = sorted({int(summary["clients"]) for summary in result.summaries if "clients" in summary})
    lead = (
        f"{len(look.labels)} methods, {len(seeds)} seeds, {' or '.join(map(str, sizes)) or 'some'} clients; metric: "
        f"{look.name} of the deployed models on clients' own test parts."
    )
    lines = [config.description, lead, budget_sentence(config)]
    return render(config.name, findings(result), lines, parts, look)


def render(
    title: str,
    answer: Sequence[str],
    lead: Sequence[str],
    parts: Sequence[PagePart],
    look: Look | None = None,
) -> str:
    """Return a page of the parts that are not empty, with a last part that lists what was left out.

    `answer` is at the top, followed by `lead`; `look` defines the legend of methods. All names of labels, clients and
    settings are escaped as text.
    """
    from jinja2 import Environment

    left_out = [line for part in parts for line in part.left_out]
    shown = [part for part in parts if part.tables or part.charts]
    charts = {chart.name: {"spec": chart.spec, "alt": chart.alt} for part in shown for chart in part.charts}
    data = {name: rows for part in parts for name, rows in part.data.items()}
    if left_out:
        shown.append(PagePart("left-out", "Not in this report", left_out))
    folder = files(__package__)
    template = Environment(autoescape=True, trim_blocks=True).from_string(
        (folder / "page.html").read_text("utf-8")
    )
    libraries = [_library(folder / "assets" / f"{name}.min.js") for name in LIBRARIES]
    text: str = template.render(
        title=title,
        answer=answer,
        lead=[line for line in lead if line],
        parts=shown,
        keys=list(zip(look.labels, look.colours, look.dashes, strict=True)) if look else [],
        style=(folder / "page.css").read_text("utf-8"),
        script=(folder / "page.js").read_text("utf-8"),
        # escaped, so that the JSON cannot end the script element that holds it
        store=encode({"charts": charts, "data": data}).replace("<", "\\u003c") if charts else "",
        libraries=libraries if charts else [],
    )
    return text


def _library(file: Any) -> str:
    """Return a library without the reference to its source map."""
    return re.sub(r"\n?//# sourceMappingURL=.*", "", file.read_text("utf-8"))


def matrix_page(matrix: Matrix) -> str:
    """Return the page of several federations."""
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
        f"{ranking.f_p:.3g}. {'They are not equal' if ranking.f_p < LEVEL else 'A difference is not shown'} (5 %)."
    )
    part.notes.append(
        f"Nemenyi: average ranks of {k} methods on {n} federations differ at 5 % if they are at least "
        f"{ranking.critical:.2f} apart; a bar joins methods that do not differ."
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
    least = len(ranking.wilcoxon) * 2.0 ** (1 - len(matrix.results))  # if one is better everywhere
    if least >= LEVEL:
        part.notes.append(
            f"With {len(matrix.results)} federations and {len(ranking.wilcoxon)} pairs this test cannot find a "
            "difference, whatever the numbers; it needs more federations."
        )
    _draw(part, matrix, "wilcoxon", "Average ranks with groups of Wilcoxon and Holm", ranking.wilcoxon_groups)
    rows = [
        [f"{matrix.ranked[a]} and {matrix.ranked[b]}", Cell(f"{p:.3g}", p, p < LEVEL)]
        for (a, b), p in ranking.wilcoxon.items()
    ]
    part.tables.append(Table.of("Corrected p-values", ("Pair", "p (Wilcoxon, Holm)"), rows))
    return part


def _draw(part: PagePart, matrix: Matrix, which: str, what: str, groups: list[tuple[int, ...]]) -> None:
    """Add a diagram and its text alternative to a part."""
    order = ", ".join(f"{label} {rank:.2f}" for label, rank in matrix.ordered if rank is not None)
    joined = "; ".join(" – ".join(matrix.ranked[k] for k in group) for group in groups)
    part.alt = f"{what}: {order}. Not distinguished: {joined or 'none'}."
    drawn = matrix.picture(which)
    part.picture = "" if drawn is None else svg(drawn, part.alt)
