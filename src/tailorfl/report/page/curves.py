"""Curves of an experiment: its metric by round, by bytes, by simulated seconds; and the worst clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tailorfl.evaluation.metrics import LOWER_IS_BETTER
from tailorfl.evaluation.seeds import interval
from tailorfl.evaluation.summary import tails
from tailorfl.report.page.look import Look, named
from tailorfl.report.page.parts import Chart, PagePart, number
from tailorfl.report.plots import BOUNDED, over_seeds
from tailorfl.runs.store import SECONDS

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult

MOST = 150
"""Points of a line, evenly chosen of more."""
PERCENTS = (*range(1, 20), *range(20, 101, 2))
"""Shares of the worst clients."""

Rows = list[dict[str, Any]]


def curves(result: ExperimentResult, look: Look) -> tuple[PagePart, dict[str, Rows], list[str]]:
    """Return the part, its data by name, and what could not be shown."""
    rows, left_out = _rows(result, look), []
    flat = [row for row in rows if not row["bytes"]]
    last = {row["label"]: row for row in flat}
    flat = [row for row in last.values() if all(r["bytes"] == 0 for r in rows if r["label"] == row["label"])]
    silent = {row["label"] for row in flat}
    data = {"curves": rows, "silent": flat}
    part = PagePart("curves", "Curves", keys=True)
    part.notes.append(
        f"Mean over clients of the {look.name} on their own test parts; band: 95 % confidence interval over seeds "
        "(none with one seed). A name in the legend hides and shows its line."
    )
    many = {row["label"] for row in rows if sum(r["label"] == row["label"] for r in rows) > 1}
    if not many:
        left_out.append("Curves: only one round was evaluated (eval.every=0).")
        return part, {}, left_out
    part.charts.append(_chart(look, "round", "round", f"{look.name} by round"))
    if many - silent:
        chart = _chart(
            look,
            "bytes",
            "bytes sent by all clients and the server so far (log scale)",
            f"{look.name} by bytes",
        )
        chart.spec["layer"][0]["transform"] = chart.spec["layer"][1]["transform"] = [
            {"filter": "datum.bytes > 0"}
        ]
        chart.spec["layer"].append(_silent(look))
        part.charts.append(chart)
        if silent:
            part.notes.append(f"By bytes, dotted: what never communicates ({named(sorted(silent))}).")
    else:
        left_out.append("Curves by bytes: no method communicates.")
    if any(row.get("time") is not None for row in rows):
        part.charts.append(_chart(look, "time", "simulated seconds", f"{look.name} by simulated seconds"))
    else:
        left_out.append("Curves by simulated seconds: the rounds have no record of them.")
    return part, data, left_out


def _rows(result: ExperimentResult, look: Look) -> Rows:
    frame = result.curves
    rows: Rows = []
    bounded = look.metric in BOUNDED
    for label, group in frame.dropna(subset=[look.metric]).groupby("label", sort=False):
        rounds, means, widths = over_seeds(group, "round", look.metric)
        by_round = group.groupby("round")
        amounts = by_round["bytes"].mean().loc[rounds].to_numpy()
        times = by_round[SECONDS].mean().loc[rounds].to_numpy() if SECONDS in group else None
        for k in np.unique(np.linspace(0, len(rounds) - 1, min(MOST, len(rounds))).round().astype(int)):
            low, high = means[k] - widths[k], means[k] + widths[k]
            row = {"label": str(label), "round": int(rounds[k]), "bytes": float(amounts[k])}
            row |= {"mean": number(means[k]), "low": number(max(low, 0.0) if bounded else low)}
            row["high"] = number(min(high, 1.0) if bounded else high)
            if times is not None:
                row["time"] = number(times[k])
            rows.append(row)
    return rows


def _chart(look: Look, key: str, title: str, alt: str) -> Chart:
    x: dict[str, Any] = {"field": key, "type": "quantitative", "title": title}
    tips = [
        {"field": "label", "type": "nominal", "title": "method"},
        {"field": "round", "type": "quantitative"},
        {"field": "mean", "type": "quantitative", "format": look.format, "title": look.name},
        {"field": "bytes", "type": "quantitative", "format": ".3~s"},
    ]
    if key == "bytes":
        x |= {"scale": {"type": "log", "nice": False}, "axis": {"format": "~s", "tickCount": 4}}
    if key == "round":
        x["axis"] = {"tickMinStep": 1, "format": "d"}
    return Chart(key, lines(look, "curves", x, tips), f"{alt}: a line for each of {named(look.labels)}.")


def lines(look: Look, data: str, x: dict[str, Any], tips: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a chart of lines of a `mean` with a band from `low` to `high`, one for each label that is not hidden."""
    y = {"field": "mean", "type": "quantitative", "title": look.name, "scale": {"zero": False}}
    y["axis"] = {"format": "%" if look.is_share else "~g"}
    lit = {"condition": {"test": "datum.label === lit", "value": 4}, "value": 2}
    return {
        "data": {"name": data},
        "params": [{"name": "lit", "value": ""}, {"name": "hidden", "value": []}],
        "transform": [{"filter": "indexof(hidden, datum.label) < 0"}],
        "height": 300,
        "encoding": {"x": x, "color": look.colour()},
        "layer": [
            {
                "name": "band",
                "mark": {"type": "area", "opacity": 0.13, "tooltip": None},
                "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}},
            },
            {
                "name": "line",
                "mark": {"type": "line", "point": {"size": 18}},
                "encoding": {"y": y, "strokeDash": look.dash(), "strokeWidth": lit, "tooltip": tips},
            },
        ],
    }


def _silent(look: Look) -> dict[str, Any]:
    tips = [
        {"field": "label", "title": "method"},
        {"field": "mean", "format": look.format, "type": "quantitative"},
    ]
    return {
        "name": "silent",
        "data": {"name": "silent"},
        "transform": [{"filter": "indexof(hidden, datum.label) < 0"}],
        "mark": {"type": "rule", "strokeDash": [2, 3], "strokeWidth": 2},
        "encoding": {"x": None, "y": {"field": "mean", "type": "quantitative"}, "tooltip": tips},
    }


def worst_clients(result: ExperimentResult, look: Look) -> tuple[PagePart, dict[str, Rows]]:
    """Return the part on the worst clients, and its data: the mean of the worst k % of the clients, for every k."""
    found: dict[str, list[list[float]]] = {}
    for summary, store in result.jobs:
        scores = result.own(summary, store)[look.metric]
        found.setdefault(str(summary["label"]), []).append(
            tails(scores, PERCENTS, low=look.metric not in LOWER_IS_BETTER)
        )
    rows: Rows = []
    for label, seeds in found.items():
        for percent, values in zip(PERCENTS, zip(*seeds, strict=True), strict=True):
            mean, width = interval(values)
            width = 0.0 if np.isnan(width) else width
            ends = (mean - width, mean + width)
            if look.metric in BOUNDED:
                ends = (max(ends[0], 0.0), min(ends[1], 1.0))
            row = {"label": label, "percent": percent, "mean": number(mean)}
            rows.append({**row, "low": number(ends[0]), "high": number(ends[1])})
    x = {"field": "percent", "type": "quantitative", "title": "worst k % of the clients"}
    tips = [
        {"field": "label", "type": "nominal", "title": "method"},
        {"field": "percent", "type": "quantitative", "title": "worst k %"},
        {"field": "mean", "type": "quantitative", "format": look.format, "title": look.name},
    ]
    part = PagePart("worst", "The worst clients", keys=True)
    part.notes.append(
        "The mean over the worst k % of the clients of a seed (rounded up to whole clients), of the deployed models on "
        "own test parts: at 100 % that of all. Which clients those are may differ between methods. Band: 95 % "
        "confidence interval over seeds."
    )
    alt = f"Mean {look.name} of the worst k % of the clients"
    part.charts.append(Chart("worst", lines(look, "worst", x, tips), f"{alt}, a line for each method."))
    return part, {"worst": rows}
