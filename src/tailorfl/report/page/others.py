"""Parts of a page beside its main table: differences, other test sets, who took part, privacy, and what was run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tailorfl.evaluation.seeds import interval
from tailorfl.evaluation.summary import mean
from tailorfl.printable import quoted
from tailorfl.report.differences import differences
from tailorfl.report.page.look import Look
from tailorfl.report.page.parts import Cell, Code, PagePart, Table
from tailorfl.report.tables import MISSING, Column, cells
from tailorfl.runs.fingerprint import samples_of

if TYPE_CHECKING:
    import pandas as pd

    from tailorfl.report.result import ExperimentResult

BESIDE = ("deployed.", "shared.")
"""How the keys of columns begin that are of other test sets than clients' own."""


def comparison(result: ExperimentResult, frame: pd.DataFrame) -> tuple[Table, Table | None]:
    """Return the table of an experiment, and that of further test sets, if there are any."""
    beside = [column for column in result.columns if column.key.startswith(BESIDE)]
    own = [column for column in result.columns if not column.key.startswith(BESIDE)]
    seeds = "mean over seeds ± half width of the 95 % interval; bold: better than every other line beyond the noise"
    table = _numbers(f"Comparison: {seeds}", frame, own)
    return table, _numbers(f"Other test sets: {seeds}", frame, beside) if beside else None


def _numbers(caption: str, frame: pd.DataFrame, columns: list[Column]) -> Table:
    head, body = cells(frame, columns)
    keys = [None, "seeds", *(column.key for column in columns)]
    rows = []
    for (_, line), texts in zip(frame.iterrows(), body, strict=True):
        values = [None if key is None else float(line[key]) for key in keys]
        rows.append([Cell(t, v, s) for (t, s), v in zip(texts, values, strict=True)])
    return Table(caption, head, rows)


def paired_differences(result: ExperimentResult, look: Look) -> tuple[PagePart, list[str]]:
    """Return every method minus every other, and which differences are beyond the noise."""
    part = PagePart("differences", "Differences")
    found = differences(result)
    if not found:
        return part, ["Differences: no two methods share a seed."]
    if all(np.isnan(pair.p_value) for pair in found):
        return part, [
            "Differences: of one seed, no noise is known; run more (tailorfl run --extend FOLDER seeds=3)."
        ]
    beyond = [pair for pair in found if pair.is_beyond_noise]
    part.notes.append(
        f"Mean over clients of the {look.name}, line minus column, paired seed by seed, ± half width of its 95 % "
        f"interval{look.unit}. Bold with *: beyond the noise at 5 % over all {len(found)} comparisons together (paired "
        f"t-tests, Holm's correction): {len(beyond)} of {len(found)}."
    )
    by_pair = {(pair.first, pair.second): (pair, 1) for pair in found}
    by_pair |= {(pair.second, pair.first): (pair, -1) for pair in found}
    rows = []
    for line in look.labels:
        row = [Cell(line)]
        for column in look.labels:
            pair, sign = by_pair.get((line, column), (None, 0))
            if pair is None:
                row.append(Cell(MISSING))
                continue
            text = look.spread(sign * pair.mean, pair.half_width, sign=True)
            text += " *" if pair.is_beyond_noise else ""
            row.append(Cell(text, sign * pair.mean, pair.is_beyond_noise))
        rows.append(row)
    part.tables.append(Table("Paired differences between methods", ["Method", *look.labels], rows))
    exact = [
        [
            Cell(f"{pair.first} − {pair.second}"),
            Cell(look.spread(pair.mean, pair.half_width, sign=True), pair.mean),
            Cell(f"{pair.p_value:.3g}", pair.p_value),
            Cell(f"{pair.adjusted:.3g}", pair.adjusted, pair.is_beyond_noise),
            Cell(str(pair.seeds), pair.seeds),
        ]
        for pair in found
    ]
    head = ("Pair", f"difference{look.unit}", "p", "p (Holm)", "seeds")
    part.tables.append(Table("The same with p-values", head, exact))
    return part, []


def took_part(result: ExperimentResult, look: Look) -> tuple[Table | None, str]:
    """Return clients that were sampled beside those that never were; or why there is no such table."""
    found: dict[str, dict[str, list[float]]] = {}
    counts = []
    for summary, store in result.jobs:
        rounds = store.rounds()
        if "clients" not in rounds:
            return (
                None,
                "Participants and clients that were never sampled: who took part is secret or not recorded.",
            )
        seen = {int(client) for sampled in rounds["clients"] for client in sampled}
        own = result.own(summary, store)
        ever = own["client"].isin(list(seen))
        counts.append(int((~ever).sum()))
        held = found.setdefault(str(summary["label"]), {"ever": [], "never": []})
        held["ever"].append(mean(own.loc[ever, look.metric]))
        held["never"].append(mean(own.loc[~ever, look.metric]))
    if not any(counts):
        return None, "Participants and clients that were never sampled: every client was sampled."
    rows = []
    for label, held in found.items():
        means = {name: interval([v for v in values if not np.isnan(v)]) for name, values in held.items()}
        rows.append([Cell(label), *(Cell(look.spread(*means[n]), means[n][0]) for n in ("ever", "never"))])
    head = ("Method", f"sampled at least once{look.unit}", f"never sampled{look.unit}")
    many = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
    return Table(f"Clients by whether they were ever sampled; {many} of a seed never were", head, rows), ""


def privacy(result: ExperimentResult) -> tuple[PagePart, list[str]]:
    """Return what every private job spent."""
    part = PagePart("privacy", "Privacy ledger")
    rows, released = [], set()
    for summary, _ in result.jobs:
        spent = summary.get("privacy")
        if not spent:
            continue
        released |= set(spent.get("not_for_release", ()))
        noise = spent.get("noise")
        rows.append(
            (
                f"{summary['label']}, seed {summary['seed']}",
                str(spent["level"]),
                f"{spent['epsilon']['max']:.4g}",
                f"{spent['epsilon']['mean']:.4g}",
                f"{spent['delta']:g}",
                MISSING if noise is None else f"{noise:.4g}",
                str(spent["clip"]),
                str(spent["accountant"]),
                str(spent["neighbours"]),
            )
        )
    if not rows:
        return part, ["Privacy ledger: no method was trained with differential privacy."]
    head = ("Job", "level", "ε (largest)", "ε (mean)", "δ", "noise", "clip", "accountant", "neighbours")
    part.tables.append(Table.of("What each job spent; privacy.csv of its folder has every use", head, rows))
    if released:
        part.notes.append(f"ε counts on nobody seeing: {', '.join(sorted(released))}.")
    return part, []


def what_was_run(result: ExperimentResult) -> PagePart:
    """Return the settings, with what they were run, and how to run them again."""
    part = PagePart("settings", "What was run")
    made: dict[str, dict[str, None]] = {}
    for summary, store in result.jobs:
        for name, value in _facts(summary, store.config):
            made.setdefault(name, {})[value] = None
    rows = [(name, "; ".join(values)) for name, values in made.items()]
    part.tables.append(Table.of("Versions, machine and data of the jobs", ("", "of the jobs"), rows))
    part.notes.append("The same again, from the settings below in a file, or from the result folder:")
    folders = " ".join(quoted(path) for path in result.folders)
    part.code.append(
        Code(f"tailorfl compare config.yaml --out again\ntailorfl report {folders} --out report.html")
    )
    part.code.append(Code(f"# config.yaml\n{result.config.to_yaml()}"))
    return part


def _facts(summary: dict[str, Any], stored: dict[str, Any]) -> Iterator[tuple[str, str]]:
    environment = stored.get("environment") or {}
    yield from ((name, str(value)) for name, value in environment.items())
    yield "engine", str(summary.get("engine", MISSING))
    yield "data", str(stored.get("source", MISSING))
    if isinstance(stored.get("data"), dict):
        yield "digest of the samples", samples_of(stored) or MISSING
    yield "clients", str(summary.get("clients", MISSING))
    yield "rounds", str(summary["rounds"])
    yield "seed", str(summary["seed"])
