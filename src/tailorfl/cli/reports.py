"""What `tailorfl report` does: load results, put them together, write what is wanted, and print the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tailorfl.cli.results import result_lines
from tailorfl.cli.running import show_result
from tailorfl.cli.screen import print_json, say, stdout
from tailorfl.errors import ConfigError

if TYPE_CHECKING:
    from tailorfl.experiments.result import ExperimentResult


@dataclass(frozen=True)
class Wanted:
    """What the command was told to write, and where."""

    out: Path | None = None
    target: float | None = None
    latex: Path | None = None
    csv: Path | None = None
    as_json: bool = False
    """Whether the table is printed as JSON, and nothing else."""

    @property
    def page(self) -> Path | None:
        """The file of the page, where it alone is wanted."""
        return self.out if self.out is not None and self.out.suffix.lower() == ".html" else None


def write(folders: Sequence[Path], wanted: Wanted) -> None:
    """Writes and prints the reports of some result folders.

    Raises:
        ConfigError: there is no place named for several folders, or one file for several variants.
        RunError: a folder holds no result, or a file cannot be written.
    """
    from tailorfl.experiments.report import write_report

    found = _results(folders, wanted)
    files = [file for file in (wanted.page, wanted.latex, wanted.csv) if file is not None]
    if len(found) > 1 and files:
        raise ConfigError(
            f"'{folders[0]}' has {len(found)} variants ({', '.join(found)}), which one file cannot hold; give the "
            f"folder of one of them in place of writing '{files[0]}'"
        )
    lines = []
    for name, result in found.items():
        written = (
            write_report(result, wanted.target)
            if wanted.page is None
            else [_page(result, wanted.page, wanted.target)]
        )
        written += _tables(result, wanted)
        if wanted.as_json:
            lines += result_lines(name, result)
            continue
        show_result(result, wanted.target)
        say(stdout(), f"report: {', '.join(map(str, written))}")
    if wanted.as_json:
        print_json(lines)


def _results(folders: Sequence[Path], wanted: Wanted) -> dict[str, ExperimentResult]:
    from tailorfl.experiments.merging import merge
    from tailorfl.experiments.variants import results

    if len(folders) > 1 and wanted.out is None:
        raise ConfigError(
            f"a report of {len(folders)} folders needs a place of its own: --out FOLDER, or --out FILE.html"
        )
    if wanted.out is None or (len(folders) == 1 and wanted.page is not None):
        return results(folders[0])
    return dict(merge(folders, wanted.out if wanted.page is None else None))


def _page(result: ExperimentResult, file: Path, target: float | None) -> Path:
    from tailorfl.experiments.page.page import page
    from tailorfl.runs.files import write_text

    write_text(file, page(result, target))
    return file


def _tables(result: ExperimentResult, wanted: Wanted) -> list[Path]:
    """Writes the table for LaTeX and its numbers, where they are wanted."""
    from tailorfl.experiments.report import latex
    from tailorfl.runs.files import write_text
    from tailorfl.runs.tables import render

    out = []
    if wanted.latex is not None:
        write_text(wanted.latex, latex(result))
        out.append(wanted.latex)
    if wanted.csv is not None:
        write_text(wanted.csv, render(result.table, result.columns, "csv"))
        out.append(wanted.csv)
    return out
