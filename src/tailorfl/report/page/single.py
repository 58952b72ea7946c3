"""A table of what single clients have, and whether their probabilities can be believed, as reliability diagrams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tailorfl.evaluation.calibration import BINS, Reliability, probabilities
from tailorfl.evaluation.predictions import Predictions
from tailorfl.printable import quoted
from tailorfl.report.clients import ClientReport, clients_of
from tailorfl.report.page import vega
from tailorfl.report.page.look import INK, Look
from tailorfl.report.page.parts import Chart, PagePart, Rows
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


def single_clients(result: ExperimentResult, look: Look) -> list[PagePart]:
    """Return the table of single clients, and their reliability diagrams where the task has classes."""
    what, part = "Single clients with intervals", PagePart("single", "Single clients", folded=True)
    seed = min(int(summary["seed"]) for summary in result.summaries)
    jobs = [(str(summary["label"]), store) for summary, store in result.jobs if summary["seed"] == seed]
    loaded = {label: load_predictions(store.path) for label, store in jobs}
    predictions = {label: values for label, values in loaded.items() if values is not None}
    lines = sum(len(np.unique(values.client)) for values in predictions.values())
    if len(loaded) < len(jobs):
        part.left_out = [f"{what}: folders were put together whose jobs have the same labels and seeds."]
    elif not predictions:
        part.left_out = [f"{what}: predictions of test samples were not kept (eval.predictions)."]
    elif lines > MOST_LINES or sum(len(values.y) for values in predictions.values()) > MOST_SAMPLES:
        part.left_out = [f"{what}: too many for a page; tailorfl gains {quoted(result.path)} prints them."]
    if part.left_out:
        return [part]
    clients = clients_of(result, seed)
    title = f"Every client by its name: {look.name} of its test part{look.unit}, seed {seed}"
    table = clients.table
    part.notes, part.tables = clients.notes, [table.pick(range(len(table.head)), title)]
    of_classes = {label: values for label, values in predictions.items() if values.task in TASKS}
    if not of_classes:
        part.left_out.append("Reliability diagrams: the task has no classes.")
        return [part]
    return [part, _diagrams(clients, of_classes, look)]


def _diagrams(clients: ClientReport, predictions: dict[str, Predictions], look: Look) -> PagePart:
    part = PagePart("reliability", "Can the probabilities be believed?", keys=True)
    part.notes.append(
        "Samples ordered by the probability of the predicted class and cut into bins of equally many (15 at most, of "
        f"{IN_A_BIN} samples at least): how sure the model is, and how often it is right. Below the line it is too "
        f"sure. First all clients' test samples together, then the clients with at least {2 * IN_A_BIN} of them; seed "
        f"{clients.seed}, without temperatures."
    )
    part.data["reliability"] = _rows(predictions)
    part.charts.append(_chart("reliability", look, "Reliability of all clients' test samples together"))
    ids, counts = np.unique(next(iter(predictions.values())).client, return_counts=True)
    names = {line.client: line.name for line in clients.lines}
    for negative, client in sorted(zip((-counts).tolist(), ids.tolist(), strict=True))[:MOST_CHARTS]:
        if -negative < 2 * IN_A_BIN or len(ids) == 1:
            continue
        key = f"reliability-{client}"
        part.data[key] = _rows({label: values.of(client) for label, values in predictions.items()})
        part.charts.append(_chart(key, look, f"{names[client]}, {-negative} test samples", is_small=True))
    return part


def _rows(predictions: dict[str, Predictions]) -> Rows:
    rows: Rows = []
    for label, values in predictions.items():
        p, y = probabilities(values.task, values.outputs), values.y.ravel().astype(np.int64)
        bins = Reliability.of(p, y, max(1, min(BINS, len(y) // IN_A_BIN)))
        rows += [
            {"label": label, "sure": vega.number(c), "right": vega.number(a), "samples": int(n)}
            for n, c, a in zip(bins.samples, bins.confidence, bins.accuracy, strict=True)
        ]
    return rows


def _chart(name: str, look: Look, alt: str, *, is_small: bool = False) -> Chart:
    common: dict[str, Any] = {
        "axis": {"format": "%", "tickCount": 4 if is_small else 6},
        "scale": {"zero": False, "nice": False, "padding": 8},
    }
    x, y = vega.quantity("sure", "mean probability", **common), vega.quantity("right", "right", **common)
    tips = [
        vega.category("label", "method"),
        vega.quantity("sure", "mean probability", format=".1%"),
        vega.quantity("right", format=".1%"),
        vega.quantity("samples"),
    ]
    dashed: Any = {"color": INK, "strokeWidth": 1, "strokeDash": [2, 2]}
    channels = {"x": x, "y": y, **look.line(), "strokeWidth": vega.LIT, "tooltip": tips}
    spec = vega.layers(
        name,
        vega.layer("true", "line", {"x": x, "y": {**y, "field": "sure"}}, **dashed),
        vega.layer("line", "line", channels, vega.VISIBLE, point={"size": 30}),
        height=180 if is_small else 320,
    )
    return Chart(
        name, spec, f"{alt}: a line for each method; dashed: as often right as it is sure.", is_small
    )
