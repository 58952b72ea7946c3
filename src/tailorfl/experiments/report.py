"""The report of an experiment: table, plots and settings in Markdown, and as the one page of `page`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tailorfl.experiments.budget import sentence
from tailorfl.experiments.caveats import caveats
from tailorfl.experiments.curves import Section, sections
from tailorfl.experiments.page.page import page
from tailorfl.experiments.published import beside, notes
from tailorfl.experiments.tuned import section as of_tuning
from tailorfl.runs.files import write_text
from tailorfl.runs.tables import render, tex

if TYPE_CHECKING:
    from tailorfl.experiments.result import ExperimentResult
    from tailorfl.settings.experiment import ExperimentConfig


SPREAD = (
    "Mean over seeds ± half width of its 95 % interval; bold: better than every other line beyond the noise."
)


def write_report(
    result: ExperimentResult,
    target: float | None = None,
    further: Callable[[ExperimentResult], Sequence[Section]] | None = None,
) -> list[Path]:
    """Writes the table, the plots, report.md and report.html into the result folder; returns the two reports.

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
    all_sections = [*of_tuning(result.path, config.seeds), *caveats(result), *further, *of_curves]
    plots = result.write()
    published = _published(result, config)
    markdown, html = result.path / "report.md", result.path / "report.html"
    write_text(markdown, _markdown(config, result.markdown, published, all_sections, plots))
    write_text(html, page(result, target, further))
    return [markdown, html]


def _published(result: ExperimentResult, config: ExperimentConfig) -> str:
    """The published numbers beside ours as a Markdown table, "" without any."""
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
    """The table of a section in Markdown."""
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
    """Returns the table for LaTeX (booktabs): bold is better than every other line beyond the noise, † a reduction."""
    lines = [render(result.marked(result.table), result.columns, "latex").rstrip()]
    said = [*result.remarks, *([] if len(result.jobs) == len(result.table) else [SPREAD])]
    lines += [rf"\par\smallskip{{\footnotesize {tex(line)}}}" for line in said]
    return "% needs \\usepackage{booktabs}\n" + "\n".join(lines) + "\n"
