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

from tailorfl.evaluation.metrics import LOWER_IS_BETTER
from tailorfl.evaluation.ranks import Ranking, ranking
from tailorfl.report.merging import merge
from tailorfl.report.page.look import Look
from tailorfl.report.rank_plot import Diagram, diagram, tikz
from tailorfl.report.result import ExperimentResult
from tailorfl.report.tables import MISSING, tex
from tailorfl.runs.files import encode
from tailorfl.runs.fingerprint import samples_of

ALIKE = 2
"""Federations and methods that ranks need at least."""


@dataclass(frozen=True)
class Matrix:
    """Results by the name of their federation; methods stand in the order of their first appearance."""

    results: Mapping[str, ExperimentResult]

    @cached_property
    def labels(self) -> list[str]:
        """All methods."""
        return list(dict.fromkeys(str(s["label"]) for r in self.results.values() for s, _ in r.jobs))

    @cached_property
    def cells(self) -> dict[tuple[str, str], tuple[float, float, bool]]:
        """(federation, method) -> (mean, half width of its interval, whether it is clearly the best there)."""
        found = {}
        for name, result in self.results.items():
            for label, row in result.table.iterrows():
                found[name, str(label)] = (float(row["mean"]), float(row["mean_ci"]), bool(row["mean_best"]))
        return found

    @property
    def best(self) -> set[tuple[str, str]]:
        """(federation, method) of what is better than all others there, beyond the noise."""
        return {place for place, (_, _, is_best) in self.cells.items() if is_best}

    @cached_property
    def ranked(self) -> list[str]:
        """The methods that have a number in every federation."""
        return [
            label
            for label in self.labels
            if all((n, label) in self.cells and not np.isnan(self.cells[n, label][0]) for n in self.results)
        ]

    @cached_property
    def ranking(self) -> Ranking | None:
        """The ranks of `ranked`, None where there are too few federations or methods."""
        if min(len(self.results), len(self.ranked)) < ALIKE:
            return None
        scores = [[self.cells[name, label][0] for label in self.ranked] for name in self.results]
        higher = [result.metric not in LOWER_IS_BETTER for result in self.results.values()]
        return ranking(scores, higher_is_better=higher)

    @cached_property
    def ordered(self) -> list[tuple[str, float | None]]:
        """(method, average rank), the best first, those without one last."""
        found = self.ranking
        ranks = {} if found is None else dict(zip(self.ranked, map(float, found.average), strict=True))
        rest = [label for label in self.labels if label not in ranks]
        return [*sorted(ranks.items(), key=lambda pair: pair[1]), *((label, None) for label in rest)]

    def text(self, name: str, label: str) -> str:
        """Return a cell as text."""
        look = Look.of(self.results[name])
        return look.spread(*self.cells[name, label][:2]) if (name, label) in self.cells else MISSING

    def title(self, name: str) -> str:
        """Return the head of a federation's column."""
        look = Look.of(self.results[name])
        return f"{name}: {look.name}{look.unit}"

    def picture(self, which: str) -> Diagram | None:
        """Return the diagram with the groups of "nemenyi" or "wilcoxon"; None without ranks."""
        found = self.ranking
        if found is None:
            return None
        if which == "nemenyi":
            return diagram(self.ranked, found.average.tolist(), found.nemenyi_groups, found.critical)
        return diagram(self.ranked, found.average.tolist(), found.wilcoxon_groups, None)

    @property
    def latex(self) -> str:
        """A booktabs table, the best of a federation beyond the noise in bold, and the diagram in TikZ."""
        head = " & ".join(tex(text) for text in ("Method", *map(self.title, self.results), "Average rank"))
        lines = [r"% needs \usepackage{booktabs} and \usepackage{tikz}"]
        lines += [
            rf"\begin{{tabular}}{{l{'r' * (len(self.results) + 1)}}}",
            r"\toprule",
            head + r" \\",
            r"\midrule",
        ]
        for label, rank in self.ordered:
            cells = []
            for name in self.results:
                text = tex(self.text(name, label))
                cells.append(rf"\textbf{{{text}}}" if (name, label) in self.best else text)
            cells.append(tex(MISSING if rank is None else f"{rank:.2f}"))
            lines.append(" & ".join([tex(label), *cells]) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}"]
        drawn = self.picture("nemenyi")
        return "\n".join(lines) + "\n" + ("" if drawn is None else "\n" + tikz(drawn))

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


def by_federation(found: Mapping[Path, ExperimentResult]) -> dict[str, list[Path]]:
    """Return which folders hold experiments on the same data, by the name of the first of them."""
    groups: dict[str, list[Path]] = {}
    for folder, result in found.items():
        samples = samples_of(result.jobs[0][1].config)
        same = encode([result.config.data.model_dump(mode="json"), samples])
        groups.setdefault(same, []).append(folder)
    names: dict[str, list[Path]] = {}
    for folders in groups.values():
        name = folders[0].name
        names[name if name not in names else str(folders[0])] = folders
    return names


def matrix(found: Mapping[Path, ExperimentResult], groups: Mapping[str, Sequence[Path]]) -> Matrix:
    """Return the matrix of results by folder; folders of one federation are put together.

    Raises:
        RunError: folders of one federation do not go together, see `merging.merge`.
    """
    return Matrix(
        {
            name: found[folders[0]] if len(folders) == 1 else merge(folders, None)[""]
            for name, folders in groups.items()
        }
    )
