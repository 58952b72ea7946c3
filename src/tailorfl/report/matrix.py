"""Methods by federations: several experiments on different data, and the methods' average ranks over them.

A federation is ranked by its own metric. Only methods that every federation has are ranked; labels say which those are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tailorfl.evaluation.ranks import Ranking, ranking
from tailorfl.report.merging import merge
from tailorfl.report.page.look import Look
from tailorfl.report.rank_plot import Diagram, diagram, tikz
from tailorfl.report.result import ExperimentResult
from tailorfl.report.tables import MISSING, Cell, Table
from tailorfl.runs.files import encode
from tailorfl.runs.fingerprint import samples_of

ALIKE = 2
"""Federations and methods that ranks need at least."""


@dataclass(frozen=True)
class Matrix:
    """Results by the name of their federation; methods stand in the order of their first appearance."""

    results: Mapping[str, ExperimentResult]

    @property
    def displayed(self) -> Matrix:
        """The matrix with display names as labels."""
        return Matrix({name: result.displayed for name, result in self.results.items()})

    @cached_property
    def labels(self) -> list[str]:
        """All methods."""
        return list(dict.fromkeys(label for result in self.results.values() for label in result.labels))

    @cached_property
    def cells(self) -> dict[tuple[str, str], tuple[float, float, bool]]:
        """(federation, method) -> (mean, half width of its interval, whether it is clearly the best there)."""
        return {
            (name, str(label)): (float(row["mean"]), float(row["mean_ci"]), bool(row["mean_best"]))
            for name, result in self.results.items()
            for label, row in result.table.iterrows()
        }

    @cached_property
    def ranked(self) -> list[str]:
        """The methods that have a number in every federation."""
        return [
            label
            for label in self.labels
            if not any(np.isnan(self.cells.get((name, label), (np.nan,))[0]) for name in self.results)
        ]

    @cached_property
    def ranking(self) -> Ranking | None:
        """The ranks of `ranked`, None where there are too few federations or methods."""
        if min(len(self.results), len(self.ranked)) < ALIKE:
            return None
        scores = [[self.cells[name, label][0] for label in self.ranked] for name in self.results]
        higher = [not result.lower_is_better for result in self.results.values()]
        return ranking(scores, higher_is_better=higher)

    @cached_property
    def ordered(self) -> list[tuple[str, float | None]]:
        """(method, average rank), the best first, those without one last."""
        averages = [] if self.ranking is None else self.ranking.average.tolist()
        ranks: dict[str, float] = dict(zip(self.ranked, averages, strict=False))
        unranked = [label for label in self.labels if label not in ranks]
        return [*sorted(ranks.items(), key=lambda pair: pair[1]), *((label, None) for label in unranked)]

    @property
    def table(self) -> Table:
        """A row a method, best first, a column a federation, and the average rank; bold is best beyond the noise."""
        looks = {name: Look.of(result) for name, result in self.results.items()}
        rows = []
        for label, rank in self.ordered:
            row = [Cell(label)]
            for name, look in looks.items():
                mean, half_width, is_best = self.cells.get((name, label), (np.nan, np.nan, False))
                row.append(Cell(look.spread(mean, half_width), mean, is_best))
            rows.append([*row, Cell(MISSING if rank is None else f"{rank:.2f}", rank)])
        head = [
            "Method",
            *(f"{name}: {look.name}" for name, look in looks.items()),
            "Average rank",
        ]
        note = (
            "Mean over clients of each federation's own metric (deployed models, own test parts), mean over seeds ± "
            "half width of the 95 % interval; bold: better than every other method of the column beyond the noise. "
            "Average rank over federations: 1 is the best."
        )
        return Table("Methods by federations", head, rows, note)

    def picture(self, which: str) -> Diagram | None:
        """Return the diagram with the groups of "nemenyi" or "wilcoxon"; None without ranks."""
        ranks = self.ranking
        if ranks is None:
            return None
        groups, critical = {
            "nemenyi": (ranks.nemenyi_groups, ranks.critical),
            "wilcoxon": (ranks.wilcoxon_groups, None),
        }[which]
        return diagram(self.ranked, ranks.average.tolist(), groups, critical)

    @property
    def latex(self) -> str:
        """A booktabs table, the best of a federation beyond the noise in bold, and the diagram in TikZ."""
        drawn = self.picture("nemenyi")
        head = "% needs \\usepackage{booktabs} and \\usepackage{tikz}\n"
        return head + self.table.latex() + ("" if drawn is None else "\n" + tikz(drawn))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A method each: label, rank (None without), then for every federation mean and, as "NAME_ci", half width."""
        rows = []
        for label, rank in self.ordered:
            row: dict[str, Any] = {"label": label, "rank": rank}
            for name in self.results:
                row[name], row[f"{name}_ci"], _ = self.cells.get((name, label), (np.nan, np.nan, False))
            rows.append(row)
        return rows

    @property
    def csv(self) -> str:
        """The rows as a file, nothing rounded."""
        import pandas as pd

        return str(pd.DataFrame(self.rows).to_csv(index=False, lineterminator="\n"))


def by_federation(results: Mapping[Path, ExperimentResult]) -> dict[str, list[Path]]:
    """Return which folders hold experiments on the same data, by the name of the first of them."""
    groups: dict[str, list[Path]] = {}
    for folder, result in results.items():
        samples = samples_of(result.jobs[0][1].config)
        data = encode([result.config.data.model_dump(mode="json"), samples])
        groups.setdefault(data, []).append(folder)
    names: dict[str, list[Path]] = {}
    for folders in groups.values():
        name = folders[0].name
        names[name if name not in names else str(folders[0])] = folders
    return names


def matrix(results: Mapping[Path, ExperimentResult], groups: Mapping[str, Sequence[Path]]) -> Matrix:
    """Return the matrix of results by folder; folders of one federation are put together.

    Raises:
        RunError: folders of one federation do not go together, see `merging.merge`.
    """
    return Matrix(
        {
            name: results[folders[0]] if len(folders) == 1 else merge(folders, None)[""]
            for name, folders in groups.items()
        }
    )
