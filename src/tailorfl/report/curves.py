"""What the curves of an experiment say: rounds and bytes to a target, and what choosing a round changes.

Both read the evaluated rounds only (every `eval.every`-th and the last one), and the mean over clients of the deployed
model's metric on the clients' own test parts, which methods are compared by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tailorfl.evaluation.leading import UNIT_METRICS, check_target
from tailorfl.evaluation.metrics import LOWER_IS_BETTER
from tailorfl.evaluation.seeds import interval
from tailorfl.report.tables import MISSING, human_bytes, human_seconds
from tailorfl.runs.store import SECONDS

if TYPE_CHECKING:
    import pandas as pd

    from tailorfl.report.result import ExperimentResult

UNTIL = ("round", "bytes", SECONDS)
"""What a round has taken, of its record."""


def to_target(result: ExperimentResult, target: float) -> pd.DataFrame:
    """Return when each method first was at least as good as `target`, a row a label.

    Columns: seeds (how many), reached (in how many of them), and over those seeds alone the mean of rounds, of bytes
    (sent by all until then) and of simulated_seconds, with half widths of their 95 % intervals, such as `rounds_ci`;
    NaN where none reached it, or nothing was simulated.
    """
    import pandas as pd

    lower = result.metric in LOWER_IS_BETTER
    found: dict[str, list[tuple[float, ...] | None]] = {}
    for summary, curve in _curves(result):
        enough = curve["value"] <= target if lower else curve["value"] >= target
        hit = curve[enough]
        place = None if hit.empty else tuple(float(hit[name].iloc[0]) for name in UNTIL)
        found.setdefault(summary["label"], []).append(place)
    rows = []
    for label, places in found.items():
        there = [place for place in places if place is not None]
        row: dict[str, Any] = {"label": label, "seeds": len(places), "reached": len(there)}
        for number, name in enumerate(("rounds", *UNTIL[1:])):
            values = [place[number] for place in there]
            row[name], row[f"{name}_ci"] = interval(values) if values else (math.nan, math.nan)
        rows.append(row)
    return pd.DataFrame(rows).set_index("label")


def best_rounds(result: ExperimentResult) -> pd.DataFrame:
    """Return the metric of the last round, of the round that is best on validation data, and of the best on TEST data.

    A row a label; each column is a mean over seeds, with the half width of its 95 % interval as "<column>_ci". The
    last column, best_on_test, has looked at the test data to choose its round: it is too good, and only there to be
    held against papers that print it.
    """
    import pandas as pd

    lower = result.metric in LOWER_IS_BETTER
    found: dict[str, dict[str, list[float]]] = {}
    for summary, curve in _curves(result):
        chosen = summary.get("best_by_validation")
        values = found.setdefault(summary["label"], {})
        best = curve["value"].min() if lower else curve["value"].max()
        for name, value in (
            ("last", curve["value"].iloc[-1]),
            ("by_validation", math.nan if chosen is None else chosen["local"]),
            ("best_on_test", best),
        ):
            values.setdefault(name, []).append(math.nan if value is None else float(value))
    rows = []
    for label, columns in found.items():
        row: dict[str, Any] = {"label": label}
        for name, over_seeds in columns.items():
            row[name], row[f"{name}_ci"] = interval(over_seeds)
        rows.append(row)
    return pd.DataFrame(rows).set_index("label")


def has_choice(result: ExperimentResult) -> bool:
    """Whether any job was evaluated in more than one round."""
    return any(len(curve) > 1 for _, curve in _curves(result))


def _curves(result: ExperimentResult) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """(summary, evaluated rounds with their value and `UNTIL`) of every job."""
    out = []
    for summary, store in result.jobs:
        rounds = store.rounds()
        column = f"{summary['model']}/local/{result.metric}"
        curve = rounds.reindex(columns=list(UNTIL)).assign(value=rounds[column]).dropna(subset=["value"])
        out.append((summary, curve))
    return out


@dataclass(frozen=True)
class Section:
    """A small table of a report: its title, what its numbers mean, and cells as text."""

    title: str
    note: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sections(result: ExperimentResult, target: float | None = None) -> list[Section]:
    """Return what a report says about curves: `to_target` where there is a target, `best_rounds` where rounds differ.

    Raises:
        ConfigError: a target that the metric cannot reach.
    """
    out = []
    if target is not None:
        out.append(_target_section(result, target))
    if has_choice(result):
        out.append(_round_section(result))
    return out


def _target_section(result: ExperimentResult, target: float) -> Section:
    check_target(target, result.metric)
    percent = result.metric in UNIT_METRICS
    wanted = f"{100 * target:g} %" if percent else f"{target:g}"
    rows, found = [], to_target(result, target)
    timed = bool(found[SECONDS].notna().any())
    for label, row in found.iterrows():
        count = _spread(row["rounds"], row["rounds_ci"], ".4g")
        sent = human_bytes(float(row["bytes"]))
        took = (human_seconds(float(row[SECONDS])),) if timed else ()
        rows.append((str(label), f"{row['reached']:.0f} of {row['seeds']:.0f}", count, sent, *took))
    return Section(
        f"Until {result.metric} is {wanted}",
        "The first evaluated round at which the mean over clients (own test part) is there, and the bytes sent until "
        "then: means over the seeds that reached it alone.",
        (
            "Method",
            "Seeds that reached it",
            "Rounds",
            "Sent until then",
            *(("Simulated time",) if timed else ()),
        ),
        tuple(rows),
    )


def _round_section(result: ExperimentResult) -> Section:
    percent = result.metric in UNIT_METRICS
    scale, form = (100.0, ".2f") if percent else (1.0, ".4g")
    rows = []
    for label, row in best_rounds(result).iterrows():
        cells = (
            _spread(scale * row[name], scale * row[f"{name}_ci"], form)
            for name in ("last", "by_validation", "best_on_test")
        )
        rows.append((str(label), *cells))
    unit = " (%)" if percent else ""
    return Section(
        f"Which round: {result.metric}{unit}",
        "The table above is of the last round. A round chosen on test data is too good and no basis for a comparison: "
        "it is only there to be held against papers that print it.",
        ("Method", "Last round", "Best on validation", "Best on TEST (optimistic)"),
        tuple(rows),
    )


def _spread(mean: float, half_width: float, form: str) -> str:
    if math.isnan(mean):
        return MISSING
    return f"{mean:{form}}" + ("" if math.isnan(half_width) else f" ± {half_width:{form}}")
