"""How labels are spread over clients: a row a client, a column a class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tailorfl.report.page.clients import name_of, row_id
from tailorfl.report.page.parts import Chart, PagePart, number
from tailorfl.report.plots import COLOURS
from tailorfl.report.result import company

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult

MOST = 100
"""Clients that are drawn, evenly chosen of more."""


def labels(result: ExperimentResult) -> tuple[PagePart, dict[str, list[dict[str, Any]]], list[str]]:
    """Return the part, its data, and what could not be shown."""
    part = PagePart("labels", "Labels of the clients")
    summary, store = result.jobs[0]
    table = store.config.get("labels")
    if not table:
        why = "Labels of the clients: the runs have no record of them (no classes, private, too many, or older)."
        return part, {}, [why]
    counts = np.asarray(table["counts"], dtype=np.int64)
    names, key = table["classes"], company(summary)
    chosen = np.unique(np.linspace(0, len(counts) - 1, min(MOST, len(counts))).round().astype(int))
    rows = []
    for client in (int(c) for c in chosen):
        total = int(counts[client].sum())
        for place, count in enumerate(counts[client]):
            share = number(int(count) / total) if total else 0.0
            row = {"id": row_id(key, client), "name": name_of(store, client), "client": client}
            rows.append({**row, "class": str(names[place]), "count": int(count), "share": share, "of": total})
    part.notes.append(
        f"Training samples of each client (row) by class (column), with seed {summary['seed']}; colour: the "
        "share of the client's samples. The client that is marked above is framed."
    )
    if len(chosen) < len(counts):
        part.notes.append(f"Drawn are {len(chosen)} of {len(counts):,} clients.")
    part.charts.append(_chart([str(name) for name in names], len(chosen)))
    return part, {"labels": rows}, []


def _chart(names: list[str], clients: int) -> Chart:
    height = max(4, min(16, 700 // clients))
    few = clients <= 45
    encoding = {
        "x": {
            "field": "class",
            "type": "nominal",
            "sort": names,
            "title": "class",
            "axis": {"labelOverlap": True},
        },
        "y": {"field": "client", "type": "ordinal", "title": "client", "axis": {"labels": few, "ticks": few}},
    }
    tips = [
        {"field": "name", "type": "nominal", "title": "client"},
        {"field": "class", "type": "nominal"},
        {"field": "count", "type": "quantitative", "title": "samples"},
        {"field": "of", "type": "quantitative", "title": "of all its"},
    ]
    legend = {
        "title": "share of the client's samples",
        "format": ".0%",
        "orient": "top",
        "gradientLength": 160,
    }
    colour = {
        "field": "share",
        "type": "quantitative",
        "scale": {"scheme": "viridis", "domain": [0, 1]},
        "legend": legend,
    }
    spec: dict[str, Any] = {
        "data": {"name": "labels"},
        "params": [{"name": "shown", "value": ""}],
        "height": {"step": height},
        "encoding": encoding,
        "layer": [
            {"name": "cells", "mark": {"type": "rect"}, "encoding": {"color": colour, "tooltip": tips}},
            {
                "name": "shown",
                "transform": [{"filter": "datum.id === shown"}],
                "mark": {
                    "type": "rect",
                    "fill": None,
                    "stroke": COLOURS[1],
                    "strokeWidth": 2.5,
                    "tooltip": None,
                },
            },
        ],
    }
    return Chart(
        "labels", spec, f"Share of each of {len(names)} classes in the training samples of {clients} clients."
    )
