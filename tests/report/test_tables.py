"""Comparison tables: numbers against the statistics they come from, and the text forms exactly."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from tailorfl.evaluation.comparisons import interval
from tailorfl.report import tables
from tailorfl.report.tables import Column, SeedResult, Table, as_table, comparison, csv, without_seeds

COLUMNS = (Column("mean", "Accuracy", "percent", "higher"), Column("bytes", "Bytes", "bytes"))
ROWS = [
    SeedResult("ditto_lr|1", "ditto", 0, {"mean": 0.80, "bytes": 2e6}),
    SeedResult("fedavg", "fedavg", 0, {"mean": 0.7, "bytes": 1e6}),
    SeedResult("ditto_lr|1", "ditto", 1, {"mean": 0.90, "bytes": 2e6}),
    SeedResult("ditto_lr|1", "ditto", 2, {"mean": 0.85, "bytes": 2e6}),
    SeedResult("local", "local", 0, {"mean": 0.85, "bytes": 0.0}),
    SeedResult("local", "local", 1, {"mean": 0.95, "bytes": 0.0}),
]
# t(0.975, 2 degrees of freedom) = 4.302653, standard error 0.05 / sqrt(3); two seeds have no interval
MARKDOWN = """\
| Method | Accuracy | Bytes | Seeds |
| --- | ---: | ---: | ---: |
| ditto_lr\\|1 | 85.00 ± 12.42 % | 2.0 MB | 3 |
| fedavg | 70.00 % | 1.0 MB | 1 |
| local | 90.00 % | 0 B | 2 |
"""
LATEX = r"""\begin{tabular}{lrrr}
\toprule
Method & Accuracy & Bytes & Seeds \\
\midrule
ditto\_lr\textbar{}1 & 85.00 $\pm$ 12.42 \% & 2.0 MB & 3 \\
fedavg & 70.00 \% & 1.0 MB & 1 \\
local & 90.00 \% & 0 B & 2 \\
\bottomrule
\end{tabular}
"""


def markdown(rows: list[SeedResult], *columns: Column) -> list[str]:
    return as_table(comparison(rows, columns), columns).markdown().splitlines()[2:]


def test_numbers_are_the_intervals_over_seeds_in_every_form() -> None:
    frame = comparison(ROWS, COLUMNS)
    assert frame["seeds"].tolist() == [3, 1, 2]
    row = frame.loc["ditto_lr|1"]
    assert (row["mean"], row["mean_ci"], row["bytes_ci"]) == (*interval([0.8, 0.9, 0.85]), 0)
    assert frame["mean_ci"].isna().tolist() == [False, True, True]
    table = as_table(frame, COLUMNS)
    assert (table.markdown(), table.latex()) == (MARKDOWN, LATEX)
    read = pd.read_csv(io.StringIO(csv(frame, COLUMNS)), index_col="label")
    assert list(read.index) == list(frame.index)
    for name in ("mean", "mean_ci", "bytes", "seeds"):
        np.testing.assert_array_equal(read[name], frame[name])


def test_latex_needs_no_package_for_greek_letters_and_signs() -> None:
    assert tables.tex("a<b>c") == r"a\textless{}b\textgreater{}c"  # otherwise inverted ! and ?
    assert tables.tex("ε – ηλ, βρ ±") == r"$\varepsilon$ -- $\eta$$\lambda$, $\beta$$\rho$ $\pm$"
    # FedProx, APFL, FedRoD, FedCLUP and a label: without a package LaTeX ends with an error at a Greek letter
    assert tables.tex("μ = 0, α, κ, γ = 1/λ") == r"$\mu$ = 0, $\alpha$, $\kappa$, $\gamma$ = 1/$\lambda$"
    assert tables.tex("αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΥΦΨΩ").isascii()
    assert tables.tex("χψωΓΩ") == r"$\chi$$\psi$$\omega$$\Gamma$$\Omega$"


def test_the_terminal_prints_every_cell_and_no_markup() -> None:
    columns = (Column("mean", "Accuracy [test]", "percent", "higher"),)
    shown = as_table(comparison([SeedResult("[bold]a", "a", 0, {"mean": 0.5})], columns), columns).rich()
    console = Console(file=io.StringIO(), width=100)
    console.print(shown)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("Method", "Accuracy [test]", "[bold]a", "50.00 %"):
        assert part in text
    assert [column.justify for column in shown.columns] == ["left", "right", "right"]


def test_columns_are_picked_in_their_order_and_words_stand_left() -> None:
    table = Table.of("t", ("a", "b", "c"), [("1", "2", "3")], left=2)
    assert table.markdown().splitlines()[1] == "| --- | --- | ---: |"
    assert [cell.text for cell in table.pick([2, 0]).rows[0]] == ["3", "1"]


def test_missing_values_and_times_have_words() -> None:
    columns = (Column("mse", "Error", "number", "lower"), Column("seconds", "Time", "seconds"))
    rows = [SeedResult("a", "a", 0, {"mse": 2.0}), SeedResult("b", "b", 0, {"mse": 0.5, "seconds": 61.0})]
    shown = markdown([*rows, SeedResult("c", "c", 0, {})], *columns)
    assert shown == ["| a | 2 | – | 1 |", "| b | 0.5 | 1 min 01 s | 1 |", "| c | – | – | 1 |"]
    failed = [SeedResult("a", "a", seed, {"mean": value}) for seed, value in enumerate((0.5, math.nan))]
    assert markdown(failed, *COLUMNS) == ["| a | – | 2 |"], (
        "a column without any number is left out, but the first"
    )


def test_spreads_of_costs_and_of_spreads_are_in_csv_alone() -> None:
    """Of 1, 2 and 3 the interval is 2 ± 4.302653 / √3."""
    columns = [Column("std", "Std"), Column("seconds", "Time", "seconds"), Column("mse", "Error")]
    rows = [
        SeedResult("a", "a", seed, dict.fromkeys(("std", "seconds", "mse"), 1.0 + seed)) for seed in range(3)
    ]
    assert markdown(rows, *columns) == ["| a | 2 | 2.0 s | 2 ± 2.484 | 3 |"]
    assert csv(comparison(rows, columns), columns).splitlines()[1].count("2.484") == 3


def test_seeds_are_a_column_only_where_rows_have_different_counts() -> None:
    rows = [SeedResult("a", "a", seed, {"mean": 0.5}) for seed in range(3)]
    for further, count, note in (
        ([SeedResult("b", "b", 0, {"mean": 0.5})], 3, "mean over 3 seeds ± half width of the 95 % interval"),
        ([], 3, "mean over 3 seeds ± half width of the 95 % interval"),
        ([], 2, "mean over 2 seeds"),
        ([], 1, "1 seed"),
    ):
        frame, spread = without_seeds(comparison([*rows[:count], *further], COLUMNS[:1]))
        assert ("seeds" in frame) == bool(further)
        assert spread == note


NOISE = 0.1 / (4.30265 / 3**0.5)
"""Closed form: of differences 0.1 − d, 0.1 and 0.1 + d over three seeds the interval is 0.1 ± 4.30265 d / √3."""


@pytest.mark.parametrize(
    ("values", "better", "expected"),
    [
        # though the intervals of a and b themselves overlap by far
        ({"a": [0.8, 0.5, 0.2], "b": [0.7 - 0.9 * NOISE, 0.4, 0.1 + 0.9 * NOISE]}, "higher", ["a"]),
        ({"a": [0.8, 0.5, 0.2], "b": [0.7 - 0.9 * NOISE, 0.4, 0.1 + 0.9 * NOISE]}, "lower", ["b"]),
        ({"a": [0.8, 0.5, 0.2], "b": [0.7 - 1.1 * NOISE, 0.4, 0.1 + 1.1 * NOISE]}, "higher", []),
        # a's difference to c is 0.7, 0.4 and 0.1, which is not beyond its noise
        ({"a": [0.8, 0.5, 0.2], "b": [0.7, 0.4, 0.1], "c": [0.1, 0.1, 0.1]}, "higher", []),
        # two seeds say too little, however far apart
        ({"a": [0.9, 0.9], "b": [0.1, 0.1]}, "higher", []),
        ({"a": [0.9], "b": [0.1]}, "higher", []),
        ({"a": [0.9, 0.9, 0.91]}, "higher", []),
        (
            {"a": [0.9, 0.8, 0.7], "twin": [0.9, 0.8, 0.7], "b": [0.5, 0.4, 0.3], "bad": [math.nan, 0.9, 0.9]},
            "higher",
            ["a", "twin"],
        ),
        ({"a": [0.9, 0.8, 0.7], "twin": [0.9, 0.8, 0.7]}, "higher", []),
    ],
)  # fmt: skip
def test_bold_is_what_is_better_than_all_others_beyond_the_noise(
    values: dict[str, list[float]], better: Literal["higher", "lower"], expected: list[str]
) -> None:
    rows = [SeedResult(n, n, s, {"mean": v}) for n, seeds in values.items() for s, v in enumerate(seeds)]
    columns = (Column("mean", "Accuracy", "number", better),)
    table = as_table(comparison(rows, columns), columns)
    assert [row[0].text for row in table.rows if row[1].strong] == expected
    bold = [line.split(" & ")[0] for line in table.latex().splitlines() if r"\textbf{" in line]
    assert bold == expected
    assert [line.split(" | ")[0][2:] for line in table.markdown().splitlines() if "**" in line] == expected


def test_only_jobs_that_may_be_compared_make_a_number_bold() -> None:
    """Not those of merged folders with other settings, though their seeds are the same."""
    columns = (Column("mean", "Accuracy", "number", "higher"),)
    for other, bold in (("x", True), ("y", False)):
        rows = [SeedResult("a", "a", seed, {"mean": 0.9}, "x") for seed in range(3)]
        rows += [SeedResult("b", "b", seed, {"mean": 0.5}, other) for seed in range(3)]
        table = as_table(comparison(rows, columns), columns)
        assert any(cell.strong for row in table.rows for cell in row) is bold


def test_a_row_of_latex_is_no_argument_of_the_one_before() -> None:
    columns = (Column("mean", "Accuracy", "number", "higher"),)
    rows = [SeedResult(label, label, 0, {"mean": 0.5}) for label in ("a", "[1] b", "*c")]
    starts = [line[:4] for line in as_table(comparison(rows, columns), columns).latex().splitlines()[4:7]]
    assert starts == ["a & ", "{}[1", "{}*c"]


@pytest.mark.parametrize(
    ("amount", "texts"),
    [
        (tables.human_bytes, {0: "0 B", 999: "999 B", 999.7: "1.0 kB", 1234567: "1.2 MB", 999_960: "1.0 MB",
                              5e15: "5000.0 TB"}),
        (tables.human_seconds, {0.0: "0.0 s", 0.0123: "12 ms", 0.0499: "50 ms", 0.05: "0.1 s", 59.94: "59.9 s",
                                59.97: "1 min 00 s", 75: "1 min 15 s", 3599.7: "1 h 00 min", 7199: "2 h 00 min",
                                9000: "2 h 30 min", math.nan: "–"}),
    ],
)  # fmt: skip
def test_amounts_in_words(amount: Callable[[float], str], texts: dict[float, str]) -> None:
    assert {number: amount(number) for number in texts} == texts
