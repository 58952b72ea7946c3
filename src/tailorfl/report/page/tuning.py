"""How settings were chosen: tuning.json of a result folder, and the validation performance to expect of a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailorfl.errors import RunError
from tailorfl.evaluation.expected import expected_best
from tailorfl.evaluation.metrics import LOWER_IS_BETTER
from tailorfl.report.page.curves import lines
from tailorfl.report.page.look import Look
from tailorfl.report.page.parts import Chart, PagePart, Table, number
from tailorfl.report.tables import MISSING, human_seconds
from tailorfl.runs.files import decode

NAME = "tuning.json"

Rows = list[dict[str, Any]]


def tuning(folders: Sequence[Path], look: Look) -> tuple[PagePart, dict[str, Rows], list[str]]:
    """Return the part, its data, and what could not be shown.

    Raises:
        RunError: a tuning.json cannot be read.
    """
    part, rows = PagePart("tuning", "How settings were chosen"), []
    table: list[list[str]] = []
    metric = look.metric
    for folder in folders:
        file = folder / NAME
        if not file.is_file():
            continue
        try:
            found = dict(decode(file.read_bytes()))
            metric = str(found["metric"])
            part.notes.append(_said(found))
            for name, method in found["methods"].items():
                table.append(_line(name, method))
                rows += _expected(name, method, metric)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"'{file}' is damaged ({error!r}); restore it from a copy, or move it away"
            ) from error
    if not table:
        return part, {}, [f"Chosen settings and edges: the folder has no {NAME}."]
    head = ("Method", "chosen", "at an edge of its space", "rank", "trials", "seconds of all")
    part.tables.append(Table.of("Chosen by validation", head, table))
    if rows:
        part.charts.append(_chart(look, rows, metric))
        part.notes.append(
            "The curve is the validation score to expect of the best of n trials (Dodge et al., 2019): a method that "
            "is still rising has not had enough of them. A setting at the edge of its space may be better beyond it."
        )
    return part, {"tuning": rows} if rows else {}, []


def _said(found: Mapping[str, Any]) -> str:
    budget = found["budget"]
    text = _settings(budget) if isinstance(budget, Mapping) else str(budget)
    return f"Sampler: {found['sampler']}; budget of each method: {text}; by validation {found['metric']}."


def _settings(values: Any) -> str:
    """Return settings as one line."""
    if isinstance(values, Mapping):
        return ", ".join(f"{name}={value}" for name, value in values.items()) or MISSING
    if isinstance(values, list | tuple):
        return ", ".join(map(str, values)) or MISSING
    return MISSING if values is None else str(values)


def _line(name: str, method: Mapping[str, Any]) -> list[str]:
    trials = method["trials"]
    done = [trial for trial in trials if _score(trial) is not None]
    seconds = math.fsum(float(trial.get("seconds") or 0.0) for trial in trials)
    facts = [_settings(method["chosen"]), _settings(method["edges"]), _settings(method["rank"])]
    return [name, *facts, f"{len(done)} of {len(trials)}", human_seconds(seconds)]


def _score(trial: Mapping[str, Any]) -> float | None:
    score = trial.get("score")
    return None if score is None or not math.isfinite(float(score)) else float(score)


def _expected(name: str, method: Mapping[str, Any], metric: str) -> Rows:
    """Return the expected best of 1, 2, ... trials."""
    scores = [score for trial in method["trials"] if (score := _score(trial)) is not None]
    if not scores:
        return []
    draws = range(1, len(scores) + 1)
    values = expected_best(scores, list(draws), higher_is_better=metric not in LOWER_IS_BETTER)
    return [
        {"label": name, "trials": n, "mean": number(value), "low": number(value), "high": number(value)}
        for n, value in zip(draws, values, strict=True)
    ]


def _chart(look: Look, rows: Rows, metric: str) -> Chart:
    names = tuple(dict.fromkeys(row["label"] for row in rows))
    known = set(names) <= set(look.labels)
    own = Look(metric, look.labels if known else names)
    x = {
        "field": "trials",
        "type": "quantitative",
        "title": "trials",
        "axis": {"tickMinStep": 1, "format": "d"},
    }
    tips = [
        {"field": "label", "type": "nominal", "title": "method"},
        {"field": "trials", "type": "quantitative"},
        {"field": "mean", "type": "quantitative", "format": own.format, "title": f"validation {own.name}"},
    ]
    spec = lines(own, "tuning", x, tips)
    spec["encoding"]["color"]["legend"] = {"title": None, "orient": "top", "columns": 3}
    return Chart(
        "tuning", spec, f"Expected validation {own.name} of the best of n trials, a line for each method."
    )
