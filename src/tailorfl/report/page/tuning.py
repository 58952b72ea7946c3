"""How settings were chosen: tuning.json of a result folder, and the validation performance to expect of a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailorfl.errors import RunError
from tailorfl.evaluation.expected import expected_best
from tailorfl.evaluation.metrics import LOWER_IS_BETTER
from tailorfl.report.page import vega
from tailorfl.report.page.curves import lines
from tailorfl.report.page.look import Look
from tailorfl.report.page.parts import Chart, PagePart, Rows
from tailorfl.report.tables import MISSING, Table, human_seconds
from tailorfl.runs.files import decode
from tailorfl.runs.tuned import NAME


def tuning(folders: Sequence[Path], look: Look, names: Mapping[str, str]) -> PagePart:
    """Return the chosen settings, and the score to expect of the best of n trials; `names` are those of labels.

    Raises:
        RunError: a tuning.json cannot be read.
    """
    part = PagePart("tuning", "How settings were chosen")
    table: list[list[str]] = []
    rows: Rows = []
    metric = look.metric
    for file in (folder / NAME for folder in folders if (folder / NAME).is_file()):
        try:
            tuned = dict(decode(file.read_bytes()))
            metric, budget = str(tuned["metric"]), _settings(tuned["budget"])
            part.notes.append(
                f"Sampler: {tuned['sampler']}; budget of each method: {budget}; by validation {metric}."
            )
            for label, method in tuned["methods"].items():
                name = names.get(label, label)
                scores = [score for trial in method["trials"] if (score := _score(trial)) is not None]
                table.append(_line(name, method, len(scores)))
                rows += _expected(name, scores, metric)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"'{file}' is damaged ({error!r}); restore it from a copy, or move it away"
            ) from error
    if not table:
        part.left_out.append(f"Chosen settings and edges: the folder has no {NAME}.")
        return part
    head = ("Method", "chosen", "at an edge of its space", "rank", "trials", "seconds of all")
    part.tables.append(Table.of("Chosen by validation", head, table))
    if rows:
        part.data["tuning"] = rows
        part.charts.append(_chart(look, rows, metric))
        part.notes.append(
            "The curve is the validation score to expect of the best of n trials (Dodge et al., 2019): a method that "
            "is still rising has not had enough of them. A setting at the edge of its space may be better beyond it."
        )
    return part


def _settings(values: Any) -> str:
    """Return settings as one line."""
    if isinstance(values, Mapping):
        return ", ".join(f"{name}={value}" for name, value in values.items()) or MISSING
    if isinstance(values, list | tuple):
        return ", ".join(map(str, values)) or MISSING
    return MISSING if values is None else str(values)


def _line(name: str, method: Mapping[str, Any], complete: int) -> list[str]:
    trials = method["trials"]
    seconds = math.fsum(float(trial.get("seconds") or 0.0) for trial in trials)
    facts = [_settings(method[key]) for key in ("chosen", "edges", "rank")]
    return [name, *facts, f"{complete} of {len(trials)}", human_seconds(seconds)]


def _score(trial: Mapping[str, Any]) -> float | None:
    score = trial.get("score")
    return None if score is None or not math.isfinite(float(score)) else float(score)


def _expected(name: str, scores: list[float], metric: str) -> Rows:
    """Return the expected best of 1, 2, ... trials."""
    draws = list(range(1, len(scores) + 1))
    values = expected_best(scores, draws, higher_is_better=metric not in LOWER_IS_BETTER) if scores else []
    return [
        {"label": name, "trials": n, **dict.fromkeys(("mean", "low", "high"), vega.number(value))}
        for n, value in zip(draws, values, strict=True)
    ]


def _chart(look: Look, rows: Rows, metric: str) -> Chart:
    names = tuple(dict.fromkeys(row["label"] for row in rows))
    look = Look(metric, look.labels if set(names) <= set(look.labels) else names)
    x = vega.quantity("trials", "trials", axis={"tickMinStep": 1, "format": "d"})
    tips = [
        vega.category("label", "method"),
        vega.quantity("trials"),
        vega.quantity("mean", f"validation {look.name}", format=look.format),
    ]
    spec = lines(look, "tuning", x, tips)
    spec["encoding"]["color"]["legend"] = {"title": None, "orient": "top", "columns": 3}
    return Chart(
        "tuning", spec, f"Expected validation {look.name} of the best of n trials, a line for each method."
    )
