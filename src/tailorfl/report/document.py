"""The report of an experiment: table, plots and settings in Markdown, and the single page of `page`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailorfl.errors import unknown
from tailorfl.report.curves import sections
from tailorfl.report.findings import caveats, findings
from tailorfl.report.page.page import page
from tailorfl.report.published import notes, published_table
from tailorfl.report.tables import MISSING, Table, as_table, tex, without_seeds
from tailorfl.runs.files import write_text
from tailorfl.runs.folders import as_words, best_score, tunings
from tailorfl.runs.schedule import budget_sentence

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult


def write_report(
    result: ExperimentResult,
    target: float | None = None,
    further: Callable[[ExperimentResult], Sequence[Table]] | None = None,
) -> list[Path]:
    """Write the table, the plots, report.md and report.html into the result folder; return the two reports.

    `target` replaces the experiment's `eval.target`; `further` returns further tables of the caller. If jobs finish
    meanwhile, everything is written again, since the experiment may already have written newer tables and plots, which
    ours would replace.

    Raises:
        RunError: the folder cannot be written.
        ConfigError: the metric cannot reach the target.
    """
    while True:
        files = _write(result, target, () if further is None else further(result))
        now = result.again()
        if len(now.jobs) == len(result.jobs):
            return files
        result = now


def _write(result: ExperimentResult, target: float | None, further: Sequence[Table]) -> list[Path]:
    config = result.config
    of_curves = sections(result.displayed, config.eval.target if target is None else target)
    tuning = tuning_sections(result.folders, config.seeds, result.display_names)
    tables = [*tuning, *caveats(result.displayed), *further, *of_curves]
    plots = result.write()
    parts = [
        f"# {config.name}",
        *findings(result.displayed),
        config.description,
        result.markdown,
        budget_sentence(config),
    ]
    if config.published:  # only notes if a paper's setting is too different for a comparison
        ours = published_table(result)
        parts += [f"## {ours.title}", ours.markdown() if ours.rows else "", *notes(config.published)]
    for table in tables:
        parts += [f"## {table.title}", table.note, table.markdown()]
    parts += [f"![{plot.stem}]({plot.name})" for plot in plots]
    parts += ["## Settings", f"```yaml\n{config.to_yaml()}```"]
    files = {
        result.path / "report.md": "\n\n".join(part for part in parts if part) + "\n",
        result.path / "report.html": page(result, target, further),
    }
    for file, text in files.items():
        write_text(file, text)
    return list(files)


def tuning_sections(folders: Sequence[Path], seeds: Sequence[int], names: Mapping[str, str]) -> list[Table]:
    """Return a table on each tuning that the settings of an experiment's folders come from.

    `seeds` are those of the comparison, `names` the display names of labels.
    """
    distinct = tunings(folders)
    titles = ["Tuning"] if len(distinct) == 1 else [f"Tuning of {file.parent.name}" for file in distinct]
    return [
        _tuning_section(title, one, seeds, names)
        for title, one in zip(titles, distinct.values(), strict=True)
    ]


def _tuning_section(
    title: str, tuning: Mapping[str, Any], seeds: Sequence[int], names: Mapping[str, str]
) -> Table:
    budget = tuning["budget"]
    shared = [str(seed) for seed in budget["seeds"] if seed in seeds]
    overlap = (
        f"of which the comparison uses {', '.join(shared)}, too" if shared else "none of the comparison's"
    )
    seed_word = "seeds" if len(budget["seeds"]) > 1 else "seed"
    note = (
        f"Every method was given the same budget: {budget['trials']} trials of {budget['rounds']} rounds with "
        f"{len(budget['seeds'])} {seed_word}, or {budget['samples']:,} samples seen (gradients of single samples). "
        f"Settings were proposed by the sampler {tuning['sampler']} and chosen by validation "
        f"{tuning['metric'].replace('_', ' ')} with {seed_word} {', '.join(map(str, budget['seeds']))}, {overlap}; "
        "trials were judged only on validation parts."
    )
    rows = [_tuning_row(names.get(label, label), row) for label, row in tuning["methods"].items()]
    head = ("Method", "Chosen", "Validation", "Trials", "Pruned", "Failed", "At the edge of its grid")
    return Table.of(title, head, rows, note)


def _tuning_row(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    states, score = [trial["state"] for trial in row["trials"]], best_score(row)
    return (
        name,
        as_words(row["chosen"]) or "as given",
        MISSING if score is None else f"{score:.4f}",
        *(str(count) for count in (len(states), states.count("pruned"), states.count("failed"))),
        ", ".join(row["edges"]) or MISSING,
    )


def latex(result: ExperimentResult, keys: Sequence[str] = ()) -> str:
    """Return the table for LaTeX (booktabs): bold is better than every other method beyond the noise, † a reduction.

    `keys` are the columns to show, by their names in comparison.csv; by default all.

    Raises:
        ConfigError: one of the `keys` is not a column.
    """
    result = result.displayed
    columns = {column.key: column for column in result.columns}
    for key in keys:
        if key not in columns:
            raise unknown("column", key, list(columns))
    frame, spread = without_seeds(result.marked(result.table))
    lines = [as_table(frame, [columns[key] for key in keys or columns]).latex().rstrip()]
    note = f"{spread[:1].upper()}{spread[1:]}; bold: better than every other method beyond the noise."
    below = [*result.remarks, *([] if len(result.jobs) == len(result.table) else [note])]
    lines += [rf"\par\smallskip{{\footnotesize {tex(line)}}}" for line in below]
    return "% needs \\usepackage{booktabs}\n" + "\n".join(lines) + "\n"
