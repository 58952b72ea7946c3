"""Comparison tables: numbers against the statistics they come from, and the text forms exactly."""

from __future__ import annotations

import csv
import io
import math
from typing import Literal

import numpy as np
import pytest
from rich.console import Console

from tailorfl.errors import ConfigError, RunError
from tailorfl.evaluation.seeds import interval
from tailorfl.report.tables import (
    DEFAULT_COLUMNS,
    Column,
    SeedResult,
    comparison,
    human_bytes,
    human_seconds,
    render,
    rich_table,
)

COLUMNS = (Column("mean", "Accuracy", "percent", "higher"), Column("bytes", "Bytes", "bytes"))


def results() -> list[SeedResult]:
    return [
        SeedResult("ditto_lr|1", "ditto", 0, {"mean": 0.80, "bytes": 2e6}),
        SeedResult("fedavg", "fedavg", 0, {"mean": 0.7, "bytes": 1e6}),
        SeedResult("ditto_lr|1", "ditto", 1, {"mean": 0.90, "bytes": 2e6}),
        SeedResult("local", "local", 0, {"mean": 0.85, "bytes": 0.0}),
    ]


def test_numbers_are_the_intervals_over_seeds() -> None:
    frame = comparison(results(), COLUMNS)
    assert list(frame.index) == ["ditto_lr|1", "fedavg", "local"]
    assert frame["seeds"].tolist() == [2, 1, 1]
    row = frame.loc["ditto_lr|1"]
    assert (row["mean"], row["mean_ci"]) == interval([0.8, 0.9])
    assert row["bytes_ci"] == 0
    assert frame["mean_ci"].isna().tolist() == [False, True, True]
    narrower = comparison(results(), COLUMNS, level=0.5)
    assert narrower.loc["ditto_lr|1", "mean_ci"] < row["mean_ci"]


def test_markdown() -> None:
    # t(0.975, 1 degree of freedom) = 12.7062, standard error 0.05
    assert render(comparison(results(), COLUMNS), COLUMNS) == (
        "| Method | Seeds | Accuracy (%) | Bytes |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| ditto_lr\\|1 | 2 | 85.00 ± 63.53 | 2.0 MB ± 0 B |\n"
        "| fedavg | 1 | 70.00 | 1.0 MB |\n"
        "| local | 1 | 85.00 | 0 B |\n"
    )


def test_latex() -> None:
    assert render(comparison(results(), COLUMNS), COLUMNS, "latex") == (
        "\\begin{tabular}{lrrr}\n"
        "\\toprule\n"
        "Method & Seeds & Accuracy (\\%) & Bytes \\\\\n"
        "\\midrule\n"
        "ditto\\_lr|1 & 2 & 85.00 $\\pm$ 63.53 & 2.0 MB $\\pm$ 0 B \\\\\n"
        "fedavg & 1 & 70.00 & 1.0 MB \\\\\n"
        "local & 1 & 85.00 & 0 B \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}\n"
    )


def test_csv_reads_back_exactly() -> None:
    frame = comparison(results(), COLUMNS)
    rows = list(csv.DictReader(io.StringIO(render(frame, COLUMNS, "csv"))))
    assert [row["label"] for row in rows] == list(frame.index)
    for name in ("mean", "mean_ci", "bytes", "seeds"):
        found = [float(row[name] or "nan") for row in rows]
        np.testing.assert_array_equal(found, frame[name])


def test_rich_table_prints_every_cell_and_no_markup() -> None:
    columns = (Column("mean", "Accuracy [test]", "percent", "higher"),)
    frame = comparison([SeedResult("[bold]a", "a", 0, {"mean": 0.5})], columns)
    console = Console(file=io.StringIO(), width=100)
    console.print(rich_table(frame, columns))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("Method", "Accuracy [test] (%)", "[bold]a", "50.00"):
        assert part in text
    assert [column.justify for column in rich_table(frame, columns).columns] == ["left", "right", "right"]


def test_lower_is_better_and_missing_values() -> None:
    columns = (Column("mse", "Error", "number", "lower"), Column("seconds", "Time", "seconds"))
    rows = [SeedResult("a", "a", 0, {"mse": 2.0}), SeedResult("b", "b", 0, {"mse": 0.5, "seconds": 61.0})]
    text = render(comparison([*rows, SeedResult("c", "c", 0, {})], columns), columns)
    assert text.splitlines()[2:] == [
        "| a | 1 | 2 | – |",
        "| b | 1 | 0.5 | 1 min 01 s |",
        "| c | 1 | – | – |",
    ]


def rows_of(**values: list[float]) -> list[SeedResult]:
    return [SeedResult(n, n, s, {"mean": v}) for n, found in values.items() for s, v in enumerate(found)]


def bold(rows: list[SeedResult], better: Literal["higher", "lower"] = "higher") -> list[str]:
    columns = (Column("mean", "Accuracy", "number", better),)
    lines = render(comparison(rows, columns), columns).splitlines()[2:]
    return [line.split(" | ")[0].strip("| ") for line in lines if "**" in line]


def test_bold_is_what_is_better_than_all_others_beyond_the_noise() -> None:
    """Closed form: of differences 0.1 and 0.1 ± d over two seeds the interval is 0.1 ± 12.7062 d."""
    noise = 0.1 / 12.7062
    far = rows_of(a=[0.8, 0.5], b=[0.7 - 0.9 * noise, 0.4 + 0.9 * noise], c=[0.1, 0.1])
    assert bold(far[:4]) == ["a"]  # though the intervals of a and b themselves overlap by far
    assert bold(far[:4], "lower") == ["b"]
    near = rows_of(a=[0.8, 0.5], b=[0.7 - 1.1 * noise, 0.4 + 1.1 * noise])
    assert bold(near) == []
    assert bold(far) == []  # a's difference to c is 0.7 and 0.4, which is not beyond its noise


def test_nothing_is_bold_where_no_noise_is_known() -> None:
    assert bold(rows_of(a=[0.9], b=[0.1])) == []
    assert bold(rows_of(a=[0.9, 0.9, 0.91])) == []


def test_equal_rows_share_the_place_and_a_failed_one_has_none() -> None:
    rows = rows_of(a=[0.9, 0.8], twin=[0.9, 0.8], b=[0.5, 0.4], failed=[math.nan, 0.99])
    assert bold(rows) == ["a", "twin"]
    assert bold(rows_of(a=[0.9, 0.8], twin=[0.9, 0.8])) == []


def test_latex_sets_it_in_bold() -> None:
    columns = (Column("mean", "Accuracy", "number", "higher"),)
    frame = comparison(rows_of(a=[0.9, 0.8], b=[0.5, 0.4]), columns)
    assert "a & 2 & \\textbf{0.85 $\\pm$ 0.6353}" in render(frame, columns, "latex")


def test_a_failed_seed_shows() -> None:
    rows = [SeedResult("a", "a", seed, {"mean": value}) for seed, value in enumerate((0.5, math.nan))]
    assert "| a | 2 | – | – |" in render(comparison(rows, COLUMNS), COLUMNS)


def test_from_summary() -> None:
    summary = {
        "method": "ditto",
        "label": None,
        "seed": 3,
        "metrics": {"mean": 0.5, "worst10": None, "global": {"auc": 0.25}},
        "bytes_up": 10,
        "bytes_down": 32,
    }
    found = SeedResult.from_summary(summary)
    assert (found.label, found.method, found.seed) == ("ditto", "ditto", 3)
    assert {name: value for name, value in found.values.items() if not math.isnan(value)} == {
        "mean": 0.5,
        "global.auc": 0.25,
        "bytes_up": 10,
        "bytes_down": 32,
        "bytes": 42,
    }
    assert set(found.values) >= {"worst10", "seconds"}
    assert len(render(comparison([found]), DEFAULT_COLUMNS).splitlines()) == 3


def test_what_would_mislead_is_an_error() -> None:
    with pytest.raises(RunError, match="two results with seed 0"):
        comparison([*results(), results()[0]], COLUMNS)
    with pytest.raises(RunError, match="runs of two methods"):
        comparison([*results(), SeedResult("fedavg", "ditto", 9, {})], COLUMNS)
    with pytest.raises(RunError, match="no results"):
        comparison([], COLUMNS)
    with pytest.raises(ConfigError, match="Did you mean 'latex'"):
        render(comparison(results(), COLUMNS), COLUMNS, "latx")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.7, "1.0 kB"),
        (1234567, "1.2 MB"),
        (999_960, "1.0 MB"),
        (5e15, "5000.0 TB"),
    ],
)
def test_human_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.97, "1 min 00 s"),
        (75, "1 min 15 s"),
        (3599.7, "1 h 00 min"),
        (9000, "2 h 30 min"),
    ],
)
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text
