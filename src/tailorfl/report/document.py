"""The report of an experiment: table, plots and settings in Markdown, and as the one page of `page`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailorfl.report.curves import Section, sections
from tailorfl.report.page.page import page
from tailorfl.report.published import beside, notes
from tailorfl.report.tables import render, tex
from tailorfl.report.warnings import caveats
from tailorfl.runs.budget import sentence
from tailorfl.runs.files import write_text
from tailorfl.runs.tuned import NAME as TUNING
from tailorfl.runs.tuned import best_score, read, written

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult
    from tailorfl.settings.experiment import ExperimentConfig


SPREAD = (
    "Mean over seeds ± half width of its 95 % interval; bold: better than every other line beyond the noise."
)


def write_report(
    result: ExperimentResult,
    target: float | None = None,
    further: Callable[[ExperimentResult], Sequence[Section]] | None = None,
) -> list[Path]:
    """Write the table, the plots, report.md and report.html into the result folder; returns the two reports.

    `target` takes the place of the experiment's `eval.target`; `further` returns sections of the caller's own. Where
    jobs are finished meanwhile, all is written again: the experiment may have written its last tables and plots before
    ours, which know less.

    Raises RunError where the folder cannot be written, ConfigError for a target out of the metric's reach.
    """
    while True:
        files = _write(result, target, () if further is None else further(result))
        now = result.again()
        if len(now.jobs) == len(result.jobs):
            return files
        result = now


def _write(result: ExperimentResult, target: float | None, further: Sequence[Section]) -> list[Path]:
    config = result.config
    of_curves = sections(result, config.eval.target if target is None else target)
    all_sections = [*tuning_section(result.path, config.seeds), *caveats(result), *further, *of_curves]
    plots = result.write()
    published = _published(result, config)
    markdown, html = result.path / "report.md", result.path / "report.html"
    write_text(markdown, _markdown(config, result.markdown, published, all_sections, plots))
    write_text(html, page(result, target, further))
    return [markdown, html]


def tuning_section(folder: Path, seeds: Sequence[int]) -> list[Section]:
    """Return what a report says of the tuning that an experiment's settings come from; nothing where there is none.

    `seeds` are those of the comparison.
    """
    if not (folder / TUNING).is_file():
        return []
    found = read(folder / TUNING)
    budget = found["budget"]
    both = [seed for seed in budget["seeds"] if seed in seeds]
    apart = (
        f"of which the comparison uses {', '.join(map(str, both))}, too"
        if both
        else "none of the comparison's"
    )
    note = (
        f"Every method was given the same budget: {budget['trials']} trials of {budget['rounds']} rounds with "
        f"{len(budget['seeds'])} seed{'s' * (len(budget['seeds']) > 1)}, or {budget['samples']:,} samples seen "
        f"(gradients of single samples). Settings were drawn by {found['sampler']} and chosen by validation "
        f"{found['metric'].replace('_', ' ')} with the seeds {', '.join(map(str, budget['seeds']))}, "
        f"{apart}; no test sample was looked at."
    )
    rows = tuple(_tuning_row(label, row) for label, row in found["methods"].items())
    head = ("Method", "Chosen", "Validation", "Trials", "Pruned", "Failed", "At the edge of its grid")
    return [Section("Tuning", note, head, rows)]


def _tuning_row(label: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    states = [trial["state"] for trial in row["trials"]]
    score = best_score(row)
    return (
        label,
        written(row["chosen"]) or "as given",
        "–" if score is None else f"{score:.4f}",
        *(str(count) for count in (len(states), states.count("pruned"), states.count("failed"))),
        ", ".join(row["edges"]) or "–",
    )


def _published(result: ExperimentResult, config: ExperimentConfig) -> str:
    """Return the published numbers beside ours as a Markdown table, "" without any."""
    rows = beside(result, config.published)
    if rows.empty:
        return ""
    lines = ["| Method | Number | Published | Ours | Difference |", "| --- | --- | ---: | ---: | ---: |"]
    for row in rows.to_dict("records"):
        numbers = " | ".join(f"{row[key]:.4f}" for key in ("published", "ours", "difference"))
        label, quantity = (str(row[key]).replace("|", "\\|") for key in ("label", "quantity"))
        lines.append(f"| {label} | {quantity} | {numbers} |")
    return "\n".join(lines) + "\n"


def _section(section: Section) -> str:
    """Return the table of a section in Markdown."""
    lines = [section.head, ("---", *("---:" for _ in section.head[1:])), *section.rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def _markdown(
    config: ExperimentConfig, table: str, published: str, further: list[Section], plots: list[Path]
) -> str:
    parts = [f"# {config.name}", config.description, table, sentence(config)]
    if config.published:  # notes alone, where a paper's setting is too different to stand beside ours
        parts += ["## Published and ours", *filter(None, [published]), *notes(config.published)]
    for section in further:
        parts += [f"## {section.title}", section.note, _section(section)]
    parts += [f"![{plot.stem}]({plot.name})" for plot in plots]
    parts += ["## Settings", f"```yaml\n{config.to_yaml()}```"]
    return "\n\n".join(part for part in parts if part) + "\n"


def latex(result: ExperimentResult) -> str:
    """Return the table for LaTeX (booktabs): bold is better than every other line beyond the noise, † a reduction."""
    lines = [render(result.marked(result.table), result.columns, "latex").rstrip()]
    said = [*result.remarks, *([] if len(result.jobs) == len(result.table) else [SPREAD])]
    lines += [rf"\par\smallskip{{\footnotesize {tex(line)}}}" for line in said]
    return "% needs \\usepackage{booktabs}\n" + "\n".join(lines) + "\n"
