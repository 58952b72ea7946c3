"""Curves of an experiment: its metric by round, by bytes, by simulated seconds; and the worst clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailorfl.evaluation.summary import tails
from tailorfl.report.page import charts
from tailorfl.report.page.charts import Chart, Look, PagePart, Rows, Spec, named
from tailorfl.report.plots import bands
from tailorfl.report.tables import LEAST_SEEDS
from tailorfl.runs.store import SECONDS

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult

MOST = 150
"""Largest number of points of a line, evenly chosen from more."""
PERCENTS = (*range(1, 20), *range(20, 101, 2))
"""Shares of the worst clients."""


def curves(result: ExperimentResult, look: Look) -> PagePart:
    """Return the part with the curves by round, bytes and simulated seconds."""
    rows = _rows(result, look)
    part = PagePart("curves", "Curves", keys=True)
    part.notes.append(
        f"Mean over clients of the {look.name} on their own test parts; band: 95 % confidence interval over seeds "
        f"(none with fewer than {LEAST_SEEDS}). Click a name in the legend to hide or show its line."
    )
    by_label = {label: [row for row in rows if row["label"] == label] for label in look.labels}
    if all(len(line) < 2 for line in by_label.values()):
        part.left_out.append("Curves: only one round was evaluated (eval.every=0).")
        return part
    silent = {
        label: line[-1] for label, line in by_label.items() if line and not any(r["bytes"] for r in line)
    }
    part.data = {"curves": rows, "silent": list(silent.values())}
    x = charts.quantity("round", "round", axis={"tickMinStep": 1, "format": "d"})
    part.charts.append(_chart(look, x, "round"))
    if any(len(line) > 1 for label, line in by_label.items() if label not in silent):
        scale: Spec = {"scale": {"type": "log", "nice": False}, "axis": {"format": "~s", "tickCount": 4}}
        x = charts.quantity("bytes", "bytes sent so far (log scale)", **scale)
        chart = _chart(look, x, "bytes")
        for drawn in chart.spec["layer"]:
            drawn["transform"] = [{"filter": "datum.bytes > 0"}]
        tips = [charts.category("label", "method"), charts.quantity("mean", format=look.format)]
        level = {"x": None, "y": charts.quantity("mean"), "tooltip": tips}
        dotted = charts.layer("silent", "rule", level, charts.VISIBLE, strokeDash=[2, 3], strokeWidth=2)
        chart.spec["layer"].append({**dotted, "data": {"name": "silent"}})
        part.charts.append(chart)
        if silent:
            part.notes.append(f"By bytes, dotted: methods that never communicate ({named(sorted(silent))}).")
    else:
        part.left_out.append("Curves by bytes: no method communicates.")
    if any(row.get("time") is not None for row in rows):
        part.charts.append(_chart(look, charts.quantity("time", "simulated seconds"), "simulated seconds"))
    else:
        part.left_out.append("Curves by simulated seconds: the rounds have no record of them.")
    return part


def _rows(result: ExperimentResult, look: Look) -> Rows:
    rows: Rows = []
    for label, group in result.curves.dropna(subset=[look.metric]).groupby("label", sort=False):
        band = bands(group, "round", look.metric)
        by_round = group.groupby("round")
        band["bytes"] = by_round["bytes"].mean()
        if SECONDS in group:
            band["time"] = by_round[SECONDS].mean()
        for k in charts.evenly(len(band), MOST):
            line = band.iloc[k]
            row = {"label": str(label), "round": int(band.index[k]), "bytes": float(line["bytes"])}
            rows.append(row | {name: charts.number(line[name]) for name in band.columns if name != "bytes"})
    return rows


def _chart(look: Look, x: Spec, by: str) -> Chart:
    tips = [
        charts.category("label", "method"),
        charts.quantity("round"),
        charts.quantity("mean", look.name, format=look.format),
        charts.quantity("bytes", format=".3~s"),
    ]
    alt = f"{look.name} by {by}: a line for each of {named(look.labels)}."
    return Chart(x["field"], lines(look, "curves", x, tips), alt)


def lines(look: Look, data: str, x: Spec, tips: Rows) -> Spec:
    """Return a chart of lines of a `mean` with a band from `low` to `high`, one for each label that is not hidden."""
    y = charts.quantity("mean", look.name, scale={"zero": False}, axis=look.axis())
    channels = look.line()
    return charts.layers(
        data,
        charts.layer("band", "area", {"y": {**y, "field": "low"}, "y2": {"field": "high"}}, opacity=0.13),
        charts.layer(
            "line",
            "line",
            {"y": y, "strokeDash": channels["strokeDash"], "strokeWidth": charts.LIT, "tooltip": tips},
            point={"size": 18},
        ),
        encoding={"x": x, "color": channels["color"]},
        transform=charts.VISIBLE,
        height=300,
    )


def worst_clients(result: ExperimentResult, look: Look) -> PagePart:
    """Return the part with the mean of the worst k % of the clients, for every k."""
    import pandas as pd

    table: list[tuple[str, int, float]] = []
    for summary, store in result.jobs:
        scores = result.own(summary, store)[look.metric]
        values = tails(scores, PERCENTS, low=not result.lower_is_better)
        table += [(str(summary["label"]), percent, v) for percent, v in zip(PERCENTS, values, strict=True)]
    frame = pd.DataFrame(table, columns=["label", "percent", look.metric])
    rows: Rows = [
        {"label": label, "percent": percent, **{str(name): charts.number(v) for name, v in line.items()}}
        for label, group in frame.groupby("label", sort=False)
        for percent, line in bands(group, "percent", look.metric).iterrows()
    ]
    part = PagePart("worst", "The worst clients", keys=True, data={"worst": rows})
    part.notes.append(
        "The mean over the worst k % of the clients of a seed (rounded up to whole clients), of the deployed models on "
        "own test parts: at 100 % the mean over all clients. The worst clients may differ between methods. Band: 95 % "
        "confidence interval over seeds."
    )
    x = charts.quantity("percent", "worst k % of the clients")
    tips = [
        charts.category("label", "method"),
        charts.quantity("percent", "worst k %"),
        charts.quantity("mean", look.name, format=look.format),
    ]
    alt = f"Mean {look.name} of the worst k % of the clients, a line for each method."
    part.charts.append(Chart("worst", lines(look, "worst", x, tips), alt))
    return part
