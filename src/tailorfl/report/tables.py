"""Tables of numbers with their spread over seeds, for the terminal, Markdown, LaTeX, CSV and the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from tailorfl.evaluation.comparisons import interval, paired

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table as RichTable

MISSING = "–"
MARK = "†"
"""Follows the name of a method that equals another one with its settings, and precedes the note on it."""
LEAST_SEEDS = 3
"""Fewest seeds for an interval: that of two seeds is too wide to be useful."""
PROSE = 60
"""Cells with more characters are running text, which may be folded."""

_GREEK = (
    "alpha beta gamma delta zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega"
)
_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    MARK: r"$^\dagger$",
    "–": "--",
    "ε": r"$\varepsilon$",
    **{
        letter: rf"$\{name}$"
        for letter, name in zip("αβγδζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΥΦΨΩ", _GREEK.split(), strict=True)
    },
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


Summary = Mapping[str, Any]
"""Contents of a job's summary.json, with `share_beating_local` if it is known."""


@dataclass(frozen=True)
class Column:
    """One column of a table. `value` computes the number from a job's summary if `key` does not name it there."""

    key: str
    title: str
    unit: Literal["number", "percent", "bytes", "seconds"] = "number"  # percent: values are shares in 0 .. 1
    better: Literal["higher", "lower"] | None = None
    value: Callable[[Summary], float | None] | None = None

    @property
    def has_spread(self) -> bool:
        """Whether tables show half widths; those of costs and standard deviations are in the CSV only."""
        return self.key != "std" and self.unit not in ("bytes", "seconds")

    def text(self, mean: float, half_width: float = math.nan, sign: str = "") -> str:
        """Return a number, or a difference with `sign` "+", with the half width of its interval and its unit."""
        if math.isnan(mean):
            return MISSING
        spread = "" if math.isnan(half_width) else f" ± {self._short(half_width)}"
        return f"{self._short(mean, sign)}{spread}{' %' if self.unit == 'percent' else ''}"

    def _short(self, value: float, sign: str = "") -> str:
        if self.unit in ("bytes", "seconds"):
            return human_bytes(value) if self.unit == "bytes" else human_seconds(value)
        return f"{100 * value:{sign}.2f}" if self.unit == "percent" else f"{value:{sign}.4g}"


@dataclass(frozen=True)
class SeedResult:
    """Numbers of one method with one seed, by name."""

    label: str  # row of the table
    method: str
    seed: int
    values: Mapping[str, float]
    company: str = ""  # only jobs with the same one are compared


@dataclass(frozen=True)
class Cell:
    """A cell of a table; the page sorts its column by `value` if the text does not start with it."""

    text: str
    value: float | None = None
    strong: bool = False

    @property
    def is_prose(self) -> bool:
        """Whether the cell may be folded."""
        return len(self.text) > PROSE


@dataclass(frozen=True)
class Table:
    """A title, a head and rows of cells; the first `left` columns are text, all others numbers.

    `note` explains the numbers.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    left: int = 1

    @classmethod
    def of(
        cls,
        title: str,
        head: Sequence[str],
        rows: Iterable[Sequence[Any]],
        note: str = "",
        left: int = 1,
    ) -> Table:
        """Return a table from rows in which cells may be plain texts."""
        cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
        return cls(title, head, cells, note, left)

    def pick(self, columns: Sequence[int], title: str = "") -> Table:
        """Return the table with only these columns, in this order."""
        rows = [[row[k] for k in columns] for row in self.rows]
        return replace(self, title=title or self.title, head=[self.head[k] for k in columns], rows=rows)

    def markdown(self) -> str:
        """Return head and rows as Markdown; strong cells are bold."""
        rule = ["---" if k < self.left else "---:" for k in range(len(self.head))]
        body = [[(f"**{cell.text}**" if cell.strong else cell.text) for cell in row] for row in self.rows]
        lines = [[text.replace("|", "\\|") for text in line] for line in (self.head, rule, *body)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def latex(self) -> str:
        """Return head and rows as a booktabs tabular; strong cells are bold."""
        body = [
            [rf"\textbf{{{tex(cell.text)}}}" if cell.strong else tex(cell.text) for cell in row]
            for row in self.rows
        ]
        head, *rows = map(_latex_row, ([tex(name) for name in self.head], *body))
        columns = "l" * self.left + "r" * (len(self.head) - self.left)
        lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *rows]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"

    def rich(self) -> RichTable:
        """Return the table for the terminal; strong cells are bold, and text is not interpreted as markup."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=Text(self.title) if self.title else None)
        for number, name in enumerate(self.head):
            table.add_column(Text(name), justify="left" if number < self.left else "right")
        for row in self.rows:
            table.add_row(*(Text(cell.text, style="bold" if cell.strong else "") for cell in row))
        return table


def tex(text: str) -> str:
    """Return a text escaped for LaTeX."""
    return "".join(_TEX.get(character, character) for character in text)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds and the half width of its 95 % interval; NaN for fewer than `LEAST_SEEDS` seeds."""
    mean, half_width = interval(values)
    return mean, half_width if len(values) >= LEAST_SEEDS else math.nan


def over_seeds(rows: Mapping[Any, Mapping[str, Sequence[float]]]) -> pd.DataFrame:
    """Return means over seeds of {label: {name: values}}, with half widths of their 95 % intervals as "<name>_ci".

    With fewer than `LEAST_SEEDS` seeds the half width is NaN.
    """
    import pandas as pd

    table = []
    for columns in rows.values():
        spreads = {name: spread(values) for name, values in columns.items()}
        table.append(
            {k: v for name, (mean, ci) in spreads.items() for k, v in ((name, mean), (f"{name}_ci", ci))}
        )
    return pd.DataFrame(table, index=pd.Index(list(rows), name="label"))


def _latex_row(cells: Sequence[str]) -> str:
    """Return a row; the end of the one before would take a first [ or * as its argument, so braces precede them."""
    return ("{}" if cells[0].startswith(("[", "*")) else "") + " & ".join(cells) + r" \\"


def comparison(results: Iterable[SeedResult], columns: Sequence[Column]) -> pd.DataFrame:
    """Return the numbers of the comparison, indexed by label in order of first appearance.

    Columns: "method", "seeds" (their number), and for every key the mean over seeds, as "<key>_ci" the half width of
    its confidence interval (see `spread`), and if higher or lower is better, as "<key>_best" whether the row is better
    than all others beyond the noise (`clearly_best`). If a seed lacks a value, the mean is NaN.
    """
    labels: dict[str, list[SeedResult]] = {}
    for result in results:
        labels.setdefault(result.label, []).append(result)
    values = {
        column.key: [
            {(r.seed, r.company): r.values.get(column.key, math.nan) for r in row} for row in labels.values()
        ]
        for column in columns
    }
    spreads = {
        label: {key: list(rows[number].values()) for key, rows in values.items()}
        for number, label in enumerate(labels)
    }
    frame = over_seeds(spreads)
    frame.insert(0, "method", [row[0].method for row in labels.values()])
    frame.insert(1, "seeds", [len(row) for row in labels.values()])
    for column in columns:
        if column.better is not None:
            frame[f"{column.key}_best"] = clearly_best(values[column.key], column.better)
    return frame


def clearly_best(
    rows: Sequence[Mapping[tuple[int, str], float]], better: Literal["higher", "lower"]
) -> list[bool]:
    """Return for each row, values by seed and company, whether it is better than every other by more than the noise.

    The interval of its paired difference to each other row, over common seeds, must be above 0; with fewer than
    `LEAST_SEEDS` common seeds no row is best. Rows that are equal with every seed may both be best; a row with NaN is
    never.
    """
    sign = 1.0 if better == "higher" else -1.0
    valid = [{} if any(map(math.isnan, r.values())) else {s: sign * v for s, v in r.items()} for r in rows]

    def beats(first: Mapping[tuple[int, str], float], second: Mapping[tuple[int, str], float]) -> bool:
        common = sorted(first.keys() & second.keys())
        difference = paired([first[s] for s in common], [second[s] for s in common])
        return len(common) >= LEAST_SEEDS and difference.mean > difference.half_width

    rivals = [[row for row in valid if row and row != candidate] for candidate in valid]
    return [
        bool(candidate and rows) and all(beats(candidate, row) for row in rows)
        for candidate, rows in zip(valid, rivals, strict=True)
    ]


def as_table(frame: pd.DataFrame, columns: Sequence[Column], title: str = "", note: str = "") -> Table:
    """Return a table of means and half widths from a frame as returned by `comparison`.

    "seeds", if the frame has it, is the last column; columns without numbers are left out, except the first.
    """
    filled = [column for column in columns if column == columns[0] or frame[column.key].notna().any()]
    seeds = ["seeds"] if "seeds" in frame else []
    head = ["Method", *(column.title for column in filled), *(name.capitalize() for name in seeds)]
    rows = []
    for label, row in frame.iterrows():
        cells = [Cell(str(label))]
        for column in filled:
            half_width = row.get(f"{column.key}_ci", math.nan) if column.has_spread else math.nan
            text = column.text(row[column.key], half_width)
            cells.append(Cell(text, float(row[column.key]), bool(row.get(f"{column.key}_best", False))))
        rows.append([*cells, *(Cell(str(row[name]), float(row[name])) for name in seeds)])
    return Table(title, head, rows, note)


def without_seeds(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return a `comparison` without the column "seeds" if it is constant, and a description of the numbers."""
    most = int(frame["seeds"].max())
    if frame["seeds"].nunique() == 1:
        frame = frame.drop(columns="seeds")
    interval = " ± half width of the 95 % interval" if most >= LEAST_SEEDS else ""
    return frame, f"mean over {most} seeds{interval}" if most > 1 else "1 seed"


def csv(frame: pd.DataFrame, columns: Sequence[Column]) -> str:
    """Return the numbers of a `comparison` as CSV, without rounding."""
    keys = [name for column in columns for name in (column.key, f"{column.key}_ci")]
    return str(frame[["method", "seeds", *keys]].to_csv(lineterminator="\n"))


def human_bytes(count: float) -> str:
    """Return a number of bytes with a decimal unit: 1234567 -> "1.2 MB"; NaN -> "–"."""
    if math.isnan(count):
        return MISSING
    if count < 999.5:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.95 or unit == "TB":
            break
    return f"{count:.1f} {unit}"


def human_seconds(seconds: float) -> str:
    """Return a time in readable units: 75 -> "1 min 15 s", 0.004 -> "4 ms"; NaN -> "–"."""
    if math.isnan(seconds):
        return MISSING
    if 0 < seconds < 0.05:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"
