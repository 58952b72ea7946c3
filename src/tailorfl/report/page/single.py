"""What single clients have, as a table, and whether their probabilities can be believed, as reliability diagrams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tailorfl.evaluation.calibration import BINS, Reliability, probabilities
from tailorfl.evaluation.predictions import Predictions
from tailorfl.printable import quoted
from tailorfl.report.clients import ClientReport, clients_of
from tailorfl.report.page.look import INK, Look
from tailorfl.report.page.parts import Cell, Chart, PagePart, Table, number
from tailorfl.runs.prediction_log import TASKS, load_predictions

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult

MOST_LINES = 400
"""Clients times methods up to which the table is made."""
MOST_SAMPLES = 30_000
"""Test samples times methods up to which it is: resampling takes some seconds for so many."""
MOST_CHARTS = 12
"""Clients that have a diagram of their own, the ones with most test samples first."""
IN_A_BIN = 10
"""Samples that a bin of a diagram has at least, so that its accuracy means something."""

Rows = list[dict[str, Any]]


def single_clients(result: ExperimentResult, look: Look) -> tuple[list[PagePart], dict[str, Rows], list[str]]:
    """Return the parts, the data of their charts, and what could not be shown."""
    what = "Single clients with intervals"
    seed = min(int(summary["seed"]) for summary, _ in result.jobs)
    jobs = [(summary, store) for summary, store in result.jobs if summary["seed"] == seed]
    if len({str(summary["label"]) for summary, _ in jobs}) < len(jobs):
        return [], {}, [f"{what}: folders were put together whose jobs have the same labels and seeds."]
    said = {
        str(s["label"]): found for s, store in jobs if (found := load_predictions(store.path)) is not None
    }
    if not said:
        return [], {}, [f"{what}: predictions of test samples were not kept (eval.predictions)."]
    lines = sum(len(np.unique(one.client)) for one in said.values())
    if lines > MOST_LINES or sum(len(one.y) for one in said.values()) > MOST_SAMPLES:
        return [], {}, [f"{what}: too many for a page; tailorfl gains {quoted(result.path)} prints them."]
    clients = clients_of(result, seed)
    part = PagePart("single", "Single clients", clients.notes, [_table(clients)])
    of_classes = {label: one for label, one in said.items() if one.task in TASKS}
    if not of_classes:
        return [part], {}, ["Reliability diagrams: the task has no classes."]
    diagrams, data = _diagrams(clients, of_classes, look)
    return [part, diagrams], data, []


def _table(clients: ClientReport) -> Table:
    rows = []
    for line in clients.lines:
        calibration = (line.ece, line.ece_by_chance, line.temperature, line.ece_calibrated)
        values = (None, None, line.samples, line.value, line.gain, *calibration)
        beyond = line.gain_interval is not None and line.gain_interval.leaves_out_zero
        texts = clients.cells(line)
        rows.append(
            [Cell(text, v, beyond and k == 4) for k, (text, v) in enumerate(zip(texts, values, strict=False))]
        )
    title = f"Every client by its name: {clients.look.name} of its test part{clients.look.unit}, seed {clients.seed}"
    return Table(title, clients.head, rows)


def _diagrams(
    clients: ClientReport, said: dict[str, Predictions], look: Look
) -> tuple[PagePart, dict[str, Rows]]:
    part = PagePart("reliability", "Can the probabilities be believed?", keys=True)
    part.notes.append(
        "Samples ordered by the probability of the predicted class and cut into bins of equally many (15 at most, of "
        f"{IN_A_BIN} samples at least): how sure the model is, and how often it is right. Below the line it is too "
        f"sure. First all clients' test samples together, then the clients with at least {2 * IN_A_BIN} of them; seed "
        f"{clients.seed}, without temperatures."
    )
    first = next(iter(said.values()))
    ids, counts = np.unique(first.client, return_counts=True)
    order = sorted(zip(-counts, ids, strict=True))[:MOST_CHARTS]
    names = {line.client: line.name for line in clients.lines}
    data: dict[str, Rows] = {"reliability": _rows(said)}
    part.charts.append(_chart("reliability", look, "Reliability of all clients' test samples together"))
    for negative, client in order:
        if -negative < 2 * IN_A_BIN or len(ids) == 1:
            continue
        key = f"reliability-{client}"
        data[key] = _rows({label: one.of(int(client)) for label, one in said.items()})
        part.charts.append(
            _chart(key, look, f"{names[int(client)]}, {-negative} test samples", is_small=True)
        )
    return part, data


def _rows(said: dict[str, Predictions]) -> Rows:
    rows: Rows = []
    for label, one in said.items():
        p, y = probabilities(one.task, one.outputs), one.y.ravel().astype(np.int64)
        bins = Reliability.of(p, y, max(1, min(BINS, len(y) // IN_A_BIN)))
        rows += [
            {"label": label, "sure": number(c), "right": number(a), "samples": int(n)}
            for n, c, a in zip(bins.samples, bins.confidence, bins.accuracy, strict=True)
        ]
    return rows


def _chart(name: str, look: Look, alt: str, *, is_small: bool = False) -> Chart:
    axis = {"format": "%", "tickCount": 4 if is_small else 6}
    scale = {"zero": False, "nice": False, "padding": 8}
    x = {"field": "sure", "type": "quantitative", "title": "mean probability", "axis": axis, "scale": scale}
    y = {**x, "field": "right", "title": "right"}
    tips = [
        {"field": "label", "type": "nominal", "title": "method"},
        {"field": "sure", "type": "quantitative", "format": ".1%", "title": "mean probability"},
        {"field": "right", "type": "quantitative", "format": ".1%"},
        {"field": "samples", "type": "quantitative"},
    ]
    lit = {"condition": {"test": "datum.label === lit", "value": 4}, "value": 2}
    spec: dict[str, Any] = {
        "data": {"name": name},
        "params": [{"name": "lit", "value": ""}, {"name": "hidden", "value": []}],
        "height": 180 if is_small else 320,
        "layer": [
            {
                "name": "true",
                "mark": {
                    "type": "line",
                    "color": INK,
                    "strokeWidth": 1,
                    "strokeDash": [2, 2],
                    "tooltip": None,
                },
                "encoding": {"x": x, "y": {**y, "field": "sure"}},
            },
            {
                "name": "line",
                "transform": [{"filter": "indexof(hidden, datum.label) < 0"}],
                "mark": {"type": "line", "point": {"size": 30}},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": look.colour(),
                    "strokeDash": look.dash(),
                    "strokeWidth": lit,
                    "tooltip": tips,
                },
            },
        ],
    }
    return Chart(
        name, spec, f"{alt}: a line for each method; dashed: as often right as it is sure.", is_small
    )
