"""How labels are spread over clients: a row a client, a column a class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tailorfl.report.page import vega
from tailorfl.report.page.clients import name_of, row_id
from tailorfl.report.page.look import Look
from tailorfl.report.page.parts import Chart, PagePart
from tailorfl.report.plots import COLOURS
from tailorfl.report.result import company

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult

MOST = 100
"""Clients that are drawn, evenly chosen of more."""


def labels(result: ExperimentResult, look: Look) -> PagePart:
    """Return the training samples of every client by class, as a heat map."""
    part = PagePart("labels", "Labels of the clients")
    summary, store = result.jobs[0]
    table = store.config.get("labels")
    if not table:
        part.left_out.append(
            "Labels of the clients: the runs have no record of them (no classes, private, too many, or older)."
        )
        return part
    counts, classes = np.asarray(table["counts"], dtype=np.int64), [str(name) for name in table["classes"]]
    chosen = vega.evenly(len(counts), MOST)
    for client in chosen:
        total = int(counts[client].sum())
        row = {"id": row_id(company(summary), client), "name": name_of(store, client), "client": client}
        part.data.setdefault("labels", []).extend(
            {**row, "class": name, "count": count, "share": vega.number(count / max(total, 1)), "of": total}
            for name, count in zip(classes, counts[client].tolist(), strict=True)
        )
    part.notes.append(
        f"Training samples of each client (row) by class (column), with seed {summary['seed']}; colour: the "
        "share of the client's samples. The client that is marked above is framed."
    )
    if len(chosen) < len(counts):
        part.notes.append(f"Drawn are {len(chosen)} of {len(counts):,} clients.")
    part.charts.append(_chart(classes, len(chosen)))
    return part


def _chart(classes: list[str], clients: int) -> Chart:
    few = clients <= 45
    tips = [
        vega.category("name", "client"),
        vega.category("class"),
        vega.quantity("count", "samples"),
        vega.quantity("of", "of all its"),
    ]
    legend = {
        "title": "share of the client's samples",
        "format": ".0%",
        "orient": "top",
        "gradientLength": 160,
    }
    colour = vega.quantity("share", scale={"scheme": "viridis", "domain": [0, 1]}, legend=legend)
    frame = {"fill": None, "stroke": COLOURS[1], "strokeWidth": 2.5}
    spec = vega.layers(
        "labels",
        vega.layer("cells", "rect", {"color": colour, "tooltip": tips}),
        vega.layer("shown", "rect", {}, vega.SHOWN, **frame),
        encoding={
            "x": vega.category("class", "class", sort=classes, axis={"labelOverlap": True}),
            "y": {**vega.quantity("client", "client", axis={"labels": few, "ticks": few}), "type": "ordinal"},
        },
        height={"step": max(4, min(16, 700 // clients))},
    )
    alt = f"Share of each of {len(classes)} classes in the training samples of {clients} clients."
    return Chart("labels", spec, alt)
