"""One page about an experiment: a single HTML file with tables, pictures and script, which asks for nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tailorfl.report.curves import Section, sections
from tailorfl.report.page.clients import clients
from tailorfl.report.page.curves import curves, worst_clients
from tailorfl.report.page.labels import labels
from tailorfl.report.page.look import Look
from tailorfl.report.page.others import comparison, paired_differences, privacy, took_part, what_was_run
from tailorfl.report.page.parts import PagePart, Table
from tailorfl.report.page.single import single_clients
from tailorfl.report.page.tuning import tuning
from tailorfl.report.published import beside, notes
from tailorfl.report.warnings import caveats
from tailorfl.runs.budget import sentence
from tailorfl.runs.files import encode

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult

LIBRARIES = ("vega", "vega-lite", "vega-embed")
"""Scripts of the page, in the order that they need each other: see docs/report.md."""


def page(result: ExperimentResult, target: float | None = None, further: Sequence[Section] = ()) -> str:
    """Return the page; `target` as `write_report` has it, `further` sections stand before published numbers."""
    config, look = result.config, Look.of(result)
    found, data, left_out = _parts(result, look, config.eval.target if target is None else target, further)
    seeds = sorted({int(summary["seed"]) for summary, _ in result.jobs})
    sizes = sorted({int(summary["clients"]) for summary, _ in result.jobs if "clients" in summary})
    lead = [
        f"{len(look.labels)} methods, {len(seeds)} seeds, {' or '.join(map(str, sizes)) or 'some'} clients; metric: "
        f"{look.name} of the deployed models on clients' own test parts."
    ]
    if left_out:
        found.append(PagePart("left-out", "Not in this report", left_out))
    return render(config.name, config.description, [*lead, sentence(config)], found, data, look)


def _parts(
    result: ExperimentResult, look: Look, target: float | None, further: Sequence[Section]
) -> tuple[list[PagePart], dict[str, Any], list[str]]:
    """All parts in their order, the data of their charts, and what is left out."""
    warned = [_section(section, f"warning-{k}") for k, section in enumerate(caveats(result))]
    first, other = comparison(result, result.marked(result.table))
    head = PagePart("comparison", "Comparison", tables=[first])
    head.notes += [*result.remarks, *result.worst_clients]
    data: dict[str, Any] = {}
    left_out: list[str] = []
    pairs, lost = paired_differences(result, look)
    left_out += lost
    lines, rows, lost = curves(result, look)
    data, left_out = data | rows, left_out + lost
    points, rows, lost = clients(result, look)
    data, left_out = data | rows, left_out + lost
    single, rows, lost = single_clients(result, look)
    data, left_out = data | rows, left_out + lost
    spread, rows, lost = labels(result)
    data, left_out = data | rows, left_out + lost
    worst, rows = worst_clients(result, look)
    data |= rows
    sets = PagePart("sets", "Held-out clients, shifts and participation", tables=[other] if other else [])
    left_out += (
        [] if other else ["Held-out clients and shifted data: no such set was evaluated (eval.final)."]
    )
    table, why = took_part(result, look)
    sets.tables += [table] if table else []
    left_out += [why] if why else []
    ledger, lost = privacy(result)
    left_out += lost
    tuned, rows, lost = tuning(result.folders, look)
    data, left_out = data | rows, left_out + lost
    more = [_section(section, f"further-{k}") for k, section in enumerate(further)]
    rounds = [_section(section, f"rounds-{k}") for k, section in enumerate(sections(result, target))]
    parts = [
        *warned,
        head,
        pairs,
        lines,
        points,
        *single,
        spread,
        worst,
        sets,
        *rounds,
        *more,
        *_published(result),
        ledger,
        tuned,
    ]
    kept = [part for part in parts if part.tables or part.charts]
    return [*kept, what_was_run(result)], data, left_out


def _section(section: Section, name: str) -> PagePart:
    return PagePart(
        name, section.title, [section.note], [Table.of(section.title, section.head, section.rows)]
    )


def _published(result: ExperimentResult) -> list[PagePart]:
    """Return a paper's numbers beside ours, where there are any."""
    published = result.config.published
    rows = beside(result, published)
    part = PagePart("published", "Published and ours", notes(published))
    if not rows.empty:
        lines = [
            (
                row["label"],
                row["quantity"],
                *(f"{row[key]:.4f}" for key in ("published", "ours", "difference")),
            )
            for row in rows.to_dict("records")
        ]
        head = ("Method", "Number", "Published", "Ours", "Difference")
        part.tables.append(Table.of("Published and ours", head, lines))
    return [part] if part.tables else []


def render(
    title: str,
    description: str,
    lead: Sequence[str],
    parts: Sequence[PagePart],
    data: Mapping[str, Any],
    look: Look | None = None,
) -> str:
    """Return a page of these parts; `data` are the sets that their charts name, `look` is of the legend of methods.

    Everything in it is text: what labels, clients and settings are called acts nowhere.
    """
    from jinja2 import Environment

    here = files(__package__)
    charts = {chart.name: {"spec": chart.spec, "alt": chart.alt} for part in parts for chart in part.charts}
    template = Environment(autoescape=True, trim_blocks=True).from_string(
        (here / "page.html").read_text("utf-8")
    )
    keys = zip(look.labels, look.colours, look.dashes, strict=True) if look else ()
    text: str = template.render(
        title=title,
        description=description,
        lead=[line for line in lead if line],
        parts=parts,
        keys=[{"label": label, "colour": colour, "dash": dash} for label, colour, dash in keys],
        style=(here / "page.css").read_text("utf-8"),
        script=(here / "page.js").read_text("utf-8"),
        store=_embedded({"charts": charts, "data": data}) if charts else "",
        libraries=[_library(here / "assets" / f"{name}.min.js") for name in LIBRARIES] if charts else [],
    )
    return text


def _embedded(value: Any) -> str:
    """JSON that cannot end the script element that holds it."""
    return encode(value).replace("<", "\\u003c")


def _library(file: Any) -> str:
    """Return a library without the note where a debugger would look for its source."""
    return re.sub(r"\n?//# sourceMappingURL=.*", "", file.read_text("utf-8"))
