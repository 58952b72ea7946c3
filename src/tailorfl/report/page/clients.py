"""Every client as a point: what each method gives it beyond LocalTrain, the same client marked in every picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tailorfl.report.page import vega
from tailorfl.report.page.look import INK, Look
from tailorfl.report.page.parts import Chart, PagePart, Rows, Spec
from tailorfl.report.plots import COLOURS
from tailorfl.report.result import company
from tailorfl.report.tables import Cell, Table

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult
    from tailorfl.runs.store import RunStore

MOST = 600
"""Clients that are drawn, evenly chosen of more; tables count all."""
GOLDEN = 0.618033988749895
"""Multiples of it, modulo 1, keep points of neighbours apart."""
GAIN, LOSS, MARKED = COLOURS[0], COLOURS[1], COLOURS[3]


def name_of(store: RunStore, client: int) -> str:
    """Return the name of a client of a job."""
    names = store.config.get("clients") or []
    return str(names[client]) if client < len(names) else f"client {client}"


def row_id(key: tuple[int, str], client: int) -> str:
    """Return the key of a client on the page.

    It has the seed, and the experiment where several were put together.
    """
    return f"{key[0]}{key[1][:6]}/{client}"


def clients(result: ExperimentResult, look: Look) -> PagePart:
    """Return every client as a point, and how many gain and lose."""
    reference = result.reference
    rows = _rows(result, look, reference)
    part = PagePart("clients", "Every client", clients=True)
    compared = {f"m{k}": label for k, label in enumerate(look.labels) if label != reference}
    if reference is None:
        part.left_out.append(
            "Who gains and who loses: neither LocalTrain nor its average was run (methods=local)."
        )
    else:
        part.tables.append(_table(rows, look, compared, reference, -1.0 if result.lower_is_better else 1.0))
    columns = [f"m{k}" for k in range(len(look.labels))]
    valued = [row for row in rows if any(row.get(name) is not None for name in columns)]
    drawn = [valued[k] for k in vega.evenly(len(valued), MOST)]
    if not drawn:
        part.left_out.append("Clients as points: no client has the metric.")
        return part
    part.data["clients"] = drawn
    what = f"{look.name} minus that of {reference}" if reference else look.name
    part.notes.append(
        f"A point is a client of one seed: {what}, of the deployed models on its own test part. Point at a client, or "
        "choose one in the list: it is marked in every picture here, and its labels below. A click keeps the mark."
    )
    if len(drawn) < len(rows):
        part.notes.append(f"Drawn are {len(drawn):,} of {len(rows):,} clients; the table counts all.")
    if compared:
        part.charts.append(_strip(look, compared, reference, result.lower_is_better))
    if reference is not None:
        values = [row[name] for row in drawn for name in columns if row.get(name) is not None]
        scale = {"domain": [min(values), max(values)], "nice": False, "zero": False, "padding": 10}
        for name, label in compared.items():
            part.charts.append(_against(look, name, label, reference, scale, result.lower_is_better))
    return part


def _rows(result: ExperimentResult, look: Look, reference: str | None) -> Rows:
    """Return a row a client and seed: m0, m1, ... are what the methods reach on it, `local` what the reference does."""
    rows: dict[str, dict[str, Any]] = {}
    for summary, store in result.jobs:
        key, column = company(summary), f"m{look.labels.index(str(summary['label']))}"
        for record in result.own(summary, store)[["client", "samples", look.metric]].to_dict("records"):
            client = int(record["client"])
            row = rows.setdefault(row_id(key, client), {"id": row_id(key, client), "client": client})
            row |= {"name": name_of(store, client), "seed": key[0]}
            row.setdefault("samples", int(record["samples"]))
            row[column] = vega.number(float(record[look.metric]))
    for place, row in enumerate(rows.values()):
        row["jitter"] = vega.number(math.modf(GOLDEN * place)[0])
        if reference is not None:
            row["local"] = row.get(f"m{look.labels.index(reference)}")
    return list(rows.values())


def _table(rows: Rows, look: Look, compared: dict[str, str], reference: str, sign: float) -> Table:
    """How many clients gain and lose, and who most."""
    lines = []
    for column, label in compared.items():
        pairs = [row for row in rows if row.get(column) is not None and row["local"] is not None]
        if not pairs:
            continue
        changes = [row[column] - row["local"] for row in pairs]
        gains = sign * np.array(changes)
        ends = []
        for k in (int(np.argmax(gains)), int(np.argmin(gains))):
            change = look.spread(changes[k], sign="+")
            ends.append(Cell(f"{change} ({pairs[k]['name']}, seed {pairs[k]['seed']})", changes[k]))
        counts = [int(count.sum()) for count in (gains > 0, gains == 0, gains < 0)]
        median = look.cell(float(np.median(changes)), sign="+")
        lines.append([label, *(Cell(str(count), count) for count in counts), median, *ends])
    head = ("Method", "gain", "equal", "lose", "median change", "best change", "worst change")
    return Table.of(f"Clients of all seeds that are better and worse off than with {reference}", head, lines)


def _tips(look: Look, field: str, reference: str | None) -> Rows:
    tips = [vega.category("name", "client"), vega.category("seed"), vega.quantity("samples", "test samples")]
    tips.append(vega.quantity(field, look.name, format=look.format))
    return [*tips, vega.quantity("local", reference, format=look.format)] if reference is not None else tips


def _sided(change: str, lower_is_better: bool) -> Spec:
    """Blue for who gains, orange for who loses."""
    gains = {"test": f"{change} {'<' if lower_is_better else '>'} 0", "value": GAIN}
    return {"condition": [gains, {"test": f"{change} === 0", "value": "#888"}], "value": LOSS}


def _strip(look: Look, compared: dict[str, str], reference: str | None, lower_is_better: bool) -> Chart:
    """Return a row a method, and in it the clients at what they gain; the marked client is a line through all rows."""
    title = f"{look.name}, difference to {reference}" if reference else look.name
    scale = {"zero": reference is not None, "nice": False, "padding": 10}
    x = vega.quantity("gain", vega.folded(title, 28), axis=look.axis(tickCount=8), scale=scale)
    lines = {label: vega.folded(label) for label in compared.values()}
    axis = {"labelExpr": "lines[datum.label]", "labelLimit": 0}
    y = vega.category("label", sort=list(lines), axis=axis) | {"title": None}
    points = {
        "yOffset": vega.quantity("jitter", scale={"domain": [-0.15, 1.15]}),
        "color": _sided("datum.gain", lower_is_better) if reference else {"value": GAIN},
        "tooltip": _tips(look, "value", reference),
    }
    operations = [{"op": op, "field": "gain", "as": op} for op in ("q1", "median", "q3")]
    quartiles = [{"aggregate": operations, "groupby": ["label"]}]
    ends, middle = {"x": {**x, "field": "q1"}, "x2": {"field": "q3"}}, {"x": {**x, "field": "median"}}
    ring = {"size": 140, "color": MARKED}
    zero = vega.layer("zero", "rule", {"x": {"datum": 0}, "y": None}, color=INK, strokeDash=[2, 2])
    spec = vega.layers(
        "clients",
        *([zero] if reference else []),
        vega.layer("points", "circle", points, size=26, opacity=0.65),
        vega.layer("quartiles", "rule", ends, quartiles, strokeWidth=3, color=INK),
        vega.layer("median", "tick", middle, quartiles, thickness=3, size=24, color=INK),
        vega.layer("shown", "line", {"order": {"field": "key"}}, vega.SHOWN, color=MARKED, point=ring),
        encoding={"x": x, "y": y},
        params=[{"name": "labels", "value": compared}, {"name": "lines", "value": lines}],
        transform=[
            {"fold": list(compared), "as": ["key", "value"]},
            {"calculate": "labels[datum.key]", "as": "label"},
            {"filter": "isValid(datum.value)" + (" && isValid(datum.local)" if reference else "")},
            {"calculate": "datum.value - datum.local" if reference else "datum.value", "as": "gain"},
        ],
        height={"step": max(46, 16 * max(map(len, lines.values())))},
    )
    what = f"change against {reference}" if reference else look.name
    alt = f"Every client at its {what}, a row for each method; line: quartiles, tick: median."
    return Chart("gains", spec, alt)


def _against(look: Look, name: str, label: str, reference: str, scale: Spec, lower_is_better: bool) -> Chart:
    """Clients at what the reference gives them and what a method gives them: above the diagonal they gain."""
    axis = look.axis(tickCount=4)
    diagonal = {"data": {"values": [{"local": end, name: end} for end in scale["domain"]]}}
    points = {
        "color": _sided(f"(datum.{name} - datum.local)", lower_is_better),
        "tooltip": _tips(look, name, reference),
    }
    both = [{"filter": f"isValid(datum.local) && isValid(datum.{name})"}]
    spec = vega.layers(
        "clients",
        {**vega.layer("equal", "line", {}, color=INK, strokeWidth=1, strokeDash=[2, 2]), **diagonal},
        vega.layer("points", "circle", points, both, size=30, opacity=0.65),
        vega.layer("shown", "point", {}, vega.SHOWN, size=170, strokeWidth=3, filled=False, color=MARKED),
        encoding={
            "x": vega.quantity("local", vega.folded(reference), scale=scale, axis=axis),
            "y": vega.quantity(name, vega.folded(label), scale=scale, axis=axis),
        },
        height=230,
    )
    alt = f"{look.name} of every client with {label} against that with {reference}; above the line clients gain."
    return Chart(f"against-{name[1:]}", spec, alt, is_small=True)
