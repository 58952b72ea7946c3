"""Every client as a point: what each method gives it beyond LocalTrain, the same client marked in every picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tailorfl.evaluation.metrics import LOWER_IS_BETTER
from tailorfl.report.page.look import INK, Look
from tailorfl.report.page.parts import Cell, Chart, PagePart, Table, number
from tailorfl.report.plots import COLOURS
from tailorfl.report.result import REFERENCES, company

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult
    from tailorfl.runs.store import RunStore

MOST = 600
"""Clients that are drawn, evenly chosen of more; tables count all."""
GOLDEN = 0.618033988749895
"""Multiples of it, modulo 1, keep points of neighbours apart."""
GAIN, LOSS = COLOURS[0], COLOURS[1]

LEVEL = {"type": "line", "color": INK, "strokeWidth": 1, "strokeDash": [2, 2], "tooltip": None}
RING = {"type": "point", "size": 170, "strokeWidth": 3, "filled": False, "tooltip": None}

Rows = list[dict[str, Any]]


def name_of(store: RunStore, client: int) -> str:
    """Return the name of a client of a job."""
    names = store.config.get("clients") or []
    return str(names[client]) if client < len(names) else f"client {client}"


def row_id(key: tuple[int, str], client: int) -> str:
    """Return the key of a client on the page.

    It has the seed, and the experiment where several were put together.
    """
    return f"{key[0]}{key[1][:6]}/{client}"


def clients(result: ExperimentResult, look: Look) -> tuple[PagePart, dict[str, Rows], list[str]]:
    """Return the part, its data by name, and what could not be shown."""
    rows, reference = _rows(result, look)
    part, left_out = PagePart("clients", "Every client", clients=True), []
    shown = [str(k) for k in range(len(look.labels)) if look.labels[k] != reference]
    if reference is None:
        left_out.append(
            "Who gains and who loses: neither LocalTrain nor its average was run (methods=local)."
        )
    else:
        part.tables.append(_table(rows, look, reference))
    drawn = _thinned(rows)
    if not drawn:
        return part, {}, [*left_out, "Clients as points: no client has the metric."]
    what = f"{look.name} minus that of {reference}" if reference else look.name
    part.notes.append(
        f"A point is a client of one seed: {what}, of the deployed models on its own test part. Point at a client, or "
        "choose one in the list: it is marked in every picture here, and its labels below. A click keeps the mark."
    )
    if len(drawn) < len(rows):
        part.notes.append(f"Drawn are {len(drawn):,} of {len(rows):,} clients; the table counts all.")
    if shown:
        part.charts.append(_strip(look, shown, reference))
    values = [v for row in drawn for k in range(len(look.labels)) if (v := row.get(f"m{k}")) is not None]
    if reference is not None and values:
        ends = (min(values), max(values))
        part.charts += [_against(look, k, reference, ends) for k in shown]
    return part, {"clients": drawn}, left_out


def _rows(result: ExperimentResult, look: Look) -> tuple[Rows, str | None]:
    """Return a row a client and seed, m0, m1, ...

    Being what the methods reach on it; and the label of the reference.
    """
    rows: dict[str, dict[str, Any]] = {}
    reference = next((str(s["label"]) for s, _ in result.jobs if s["method"] in REFERENCES), None)
    for summary, store in result.jobs:
        key, column = company(summary), f"m{look.labels.index(str(summary['label']))}"
        for row in result.own(summary, store)[["client", "samples", look.metric]].to_dict("records"):
            at, client = row_id(key, int(row["client"])), int(row["client"])
            fresh = {"id": at, "client": client, "name": name_of(store, client), "seed": key[0]}
            held = rows.setdefault(at, {**fresh, "samples": int(row["samples"])})
            held[column] = number(float(row[look.metric]))
    for place, held in enumerate(rows.values()):
        held["jitter"] = number(math.modf(GOLDEN * place)[0])
        if reference is not None:
            held["local"] = held.get(f"m{look.labels.index(reference)}")
    return list(rows.values()), reference


def _thinned(rows: Rows) -> Rows:
    known = [
        row
        for row in rows
        if any(key[0] == "m" and key[1:].isdigit() and row[key] is not None for key in row)
    ]
    places = np.unique(np.linspace(0, len(known) - 1, min(MOST, len(known))).round().astype(int))
    return [known[k] for k in places]


def _table(rows: Rows, look: Look, reference: str) -> Table:
    """How many clients gain and lose, and who most."""
    sign = -1.0 if look.metric in LOWER_IS_BETTER else 1.0
    lines = []
    for k, label in enumerate(look.labels):
        if label == reference:
            continue
        pairs = [(row[f"m{k}"], row["local"], row) for row in rows if row.get(f"m{k}") is not None]
        changes = [(own - local, row) for own, local, row in pairs if local is not None]
        if not changes:
            continue
        gains = [sign * change for change, _ in changes]
        best, worst = int(np.argmax(gains)), int(np.argmin(gains))
        counts = [sum(g > 0 for g in gains), sum(g == 0 for g in gains), sum(g < 0 for g in gains)]
        ends = [
            Cell(
                f"{look.text(changes[p][0], sign=True)} ({changes[p][1]['name']}, seed {changes[p][1]['seed']})",
                changes[p][0],
            )
            for p in (best, worst)
        ]
        median = float(np.median([change for change, _ in changes]))
        lines.append(
            [Cell(label), *(Cell(str(c), c) for c in counts), Cell(look.text(median, True), median), *ends]
        )
    head = ("Method", "gain", "equal", "lose", f"median change{look.unit}", "best change", "worst change")
    return Table(f"Clients of all seeds that are better and worse off than with {reference}", head, lines)


def _tips(look: Look, field: str, reference: str | None) -> list[dict[str, Any]]:
    tips: list[dict[str, Any]] = [
        {"field": "name", "type": "nominal", "title": "client"},
        {"field": "seed", "type": "nominal"},
        {"field": "samples", "type": "quantitative", "title": "test samples"},
        {"field": field, "type": "quantitative", "format": look.format, "title": look.name},
    ]
    local = {"field": "local", "type": "quantitative", "format": look.format, "title": str(reference)}
    return [*tips, local] if reference is not None else tips


def _sided(look: Look, test: str) -> dict[str, Any]:
    """Blue for who gains, orange for who loses."""
    better = "<" if look.metric in LOWER_IS_BETTER else ">"
    return {"condition": [{"test": f"{test} {better} 0", "value": GAIN}, {"test": f"{test} === 0", "value": "#888"}],
            "value": LOSS}  # fmt: skip


def _strip(look: Look, shown: list[str], reference: str | None) -> Chart:
    """Return a row a method, and in it the clients at what they gain; the marked client is a line through all rows."""
    labels = {f"m{k}": look.labels[int(k)] for k in shown}
    x = {
        "field": "gain",
        "type": "quantitative",
        "axis": {"format": "%" if look.is_share else "~g", "tickCount": 8},
        "scale": {"zero": reference is not None, "nice": False, "padding": 10},
    }
    x["title"] = f"{look.name}, difference to {reference}" if reference else look.name
    y = {
        "field": "label",
        "type": "nominal",
        "title": None,
        "sort": list(labels.values()),
        "axis": {"labelLimit": 110},
    }
    change = "datum.value - datum.local" if reference else "datum.value"
    fold: list[dict[str, Any]] = [
        {"fold": list(labels), "as": ["key", "value"]},
        {"calculate": "labels[datum.key]", "as": "label"},
        {"filter": "isValid(datum.value)" + (" && isValid(datum.local)" if reference else "")},
        {"calculate": change, "as": "gain"},
    ]
    spec: dict[str, Any] = {
        "data": {"name": "clients"},
        "params": [{"name": "shown", "value": ""}, {"name": "labels", "value": labels}],
        "transform": fold,
        "height": {"step": 46},
        "encoding": {"x": x, "y": y},
        "layer": [
            {
                "name": "points",
                "mark": {"type": "circle", "size": 26, "opacity": 0.65},
                "encoding": {
                    "yOffset": {"field": "jitter", "type": "quantitative", "scale": {"domain": [-0.15, 1.15]}},
                    "color": _sided(look, "datum.gain") if reference else {"value": GAIN},
                    "tooltip": _tips(look, "value", reference),
                },
            },
            {
                "name": "quartiles",
                "transform": [{"aggregate": [{"op": op, "field": "gain", "as": op} for op in ("q1", "median", "q3")],
                               "groupby": ["label"]}],
                "mark": {"type": "rule", "strokeWidth": 3, "color": INK, "tooltip": None},
                "encoding": {"x": {**x, "field": "q1"}, "x2": {"field": "q3"}},
            },
            {
                "name": "median",
                "transform": [{"aggregate": [{"op": "median", "field": "gain", "as": "median"}], "groupby": ["label"]}],
                "mark": {"type": "tick", "thickness": 3, "size": 24, "color": INK, "tooltip": None},
                "encoding": {"x": {**x, "field": "median"}},
            },
            {
                "name": "shown",
                "transform": [{"filter": "datum.id === shown"}],
                "mark": {"type": "line", "color": COLOURS[3], "point": {"size": 140, "color": COLOURS[3]},
                         "tooltip": None},
                "encoding": {"order": {"field": "key"}},
            },
        ],
    }  # fmt: skip
    if reference:
        zero = {
            "mark": {"type": "rule", "color": INK, "strokeDash": [2, 2], "tooltip": None},
            "encoding": {"x": {"datum": 0}, "y": None},
        }
        spec["layer"].insert(0, {"name": "zero", **zero})
    alt = (
        "Every client at its change against " + reference if reference else f"Every client at its {look.name}"
    )
    return Chart("gains", spec, f"{alt}, a row for each method; line: quartiles, tick: median.")


def _against(look: Look, k: str, reference: str, ends: tuple[float, float]) -> Chart:
    """Clients at what the reference gives them and what a method gives them: above the diagonal they gain."""
    scale = {"domain": list(ends), "nice": False, "zero": False, "padding": 10}
    axis = {"format": "%" if look.is_share else "~g", "tickCount": 4}
    label = look.labels[int(k)]
    encoding = {
        "x": {"field": "local", "type": "quantitative", "title": reference, "scale": scale, "axis": axis},
        "y": {"field": f"m{k}", "type": "quantitative", "title": label, "scale": scale, "axis": axis},
    }
    diagonal = {"values": [{"local": end, f"m{k}": end} for end in ends]}
    spec: dict[str, Any] = {
        "data": {"name": "clients"},
        "params": [{"name": "shown", "value": ""}],
        "height": 230,
        "encoding": encoding,
        "layer": [
            {"name": "equal", "data": diagonal, "mark": LEVEL},
            {
                "name": "points",
                "transform": [{"filter": f"isValid(datum.local) && isValid(datum.m{k})"}],
                "mark": {"type": "circle", "size": 30, "opacity": 0.65},
                "encoding": {
                    "color": _sided(look, f"(datum.m{k} - datum.local)"),
                    "tooltip": _tips(look, f"m{k}", reference),
                },
            },
            {
                "name": "shown",
                "transform": [{"filter": "datum.id === shown"}],
                "mark": {**RING, "color": COLOURS[3]},
            },
        ],
    }  # fmt: skip
    alt = f"{look.name} of every client with {label} against that with {reference}; above the line clients gain."
    return Chart(f"against-{k}", spec, alt, is_small=True)
