"""Clients on a page: their gains, their labels, and results of single clients.

Every client is a point at its gain over LocalTrain with a method, and a chosen client is marked in every picture. A
heat map shows the labels of clients (rows) by class (columns). A table of single clients has intervals, and
reliability diagrams show whether their probabilities are calibrated.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tailorfl.evaluation.calibration import BINS, Reliability, probabilities
from tailorfl.evaluation.predictions import Predictions
from tailorfl.printable import quoted
from tailorfl.report.clients import ClientReport, clients_of, name_of
from tailorfl.report.page import charts
from tailorfl.report.page.charts import INK, Chart, Look, PagePart, Rows, Spec
from tailorfl.report.plots import COLOURS
from tailorfl.report.result import company
from tailorfl.report.tables import Cell, Table
from tailorfl.runs.records import TASKS, load_predictions

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult

MOST_POINTS = 600
"""Largest number of drawn clients, evenly chosen from more; tables count all."""
GOLDEN = 0.618033988749895
"""Multiples of it, modulo 1, keep neighbouring points apart."""
GAIN, LOSS, MARKED = COLOURS[0], COLOURS[1], COLOURS[3]
MOST_ROWS = 100
"""Largest number of clients in the heat map, evenly chosen from more."""
MOST_LINES = 400
"""Largest number of clients times methods for the table of single clients."""
MOST_SAMPLES = 30_000
"""Largest number of test samples times methods for it: resampling that many takes some seconds."""
MOST_CHARTS = 12
"""Largest number of clients with their own diagram, those with most test samples first."""
IN_A_BIN = 10
"""Fewest samples in a bin of a diagram, so that its accuracy is meaningful."""


def row_id(key: tuple[int, str], client: int) -> str:
    """Return the key of a client on the page.

    It contains the seed, and in merged results the experiment.
    """
    return f"{key[0]}{key[1][:6]}/{client}"


def clients(result: ExperimentResult, look: Look) -> PagePart:
    """Return the part with every client as a point, and the numbers of clients that gain and lose."""
    reference = result.reference
    rows = _points(result, look, reference)
    part = PagePart("clients", "Every client", clients=True)
    compared = {f"m{k}": label for k, label in enumerate(look.labels) if label != reference}
    if reference is None:
        part.left_out.append(
            "Who gains and who loses: neither LocalTrain nor its average was run (methods=local)."
        )
    else:
        part.tables.append(_gains(rows, look, compared, reference, -1.0 if result.lower_is_better else 1.0))
    columns = [f"m{k}" for k in range(len(look.labels))]
    valued = [row for row in rows if any(row.get(name) is not None for name in columns)]
    drawn = [valued[k] for k in charts.evenly(len(valued), MOST_POINTS)]
    if not drawn:
        part.left_out.append("Clients as points: no client has the metric.")
        return part
    part.data["clients"] = drawn
    what = f"{look.name} minus that of {reference}" if reference else look.name
    part.notes.append(
        f"A point is a client of one seed: {what}, of the deployed models on its own test part. Point at a client, or "
        "choose one in the list, to mark it in every picture here, and its labels below. A click keeps the mark."
    )
    if len(drawn) < len(rows):
        part.notes.append(f"The pictures show {len(drawn):,} of {len(rows):,} points; the table counts all.")
    if compared:
        part.charts.append(_strip(look, compared, reference, result.lower_is_better))
    if reference is not None:
        values = [row[name] for row in drawn for name in columns if row.get(name) is not None]
        scale = {"domain": [min(values), max(values)], "nice": False, "zero": False, "padding": 10}
        for name, label in compared.items():
            part.charts.append(_against(look, name, label, reference, scale, result.lower_is_better))
    return part


def _points(result: ExperimentResult, look: Look, reference: str | None) -> Rows:
    """Return a row per client and seed: m0, m1, ... are the metrics of the methods, `local` that of the reference."""
    rows: dict[str, dict[str, Any]] = {}
    for summary, store in result.jobs:
        key, column = company(summary), f"m{look.labels.index(str(summary['label']))}"
        names = store.config.get("clients") or ()
        for record in result.own(summary, store)[["client", "samples", look.metric]].to_dict("records"):
            client = int(record["client"])
            row = rows.setdefault(row_id(key, client), {"id": row_id(key, client), "client": client})
            row |= {"name": name_of(names, client), "seed": key[0]}
            row.setdefault("samples", int(record["samples"]))
            row[column] = charts.number(float(record[look.metric]))
    for place, row in enumerate(rows.values()):
        row["jitter"] = charts.number(math.modf(GOLDEN * place)[0])
        if reference is not None:
            row["local"] = row.get(f"m{look.labels.index(reference)}")
    return list(rows.values())


def _gains(rows: Rows, look: Look, compared: dict[str, str], reference: str, sign: float) -> Table:
    """Return the table of numbers of clients that gain and lose, and of the largest changes."""
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
    tips = [
        charts.category("name", "client"),
        charts.category("seed"),
        charts.quantity("samples", "test samples"),
    ]
    tips.append(charts.quantity(field, look.name, format=look.format))
    return [*tips, charts.quantity("local", reference, format=look.format)] if reference is not None else tips


def _sided(change: str, lower_is_better: bool) -> Spec:
    """Return the colour of clients: blue for gains, orange for losses, grey for no change."""
    gains = {"test": f"{change} {'<' if lower_is_better else '>'} 0", "value": GAIN}
    return {"condition": [gains, {"test": f"{change} === 0", "value": "#888"}], "value": LOSS}


def _strip(look: Look, compared: dict[str, str], reference: str | None, lower_is_better: bool) -> Chart:
    """Return a chart with a row per method and clients at their gains; the marked client is a line through all rows."""
    title = f"{look.name}, difference to {reference}" if reference else look.name
    scale = {"zero": reference is not None, "nice": False, "padding": 10}
    x = charts.quantity("gain", charts.folded(title, 28), axis=look.axis(tickCount=8), scale=scale)
    lines = {label: charts.folded(label) for label in compared.values()}
    axis = {"labelExpr": "lines[datum.label]", "labelLimit": 0}
    y = charts.category("label", sort=list(lines), axis=axis) | {"title": None}
    points = {
        "yOffset": charts.quantity("jitter", scale={"domain": [-0.15, 1.15]}),
        "color": _sided("datum.gain", lower_is_better) if reference else {"value": GAIN},
        "tooltip": _tips(look, "value", reference),
    }
    operations = [{"op": op, "field": "gain", "as": op} for op in ("q1", "median", "q3")]
    quartiles = [{"aggregate": operations, "groupby": ["label"]}]
    ends, middle = {"x": {**x, "field": "q1"}, "x2": {"field": "q3"}}, {"x": {**x, "field": "median"}}
    ring = {"size": 140, "color": MARKED}
    zero = charts.layer("zero", "rule", {"x": {"datum": 0}, "y": None}, color=INK, strokeDash=[2, 2])
    spec = charts.layers(
        "clients",
        *([zero] if reference else []),
        charts.layer("points", "circle", points, size=26, opacity=0.65),
        charts.layer("quartiles", "rule", ends, quartiles, strokeWidth=3, color=INK),
        charts.layer("median", "tick", middle, quartiles, thickness=3, size=24, color=INK),
        charts.layer("shown", "line", {"order": {"field": "key"}}, charts.SHOWN, color=MARKED, point=ring),
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
    """Return a chart of clients by their metric with the reference (x) and with a method (y)."""
    axis = look.axis(tickCount=4)
    diagonal = {"data": {"values": [{"local": end, name: end} for end in scale["domain"]]}}
    points = {
        "color": _sided(f"(datum.{name} - datum.local)", lower_is_better),
        "tooltip": _tips(look, name, reference),
    }
    both = [{"filter": f"isValid(datum.local) && isValid(datum.{name})"}]
    spec = charts.layers(
        "clients",
        {**charts.layer("equal", "line", {}, color=INK, strokeWidth=1, strokeDash=[2, 2]), **diagonal},
        charts.layer("points", "circle", points, both, size=30, opacity=0.65),
        charts.layer("shown", "point", {}, charts.SHOWN, size=170, strokeWidth=3, filled=False, color=MARKED),
        encoding={
            "x": charts.quantity("local", charts.folded(reference), scale=scale, axis=axis),
            "y": charts.quantity(name, charts.folded(label), scale=scale, axis=axis),
        },
        height=230,
    )
    side = "below" if lower_is_better else "above"
    alt = f"{look.name} of every client with {label} against that with {reference}; clients {side} the line gain."
    return Chart(f"against-{name[1:]}", spec, alt, is_small=True)


def labels(result: ExperimentResult, look: Look) -> PagePart:
    """Return the part with the training samples of every client by class, as a heat map."""
    part = PagePart("labels", "Labels of the clients")
    summary, store = result.jobs[0]
    config = store.config
    table = config.get("labels")
    if not table:
        part.left_out.append(
            "Labels of the clients: the runs have no record of them (no classes, private, too many, or older)."
        )
        return part
    counts, classes = np.asarray(table["counts"], dtype=np.int64), [str(name) for name in table["classes"]]
    chosen, names = charts.evenly(len(counts), MOST_ROWS), config.get("clients") or ()
    for client in chosen:
        total = int(counts[client].sum())
        row = {"id": row_id(company(summary), client), "name": name_of(names, client), "client": client}
        part.data.setdefault("labels", []).extend(
            {**row, "class": name, "count": count, "share": charts.number(count / max(total, 1)), "of": total}
            for name, count in zip(classes, counts[client].tolist(), strict=True)
        )
    part.notes.append(
        f"Training samples of each client (row) by class (column), with seed {summary['seed']}; colour: the "
        "share of the client's samples. The client that is marked above is framed."
    )
    if len(chosen) < len(counts):
        part.notes.append(f"The picture shows {len(chosen)} of {len(counts):,} clients.")
    part.charts.append(_heat_map(classes, len(chosen)))
    return part


def _heat_map(classes: list[str], clients: int) -> Chart:
    few = clients <= 45
    tips = [
        charts.category("name", "client"),
        charts.category("class"),
        charts.quantity("count", "samples"),
        charts.quantity("of", "of all its"),
    ]
    legend = {
        "title": "share of the client's samples",
        "format": ".0%",
        "orient": "top",
        "gradientLength": 160,
    }
    colour = charts.quantity("share", scale={"scheme": "viridis", "domain": [0, 1]}, legend=legend)
    frame = {"fill": None, "stroke": COLOURS[1], "strokeWidth": 2.5}
    spec = charts.layers(
        "labels",
        charts.layer("cells", "rect", {"color": colour, "tooltip": tips}),
        charts.layer("shown", "rect", {}, charts.SHOWN, **frame),
        encoding={
            "x": charts.category("class", "class", sort=classes, axis={"labelOverlap": True}),
            "y": {
                **charts.quantity("client", "client", axis={"labels": few, "ticks": few}),
                "type": "ordinal",
            },
        },
        height={"step": max(4, min(16, 700 // clients))},
    )
    alt = f"Share of each of {len(classes)} classes in the training samples of {clients} clients."
    return Chart("labels", spec, alt)


def single_clients(result: ExperimentResult, look: Look) -> list[PagePart]:
    """Return the table of single clients, and their reliability diagrams if the task has classes."""
    what, part = "Single clients with intervals", PagePart("single", "Single clients", folded=True)
    seed = min(int(summary["seed"]) for summary in result.summaries)
    predictions = {
        str(summary["label"]): values
        for summary, store in result.jobs
        if summary["seed"] == seed and (values := load_predictions(store.path)) is not None
    }
    lines = sum(len(np.unique(values.client)) for values in predictions.values())
    if not predictions:
        part.left_out = [f"{what}: predictions of test samples were not kept (eval.predictions)."]
    elif lines > MOST_LINES or sum(len(values.y) for values in predictions.values()) > MOST_SAMPLES:
        part.left_out = [f"{what}: too many for a page; tailorfl gains {quoted(result.path)} prints them."]
    if part.left_out:
        return [part]
    report = clients_of(result, seed)
    title = f"Every client by its name: {look.name} of its test part{look.unit}, seed {seed}"
    table = report.table
    part.notes, part.tables = report.notes, [table.pick(range(len(table.head)), title)]
    of_classes = {label: values for label, values in predictions.items() if values.task in TASKS}
    if not of_classes:
        part.left_out.append("Reliability diagrams: the task has no classes.")
        return [part]
    return [part, _diagrams(report, of_classes, look)]


def _diagrams(report: ClientReport, predictions: dict[str, Predictions], look: Look) -> PagePart:
    part = PagePart("reliability", "Can the probabilities be believed?", keys=True)
    part.notes.append(
        "Samples are sorted by the probability of the predicted class and split into bins of equal size (at most 15, "
        f"of at least {IN_A_BIN} samples): how sure the model is, and how often it is right. Below the line it is too "
        f"sure. First all clients' test samples together, then the clients with at least {2 * IN_A_BIN} of them; seed "
        f"{report.seed}, without temperatures."
    )
    part.data["reliability"] = _bins(predictions)
    part.charts.append(_reliability("reliability", look, "Reliability of all clients' test samples together"))
    ids, counts = np.unique(next(iter(predictions.values())).client, return_counts=True)
    names = {line.client: line.name for line in report.lines}
    for negative, client in sorted(zip((-counts).tolist(), ids.tolist(), strict=True))[:MOST_CHARTS]:
        if -negative < 2 * IN_A_BIN or len(ids) == 1:
            continue
        key = f"reliability-{client}"
        part.data[key] = _bins({label: values.of(client) for label, values in predictions.items()})
        part.charts.append(
            _reliability(key, look, f"{names[client]}, {-negative} test samples", is_small=True)
        )
    return part


def _bins(predictions: dict[str, Predictions]) -> Rows:
    rows: Rows = []
    for label, values in predictions.items():
        p, y = probabilities(values.task, values.outputs), values.y.ravel().astype(np.int64)
        bins = Reliability.of(p, y, max(1, min(BINS, len(y) // IN_A_BIN)))
        rows += [
            {"label": label, "sure": charts.number(c), "right": charts.number(a), "samples": int(n)}
            for n, c, a in zip(bins.samples, bins.confidence, bins.accuracy, strict=True)
        ]
    return rows


def _reliability(name: str, look: Look, alt: str, *, is_small: bool = False) -> Chart:
    common: dict[str, Any] = {
        "axis": {"format": "%", "tickCount": 4 if is_small else 6},
        "scale": {"zero": False, "nice": False, "padding": 8},
    }
    x, y = charts.quantity("sure", "mean probability", **common), charts.quantity("right", "right", **common)
    tips = [
        charts.category("label", "method"),
        charts.quantity("sure", "mean probability", format=".1%"),
        charts.quantity("right", format=".1%"),
        charts.quantity("samples"),
    ]
    dashed: Any = {"color": INK, "strokeWidth": 1, "strokeDash": [2, 2]}
    channels = {"x": x, "y": y, **look.line(), "strokeWidth": charts.LIT, "tooltip": tips}
    spec = charts.layers(
        name,
        charts.layer("true", "line", {"x": x, "y": {**y, "field": "sure"}}, **dashed),
        charts.layer("line", "line", channels, charts.VISIBLE, point={"size": 30}),
        height=180 if is_small else 320,
    )
    return Chart(
        name, spec, f"{alt}: a line for each method; dashed: as often right as it is sure.", is_small
    )
