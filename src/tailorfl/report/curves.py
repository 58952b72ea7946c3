"""What the curves of an experiment say: rounds and bytes to a target, and what choosing a round changes.

Both read the evaluated rounds only (every `eval.every`-th and the last one), and the mean over clients of the deployed
model's metric on the clients' own test parts, which methods are compared by.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tailorfl.evaluation.leading import check_target
from tailorfl.evaluation.metrics import UNIT_METRICS
from tailorfl.report.tables import Cell, Column, Table, as_table, over_seeds
from tailorfl.runs.store import SECONDS

if TYPE_CHECKING:
    import pandas as pd

    from tailorfl.report.result import ExperimentResult

BEST_ON_TEST = "best_on_test"
"""Column of `best_rounds` of the round that is best on test data."""
UNTIL = {"rounds": "round", "bytes": "bytes", SECONDS: SECONDS}
"""Columns of `to_target`, and where a round's record has them."""


def to_target(result: ExperimentResult, target: float) -> pd.DataFrame:
    """Return when each method first was at least as good as `target`, a row a label.

    Columns: seeds (how many), reached (in how many of them), and over those seeds alone the mean of rounds, of bytes
    (sent by all until then) and of simulated_seconds, with half widths of their 95 % intervals, such as `rounds_ci`;
    NaN where none reached it, or nothing was simulated.
    """
    seeds: dict[str, int] = {}
    reached: dict[str, dict[str, list[float]]] = {}
    for summary, curve in _curves(result):
        label = summary["label"]
        seeds[label] = seeds.get(label, 0) + 1
        values = reached.setdefault(label, {name: [] for name in UNTIL})
        enough = curve[curve["value"] <= target if result.lower_is_better else curve["value"] >= target]
        for name, column in UNTIL.items() if len(enough) else ():
            values[name].append(float(enough[column].iloc[0]))
    frame = over_seeds(reached)
    frame.insert(0, "seeds", list(seeds.values()))
    frame.insert(1, "reached", [len(values["rounds"]) for values in reached.values()])
    return frame


def best_rounds(result: ExperimentResult) -> pd.DataFrame:
    """Return the metric of the last round, of the round that is best on validation data, and of the best on TEST data.

    A row a label; each column is a mean over seeds, with the half width of its 95 % interval as "<column>_ci". The
    last column, best_on_test, has looked at the test data to choose its round: it is too good, and only there to be
    held against papers that print it.
    """
    return over_seeds(by_round(result))


def by_round(result: ExperimentResult) -> dict[str, dict[str, list[float]]]:
    """Return the columns of `best_rounds` of each label, a number a seed."""
    values: dict[str, dict[str, list[float]]] = {}
    for summary, curve in _curves(result):
        scores, by_validation = curve["value"], (summary.get("best_by_validation") or {}).get("local")
        best = scores.min() if result.lower_is_better else scores.max()
        columns = values.setdefault(summary["label"], {})
        for name, value in (
            ("last", scores.iloc[-1]),
            ("by_validation", by_validation),
            (BEST_ON_TEST, best),
        ):
            columns.setdefault(name, []).append(math.nan if value is None else float(value))
    return values


def best_of_each(result: ExperimentResult, label: str) -> list[float]:
    """Return the mean over clients of each one's best round on TEST data (too good, as above), a number a seed."""
    means = []
    for summary, store in result.jobs:
        if summary["label"] == label:
            rows = store.clients()
            rows = rows[(rows["model"] == summary["model"]) & (rows["set"] == "local")]
            scores = rows.groupby("client")[result.metric]
            means.append(float((scores.min() if result.lower_is_better else scores.max()).mean()))
    return means


def sections(result: ExperimentResult, target: float | None = None) -> list[Table]:
    """Return what a report says about curves: `to_target` where there is a target, `best_rounds` where rounds differ.

    Raises:
        ConfigError: a target that the metric cannot reach.
    """
    tables = [] if target is None else [_target_table(result, target)]
    return [*tables, _round_table(result)] if any(len(curve) > 1 for _, curve in _curves(result)) else tables


def _curves(result: ExperimentResult) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """(summary, evaluated rounds with their value and `UNTIL`) of every job."""
    curves = []
    for summary, store in result.jobs:
        rounds = store.rounds()
        column = f"{summary['model']}/local/{result.metric}"
        curve = rounds.reindex(columns=list(UNTIL.values())).assign(value=rounds[column])
        curves.append((summary, curve.dropna(subset=["value"])))
    return curves


def _target_table(result: ExperimentResult, target: float) -> Table:
    check_target(target, result.metric)
    goal = f"{100 * target:g} %" if result.metric in UNIT_METRICS else f"{target:g}"
    frame = to_target(result, target)
    columns = [
        Column("rounds", "Rounds"),
        Column("bytes", "Traffic until then", "bytes"),
        Column(SECONDS, "Simulated time", "seconds"),
    ]
    table = as_table(
        frame.drop(columns="seeds"),
        columns,
        f"Until {result.metric} is {goal}",
        "The first evaluated round at which the mean over clients (own test part) is there, and the bytes sent until "
        "then: means over the seeds that reached it alone.",
    )
    counts = [Cell(f"{row.reached} of {row.seeds}") for row in frame.itertuples()]
    rows = [[row[0], count, *row[1:]] for row, count in zip(table.rows, counts, strict=True)]
    return Table(table.title, [table.head[0], "Seeds that reached it", *table.head[1:]], rows, table.note)


def _round_table(result: ExperimentResult) -> Table:
    unit: Any = "percent" if result.metric in UNIT_METRICS else "number"
    titles = {
        "last": "Last round",
        "by_validation": "Best on validation",
        BEST_ON_TEST: "Best on TEST (optimistic)",
    }
    return as_table(
        best_rounds(result),
        [Column(key, title, unit) for key, title in titles.items()],
        f"Which round: {result.metric}",
        "The table above is of the last round. A round chosen on test data is too good and no basis for a comparison: "
        "it is only there to be held against papers that print it.",
    )
