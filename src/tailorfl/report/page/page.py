"""One page about an experiment: a single HTML file with tables, pictures and script, which asks for nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tailorfl.report.curves import sections
from tailorfl.report.findings import findings
from tailorfl.report.page.clients import clients
from tailorfl.report.page.curves import curves, worst_clients
from tailorfl.report.page.labels import labels
from tailorfl.report.page.look import Look
from tailorfl.report.page.others import comparison, other_sets, paired_differences, privacy, what_was_run
from tailorfl.report.page.parts import PagePart
from tailorfl.report.page.single import single_clients
from tailorfl.report.page.tuning import tuning
from tailorfl.report.published import notes, published_table
from tailorfl.report.tables import Table
from tailorfl.report.warnings import caveats
from tailorfl.runs.budget import sentence
from tailorfl.runs.files import encode

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult

LIBRARIES = ("vega", "vega-lite", "vega-embed")
"""Scripts of the page, in the order that they need each other: see docs/report.md."""


def page(result: ExperimentResult, target: float | None = None, further: Sequence[Table] = ()) -> str:
    """Return the page; `target` as `write_report` has it, `further` tables stand before published numbers."""
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
    lines = [config.description, lead, sentence(config)]
    return render(config.name, findings(result), lines, parts, look)


def render(
    title: str,
    answer: Sequence[str],
    lead: Sequence[str],
    parts: Sequence[PagePart],
    look: Look | None = None,
) -> str:
    """Return a page of the parts that have something to show, and of a last one that says what the others left out.

    `answer` stands above all else, then `lead`; `look` is of the legend of methods. Everything in it is text: what
    labels, clients and settings are called acts nowhere.
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
        # JSON that cannot end the script element that holds it
        store=encode({"charts": charts, "data": data}).replace("<", "\\u003c") if charts else "",
        libraries=libraries if charts else [],
    )
    return text


def _library(file: Any) -> str:
    """Return a library without the note where a debugger would look for its source."""
    return re.sub(r"\n?//# sourceMappingURL=.*", "", file.read_text("utf-8"))
