"""What `tailorfl report` does: load results, put them together, write what is wanted, and print the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tailorfl.cli.results import result_lines, show_matrix
from tailorfl.cli.running import show_result
from tailorfl.cli.screen import print_json, say, stdout
from tailorfl.errors import ConfigError

if TYPE_CHECKING:
    from tailorfl.report.matrix import Matrix
    from tailorfl.report.result import ExperimentResult


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
    """Write and print the reports of some result folders.

    Raises:
        ConfigError: there is no place named for several folders, or one file for several variants.
        RunError: a folder holds no result, or a file cannot be written.
    """
    from tailorfl.report.document import write_report

    federations = _federations(folders, wanted)
    if federations is not None:
        written = _matrix(federations, wanted)
        if wanted.as_json:
            print_json(federations.rows)
            return
        show_matrix(stdout(), federations)
        say(stdout(), f"report: {', '.join(map(str, written))}")
        return
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


def _federations(folders: Sequence[Path], wanted: Wanted) -> Matrix | None:
    """Return the matrix of folders, or of a folder's variants, that are of different data.

    None where all are of the same.
    """
    from tailorfl.report.matrix import by_federation, matrix
    from tailorfl.report.result import results

    if wanted.out is None:
        return None
    parts = {folder: results(folder) for folder in folders}
    if len(folders) > 1 and any(list(found) != [""] for found in parts.values()):
        return None
    found = {result.path: result for part in parts.values() for result in part.values()}
    groups = by_federation(found)
    return matrix(found, groups) if len(groups) > 1 else None


def _matrix(federations: Matrix, wanted: Wanted) -> list[Path]:
    """Write the page of several federations; into a folder with its table, diagram and numbers."""
    from tailorfl.report.page.ranks import page
    from tailorfl.report.rank_plot import png
    from tailorfl.runs.files import reporting, write_text

    assert wanted.out is not None
    files: dict[Path, str] = {}
    if wanted.page is not None:
        files[wanted.page] = page(federations)
    else:
        with reporting(wanted.out, "create the result folder"):
            wanted.out.mkdir(parents=True, exist_ok=True)
        files[wanted.out / "report.html"] = page(federations)
        files[wanted.out / "matrix.csv"] = federations.csv
        files[wanted.out / "matrix.tex"] = federations.latex
    if wanted.latex is not None:
        files[wanted.latex] = federations.latex
    if wanted.csv is not None:
        files[wanted.csv] = federations.csv
    for file, text in files.items():
        write_text(file, text)
    written, drawn = list(files), federations.picture("nemenyi")
    if wanted.page is None and drawn is not None:
        written.append(wanted.out / "ranks.png")
        png(drawn, written[-1])
    return written


def _results(folders: Sequence[Path], wanted: Wanted) -> dict[str, ExperimentResult]:
    from tailorfl.report.merging import merge
    from tailorfl.report.result import results

    if len(folders) > 1 and wanted.out is None:
        raise ConfigError(
            f"a report of {len(folders)} folders needs a place of its own: --out FOLDER, or --out FILE.html"
        )
    if wanted.out is None or (len(folders) == 1 and wanted.page is not None):
        return results(folders[0])
    return dict(merge(folders, wanted.out if wanted.page is None else None))


def _page(result: ExperimentResult, file: Path, target: float | None) -> Path:
    from tailorfl.report.page.page import page
    from tailorfl.runs.files import write_text

    write_text(file, page(result, target))
    return file


def _tables(result: ExperimentResult, wanted: Wanted) -> list[Path]:
    """Write the table for LaTeX and its numbers, where they are wanted."""
    from tailorfl.report.document import latex
    from tailorfl.report.tables import render
    from tailorfl.runs.files import write_text

    out = []
    if wanted.latex is not None:
        write_text(wanted.latex, latex(result))
        out.append(wanted.latex)
    if wanted.csv is not None:
        write_text(wanted.csv, render(result.table, result.columns, "csv"))
        out.append(wanted.csv)
    return out
