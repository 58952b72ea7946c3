"""Tables from an experiment's learning curves: rounds and bytes to a target, and the effect of choosing a round.

Both use only evaluated rounds (every `eval.every`-th and the last), and the mean over clients of the deployed model's
metric on the clients' own test parts, by which methods are compared.
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
"""Column of `best_rounds` for the round that is best on test data."""
UNTIL = {"rounds": "round", "bytes": "bytes", SECONDS: SECONDS}
"""Columns of `to_target`, and their keys in a round's record."""


def to_target(result: ExperimentResult, target: float) -> pd.DataFrame:
    """Return when each method first was at least as good as `target`, one row for each label.

    Columns: seeds (their number), reached (the number of seeds that reached it), and means over these of rounds, bytes
    (sent by all until then) and simulated_seconds, with half widths of their 95 % intervals, such as `rounds_ci`. They
    are NaN if no seed reached it, or nothing was simulated.
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
    """Return the metric of the last round, of the best round on validation data, and of the best on TEST data.

    There is one row for each label; each column is a mean over seeds, with the half width of its 95 % interval as
    "<column>_ci". The last column, best_on_test, chooses its round on test data: it is optimistic, and only for
    comparison with papers that report it.
    """
    return over_seeds(by_round(result))


def by_round(result: ExperimentResult) -> dict[str, dict[str, list[float]]]:
    """Return the columns of `best_rounds` for each label, one number for each seed."""
    values: dict[str, dict[str, list[float]]] = {}
    for summary, curve in _curves(result):
        scores, by_validation = curve["value"], (summary.get("best_by_validation") or {}).get("local")
        best = scores.min() if result.lower_is_better else scores.max()
        columns = values.setdefault(summary["label"], {})
        last = summary["metrics"]["mean"]  # not that of the last round in which it is defined
        for name, value in (("last", last), ("by_validation", by_validation), (BEST_ON_TEST, best)):
            columns.setdefault(name, []).append(math.nan if value is None else float(value))
    return values


def best_of_each(result: ExperimentResult, label: str) -> list[float]:
    """Return the mean over clients of each client's best round on TEST data (also optimistic), a number per seed."""
    means = []
    for summary, store in result.jobs:
        if summary["label"] == label:
            rows = store.clients()
            rows = rows[(rows["model"] == summary["model"]) & (rows["set"] == "local")]
            scores = rows.groupby("client")[result.metric]
            means.append(float((scores.min() if result.lower_is_better else scores.max()).mean()))
    return means


def sections(result: ExperimentResult, target: float | None = None) -> list[Table]:
    """Return the report's tables on curves: `to_target` if there is a target, `best_rounds` if rounds were compared.

    Raises:
        ConfigError: a target that the metric cannot reach.
    """
    tables = [] if target is None else [_target_table(result, target)]
    return [*tables, _round_table(result)] if any(len(curve) > 1 for _, curve in _curves(result)) else tables


def _curves(result: ExperimentResult) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """Return (summary, evaluated rounds with their value and `UNTIL`) of every job."""
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
        "First evaluated round at which the mean over clients (own test part) reaches the target, and the bytes sent "
        "until then: means over only the seeds that reached it.",
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
        "The table above shows the last round. A round chosen on test data is too optimistic for comparing methods; it "
        "is only given to compare with papers that print it.",
    )
