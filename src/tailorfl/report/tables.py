"""Comparison tables: one row a method, mean and confidence interval over seeds in every column."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from tailorfl.errors import RunError, unknown
from tailorfl.evaluation.seeds import interval, paired
from tailorfl.runs.store import SECONDS

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

MISSING = "–"
MARK = "†"
"""Stands behind the label of a line that is another method with its settings, and before the note that says so."""

SYSTEM = ("answered", SECONDS)
"""Numbers of a run whose clients do not always answer."""


@dataclass(frozen=True)
class SeedResult:
    """What one method reached with one seed: named numbers."""

    label: str  # row of the table
    method: str
    seed: int
    values: Mapping[str, float]

    @classmethod
    def from_summary(cls, summary: Mapping[str, Any]) -> Self:
        """From a run's summary {method, label, seed, metrics, bytes_up, bytes_down, seconds}.

        Nested metrics get dotted names ({"personal": {"mean": 0.9}} gives "personal.mean"); "bytes" is up
        plus down. A number that is None (NaN in JSON) or absent is NaN. Without a label the method's name is
        taken.
        """
        values = dict(_flat(summary.get("metrics", {})))
        for name in ("bytes_up", "bytes_down", "seconds", "rounds", "gradients", "gradients_each", *SYSTEM):
            values[name] = _number(summary.get(name))
        values["bytes"] = values["bytes_up"] + values["bytes_down"]
        return cls(
            label=str(summary.get("label") or summary["method"]),
            method=str(summary["method"]),
            seed=int(summary["seed"]),
            values=values,
        )


@dataclass(frozen=True)
class Column:
    """One column of a table: which value, its title and unit, and which end is better."""

    key: str
    title: str
    unit: Literal["number", "percent", "bytes", "seconds"] = "number"  # percent: values are shares in 0 .. 1
    better: Literal["higher", "lower"] | None = None


DEFAULT_COLUMNS = (
    Column("mean", "Mean over clients", "percent", "higher"),
    Column("std", "Std over clients", "percent"),
    Column("worst10", "Worst 10 % of clients", "percent", "higher"),
    Column("share_beating_local", "Clients better than Local", "percent", "higher"),
    Column("gradients_each", "Gradients per client and round"),
    Column("bytes", "Communication", "bytes"),
    Column("seconds", "Time", "seconds"),
)


WHERE_SAID = {
    "selection": Column("selected_round", "round chosen by validation"),
    "privacy": Column("epsilon", "ε (largest, zero-out)"),
    "answered": Column("answered", "answered (of those asked)", "percent"),
    SECONDS: Column(SECONDS, "simulated time", "seconds"),
}
"""Columns of results whose summary has such an entry."""


def comparison(
    results: Iterable[SeedResult], columns: Sequence[Column] = DEFAULT_COLUMNS, *, level: float = 0.95
) -> pd.DataFrame:
    """Numbers of the table, indexed by label in order of first appearance.

    Columns: "method", "seeds" (how many), and for every key the mean over seeds and, as "<key>_ci", the half
    width of its confidence interval (NaN with one seed), and where one end is better, as "<key>_best", whether the row
    is better than all others beyond the noise (`clearly_best`). A value that a seed does not have is NaN, and so
    then is its mean. Raises RunError without results, and where a label has the same seed twice or two
    methods.
    """
    import pandas as pd

    rows: dict[str, dict[int, SeedResult]] = {}
    for result in results:
        seeds = rows.setdefault(result.label, {})
        if result.seed in seeds:
            raise RunError(
                f"'{result.label}' has two results with seed {result.seed}, which would count one experiment "
                "twice; give the runs different labels or leave one out"
            )
        if any(other.method != result.method for other in seeds.values()):
            raise RunError(f"'{result.label}' names runs of two methods; give them different labels")
        seeds[result.seed] = result
    if not rows:
        raise RunError("no results to compare; name at least one finished run")
    table = []
    for seeds in rows.values():
        row: dict[str, Any] = {"method": next(iter(seeds.values())).method, "seeds": len(seeds)}
        for column in columns:
            values = [_number(result.values.get(column.key)) for result in seeds.values()]
            row[column.key], row[f"{column.key}_ci"] = interval(values, level)
        table.append(row)
    frame = pd.DataFrame(table, index=pd.Index(list(rows), name="label"))
    for column in columns:
        if column.better is not None:
            found = [
                {s: _number(r.values.get(column.key)) for s, r in seeds.items()} for seeds in rows.values()
            ]
            frame[f"{column.key}_best"] = clearly_best(found, column.better, level)
    return frame


def clearly_best(
    rows: Sequence[Mapping[int, float]], better: Literal["higher", "lower"], level: float = 0.95
) -> list[bool]:
    """Whether each row, value by seed, is better than every other by more than the noise.

    The interval of its paired difference over their common seeds to each of the others must leave out 0; with one seed
    no noise is known, and nothing is best. Rows that are equal with every seed share the place; NaN has none.
    """
    sign = 1.0 if better == "higher" else -1.0
    known = [{} if any(map(math.isnan, r.values())) else {s: sign * v for s, v in r.items()} for r in rows]

    def beats(first: Mapping[int, float], second: Mapping[int, float]) -> bool:
        common = sorted(first.keys() & second.keys())
        found = paired([first[s] for s in common], [second[s] for s in common], level)
        return not math.isnan(found.half_width) and found.mean > found.half_width

    others = [[row for row in known if row and row != mine] for mine in known]
    pairs = zip(known, others, strict=True)
    return [bool(mine and rest) and all(beats(mine, row) for row in rest) for mine, rest in pairs]


def render(frame: pd.DataFrame, columns: Sequence[Column] = DEFAULT_COLUMNS, form: str = "markdown") -> str:
    """Return a `comparison` as text: form is markdown, latex (booktabs) or csv (plain numbers, nothing rounded).

    Raises ConfigError for another form.
    """
    if form not in _FORMS:
        raise unknown("table format", form, _FORMS)
    return _FORMS[form](frame, columns)


def rich_table(
    frame: pd.DataFrame, columns: Sequence[Column] = DEFAULT_COLUMNS, *, seeds: bool = True
) -> Table:
    """Return a `comparison` for the terminal, clearly best cells of a column in bold; `seeds`: with their number."""
    from rich.table import Table
    from rich.text import Text

    head, body = cells(frame, columns)
    if not seeds:
        head, body = [head[0], *head[2:]], [[row[0], *row[2:]] for row in body]
    table = Table()
    for number, name in enumerate(head):
        table.add_column(Text(name), justify="right" if number else "left")
    for row in body:
        table.add_row(*(Text(text, style="bold" if is_best else "") for text, is_best in row))
    return table


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
    """Return a time in seconds as people say it: 75 -> "1 min 15 s"; NaN -> "–"."""
    if math.isnan(seconds):
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def cells(frame: pd.DataFrame, columns: Sequence[Column]) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """Return the titles, and per row the text of each cell with whether it is the best of its column."""
    percent = {"percent": " (%)"}
    head = ["Method", "Seeds", *(column.title + percent.get(column.unit, "") for column in columns)]
    body = []
    for label, row in frame.iterrows():
        line = [(str(label), False), (str(row["seeds"]), False)]
        for column in columns:
            text = _format(row[column.key], column)
            half_width = row[f"{column.key}_ci"]
            spread = "" if math.isnan(half_width) or text == MISSING else f" ± {_format(half_width, column)}"
            line.append((text + spread, bool(row.get(f"{column.key}_best", False))))
        body.append(line)
    return head, body


def _format(value: float, column: Column) -> str:
    if math.isnan(value):
        return MISSING
    if column.unit == "bytes":
        return human_bytes(value)
    if column.unit == "seconds":
        return human_seconds(value)
    return f"{100 * value:.2f}" if column.unit == "percent" else f"{value:.4g}"


def _markdown(frame: pd.DataFrame, columns: Sequence[Column]) -> str:
    head, body = cells(frame, columns)
    rule = ["---", *("---:" for _ in head[1:])]
    lines = [head, rule]
    for row in body:
        texts = [text.replace("|", "\\|") for text, _ in row]
        lines.append(
            [f"**{text}**" if is_best else text for text, (_, is_best) in zip(texts, row, strict=True)]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _latex(frame: pd.DataFrame, columns: Sequence[Column]) -> str:
    head, body = cells(frame, columns)
    lines = [f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", "\\toprule"]
    lines += [" & ".join(tex(name) for name in head) + r" \\", "\\midrule"]
    for row in body:
        line = (rf"\textbf{{{tex(text)}}}" if is_best else tex(text) for text, is_best in row)
        lines.append(" & ".join(line) + r" \\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def _csv(frame: pd.DataFrame, columns: Sequence[Column]) -> str:
    keys = [name for column in columns for name in (column.key, f"{column.key}_ci")]
    return str(frame[["method", "seeds", *keys]].to_csv(lineterminator="\n"))


_FORMS: dict[str, Callable[[pd.DataFrame, Sequence[Column]], str]] = {
    "markdown": _markdown,
    "latex": _latex,
    "csv": _csv,
}

_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    MARK: r"$^\dagger$",
    "–": "--",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def tex(text: str) -> str:
    """Return a text as LaTeX shows it."""
    return "".join(_TEX.get(character, character) for character in text)


def _flat(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _number(value)


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
