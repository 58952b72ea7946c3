"""The report of an experiment: table, plots and settings on one page, as Markdown and as HTML."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import TYPE_CHECKING

from tailorfl.experiments.budget import sentence
from tailorfl.experiments.caveats import caveats
from tailorfl.experiments.curves import Section, sections
from tailorfl.experiments.published import beside, notes
from tailorfl.runs.files import write_text

if TYPE_CHECKING:
    from tailorfl.experiments.result import ExperimentResult
    from tailorfl.settings.experiment import ExperimentConfig

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}"
    "pre{background:#f4f4f4;padding:.8rem;overflow-x:auto}img{max-width:100%}"
    ".table{overflow-x:auto}table{border-collapse:collapse}"
    "td,th{padding:.25rem .7rem;border-bottom:1px solid #ccc;text-align:right;white-space:nowrap}"
    "td:first-child,th:first-child{text-align:left;position:sticky;left:0;background:#fff}"
    "td.prose{white-space:normal;min-width:24rem;text-align:left}"
)
"""Tables are scrolled where the page is too narrow; only cells of running text are wrapped."""
PROSE = 60
"""Characters from which on a cell is running text."""


def write_report(result: ExperimentResult, target: float | None = None) -> list[Path]:
    """Writes the table, the plots, report.md and report.html into the result folder; returns the two reports.

    `target` takes the place of the experiment's `eval.target`. Where jobs are finished meanwhile, all is written again:
    the experiment may have written its last tables and plots before ours, which know less.

    Raises RunError where the folder cannot be written, ConfigError for a target out of the metric's reach.
    """
    while True:
        files = _write(result, target)
        now = result.again()
        if len(now.jobs) == len(result.jobs):
            return files
        result = now


def _write(result: ExperimentResult, target: float | None) -> list[Path]:
    config = result.config
    further = [*caveats(result), *sections(result, config.eval.target if target is None else target)]
    plots = result.write()
    published = _published(result, config)
    markdown, page = result.path / "report.md", result.path / "report.html"
    write_text(markdown, _markdown(config, result.markdown, published, further, plots))
    write_text(page, _html(config, result.markdown, published, further, plots))
    return [markdown, page]


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


def _html(
    config: ExperimentConfig, table: str, published: str, further: list[Section], plots: list[Path]
) -> str:
    name = html.escape(config.name)
    table, *notes_below = table.split("\n\n")
    parts = [f"<h1>{name}</h1>", f"<p>{html.escape(config.description)}</p>", _html_table(table)]
    parts += [f"<p>{html.escape(note.strip())}</p>" for note in notes_below]
    parts += [f"<p>{html.escape(sentence(config))}</p>"] if sentence(config) else []
    if config.published:
        parts += ["<h2>Published and ours</h2>", _html_table(published) if published else ""]
        parts += [f"<p>{html.escape(note)}</p>" for note in notes(config.published)]
    for section in further:
        parts += [f"<h2>{html.escape(section.title)}</h2>", f"<p>{html.escape(section.note)}</p>"]
        parts += [_html_table(_section(section))]
    parts += [f'<p><img src="{_embedded(plot)}" alt="{plot.stem}"></p>' for plot in plots]
    parts += ["<h2>Settings</h2>", f"<pre>{html.escape(config.to_yaml())}</pre>"]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _embedded(plot: Path) -> str:
    """A picture as an address that holds it: a page keeps the plots of its table, and can be sent as one file."""
    return f"data:image/png;base64,{base64.b64encode(plot.read_bytes()).decode()}"


def _html_table(markdown: str) -> str:
    """A Markdown table of ours as HTML, which scrolls sideways where it is wide; bold cells stay bold."""
    lines = [line.strip("| \n") for line in markdown.strip().splitlines()]
    head, _, *body = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    rows = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    rows += ["".join(map(_html_cell, line)) for line in body]
    lines = [f"<tr>{row}</tr>" for row in rows]
    return "\n".join(['<div class="table"><table>', *lines, "</table></div>"])


def _html_cell(text: str) -> str:
    plain = text.replace("\\|", "|")
    bold = plain.startswith("**") and plain.endswith("**")
    inner = f"<b>{html.escape(plain[2:-2])}</b>" if bold else html.escape(plain)
    return f'<td class="prose">{inner}</td>' if len(plain) > PROSE else f"<td>{inner}</td>"
