"""The columns of the comparison table: the number of a job, its title and unit, and whether higher is better.

Each line of `columns_of` is a column. Terminal, Markdown, LaTeX, CSV, JSON and page show the same list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tailorfl.evaluation.metrics import LOWER_IS_BETTER, UNIT_METRICS
from tailorfl.report.tables import Column, Summary
from tailorfl.runs.store import SECONDS

FIRST = ("mean", "worst10", "epsilon", "bytes", "share_beating_local")
"""Keys of the first columns: quality, also for the worst clients, and costs."""
FEW_CLIENTS = 10
"""Largest number of clients of which a tenth is a single one."""
SETS = {
    "global": "all clients' data",
    "heldout": "held-out clients",
    "malicious": "malicious clients",
    "official": "the official test set",
}
"""Names of test sets in tables; other sets keep theirs."""
MODELS = (("deployed", ""), ("shared", "global"))
"""Prefixes of the columns of sets other than clients' own, and their model; "" is the deployed one."""


def columns_of(summaries: Sequence[Summary], metric: str) -> tuple[Column, ...]:
    """Return the columns of the comparison of jobs with these summaries."""
    unit: Any = "percent" if metric in UNIT_METRICS else "number"
    better: Any = "lower" if metric in LOWER_IS_BETTER else "higher"
    tenth = "client" if are_few(summaries) else "10 % of clients"
    two_models = any({"personal", "global"} <= set(s["metrics"]) for s in summaries)

    def has(name: str) -> bool:
        return any(name in s for s in summaries)

    def sharpness(model: str) -> bool:
        return any("sharpness" in _local(s, model) for s in summaries if s["model"] != model)

    columns = [
        (Column("mean", metric.replace("_", " "), unit, better), True),
        (
            Column("accuracy", "accuracy", "percent", "higher", _accuracy),
            metric != "accuracy" and any("balanced_accuracy" in _local(s) for s in summaries),
        ),
        (Column("weighted_mean", "weighted by samples", unit, better), True),
        (Column("std", "std", unit), True),
        (Column("worst10", f"worst {tenth}", unit, better), True),
        (Column("best10", f"best {tenth}", unit, better), True),
        (Column("share_beating_local", "clients above LocalTrain", "percent", "higher"), True),
        *((Column(f"deployed.{name}", _set_title(name), unit, better), True) for name in _sets(summaries)),
        *(
            (Column(f"shared.{name}", f"server model {_set_title(name)}", unit, better), two_models)
            for name in _sets(summaries, "global")
        ),
        (Column("deployed_sharpness", "sharpness", better="lower"), sharpness("")),
        (Column("shared_sharpness", "sharpness of the server model", better="lower"), sharpness("global")),
        (Column("selected_round", "round chosen by validation", value=_selected), has("selection")),
        (Column("epsilon", "ε (largest, zero-out)", value=_epsilon), has("privacy")),
        (Column("answered", "clients that answered", "percent"), has("answered")),
        (Column(SECONDS, "simulated time", "seconds"), has(SECONDS)),
        (Column("rounds", "rounds"), len({s["rounds"] for s in summaries}) > 1),
        # Gradients of single samples; missing in results from before they were counted.
        (Column("gradients_each", "gradients / client / round"), has("gradients_each")),
        (Column("bytes", "traffic", "bytes", value=lambda s: s["bytes_up"] + s["bytes_down"]), True),
        (Column("seconds", "time", "seconds"), True),
    ]
    chosen = (column for column, is_shown in columns if is_shown)
    return tuple(sorted(chosen, key=lambda column: (*FIRST, column.key).index(column.key)))


def numbers(summary: Summary, metric: str, columns: Sequence[Column]) -> dict[str, float]:
    """Return the numbers of a job by name.

    Nested ones have dotted names ({"personal": {"local": {"auc": {"mean": .9}}}} gives "personal.local.auc.mean").
    "deployed.NAME" and "shared.NAME" are the metric's means of the deployed and of the global model on the set NAME.
    None (NaN in JSON) becomes NaN.
    """
    values = dict(_flat(summary["metrics"])) | dict(
        _flat({k: v for k, v in summary.items() if k != "metrics"})
    )
    for prefix, model in MODELS:
        for name in summary["metrics"].get(model or summary["model"], {}):
            values[f"{prefix}.{name}"] = values[f"{model or summary['model']}.{name}.{metric}.mean"]
        sharpness = values.get(f"{model or summary['model']}.local.sharpness.mean")
        values |= {} if sharpness is None else {f"{prefix}_sharpness": sharpness}
    return values | {c.key: _number(c.value(summary)) for c in columns if c.value is not None}


def metric_name(metric: str) -> str:
    """Return the name of a metric in running text and pictures."""
    named = {
        "auc": "AUC", "mse": "mean squared error", "deviance": "Poisson deviance", "mae": "mean absolute error",
        "c_index": "C-index", "r2": "R²",
    }  # fmt: skip
    return named.get(metric, metric.replace("_", " "))


def are_few(summaries: Sequence[Summary]) -> bool:
    """Return whether a tenth of the clients is a single client, which can be named."""
    return all(summary.get("clients", math.inf) <= FEW_CLIENTS for summary in summaries)


def _local(summary: Summary, model: str = "") -> Mapping[str, Any]:
    """Return statistics by metric of the deployed (or another) model on clients' own test parts."""
    statistics: Mapping[str, Any] = summary["metrics"].get(model or summary["model"], {}).get("local", {})
    return statistics


def _sets(summaries: Sequence[Summary], model: str = "") -> list[str]:
    """Return further test sets of at least one job, for its deployed (or another) model."""
    names = (name for s in summaries for name in s["metrics"].get(model or s["model"], {}))
    return [name for name in dict.fromkeys(names) if name not in ("val", "local")]


def _set_title(name: str) -> str:
    """Return the title of a test set's column; `heldout+10` is of clients that adapted for 10 steps."""
    kind, _, steps = name.partition("+")
    after = f" after {steps} step{'s' * (steps != '1')}" if steps else ""
    return f"on {SETS[kind]}{after}" if kind in SETS else f"on {name}"


def _accuracy(summary: Summary) -> float | None:
    mean: float | None = _local(summary).get("accuracy", {}).get("mean")
    return mean


def _selected(summary: Summary) -> float | None:
    chosen: float | None = summary.get("selection", {}).get("round")
    return chosen


def _epsilon(summary: Summary) -> float:
    """Return the largest ε of a job's clients; infinite without privacy."""
    return float(summary["privacy"]["epsilon"]["max"]) if "privacy" in summary else math.inf


def _flat(entries: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in entries.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is None or isinstance(value, int | float):
            yield f"{prefix}{name}", _number(value)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
