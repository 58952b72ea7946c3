"""Parts of a page besides its main table: differences, other test sets, privacy, tuning, and the run's settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tailorfl.core.method import all_methods
from tailorfl.errors import RunError
from tailorfl.evaluation.comparisons import expected_best
from tailorfl.evaluation.metrics import LOWER_IS_BETTER
from tailorfl.evaluation.summary import mean
from tailorfl.printable import quoted
from tailorfl.report.findings import differences
from tailorfl.report.page import charts
from tailorfl.report.page.charts import Chart, Look, PagePart, Rows
from tailorfl.report.page.curves import lines
from tailorfl.report.tables import (
    LEAST_SEEDS,
    MISSING,
    Cell,
    Table,
    as_table,
    human_seconds,
    over_seeds,
    without_seeds,
)
from tailorfl.runs.fingerprint import samples_of
from tailorfl.runs.folders import TUNING, tunings

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult

BESIDE = ("deployed.", "shared.")
"""Prefixes of the columns of test sets other than clients' own."""


def comparison(result: ExperimentResult) -> list[Table]:
    """Return the table of an experiment, and that of further test sets if there are any."""
    frame, spread = without_seeds(result.marked(result.table))
    further = [column for column in result.columns if column.key.startswith(BESIDE)]
    main = [column for column in result.columns if column not in further]
    note = f"{spread}; bold: better than every other method beyond the noise"
    tables = [as_table(frame, main, f"Comparison: {note}")]
    return [*tables, as_table(frame, further, f"Other test sets: {note}")] if further else tables


def paired_differences(result: ExperimentResult, look: Look) -> PagePart:
    """Return the part with the difference of every pair of methods, and those beyond the noise."""
    part = PagePart("differences", "Differences")
    pairs = differences(result.means_by_job())
    if not pairs:
        part.left_out.append("Differences: no two methods share a seed.")
        return part
    if all(difference.pair.seeds < LEAST_SEEDS for difference in pairs):
        part.left_out.append(
            f"Differences: fewer than {LEAST_SEEDS} seeds say too little about the noise; add seeds (tailorfl run "
            f"--extend RESULTS seeds={LEAST_SEEDS})."
        )
        return part
    beyond = sum(difference.is_beyond_noise for difference in pairs)
    part.notes.append(
        f"Mean over clients of the {look.name}, line minus column, paired seed by seed, ± half width of its 95 % "
        f"interval. Bold with *: beyond the noise at 5 % over all {len(pairs)} comparisons together (paired "
        f"t-tests, Holm's correction): {beyond} of {len(pairs)}."
    )
    square, exact = {}, []
    for difference in pairs:
        pair, is_sure = difference.pair, difference.is_beyond_noise
        half_width = pair.half_width if pair.seeds >= LEAST_SEEDS else math.nan
        for sign, key in (
            (1, (difference.first, difference.second)),
            (-1, (difference.second, difference.first)),
        ):
            text = look.spread(sign * pair.mean, half_width, "+") + (" *" if is_sure else "")
            square[key] = Cell(text, sign * pair.mean, is_sure)
        exact.append(
            (
                f"{difference.first} − {difference.second}",
                look.cell(pair.mean, half_width, "+"),
                Cell(f"{pair.p_value:.3g}", pair.p_value),
                Cell(f"{difference.adjusted:.3g}", difference.adjusted, is_sure),
                str(pair.seeds),
            )
        )
    rows = [[line, *(square.get((line, column), MISSING) for column in look.labels)] for line in look.labels]
    head = ("Pair", "difference", "p", "p (Holm)", "seeds")
    part.tables = [
        Table.of("Paired differences between methods", ["Method", *look.labels], rows),
        Table.of("The same with p-values", head, exact),
    ]
    return part


def other_sets(result: ExperimentResult, look: Look) -> PagePart:
    """Return the part with further test sets, and a comparison of sampled clients with those never sampled."""
    further = comparison(result)[1:]
    part = PagePart("sets", "Held-out clients, shifts and participation", tables=further)
    if not further:
        part.left_out.append("Held-out clients and shifted data: no such set was evaluated (eval.final).")
    never = "Participants and clients that were never sampled:"
    means: dict[str, dict[str, list[float]]] = {}
    counts = []
    for summary, store in result.jobs:
        rounds = store.rounds()
        if "clients" not in rounds:
            part.left_out.append(f"{never} who took part is secret or not recorded.")
            return part
        records = result.own(summary, store)
        # With pooled data a single client is sampled, which holds the data of all.
        known = all_methods().get(str(summary["method"]))
        is_sampled = records["client"].isin(
            {int(client) for cohort in rounds["clients"] for client in cohort}
        ) | (known is not None and known.pooled)
        counts.append(int((~is_sampled).sum()))
        groups = means.setdefault(str(summary["label"]), {"sampled": [], "never": []})
        for name, chosen in (("sampled", is_sampled), ("never", ~is_sampled)):
            if not np.isnan(value := mean(records.loc[chosen, look.metric])):
                groups[name].append(value)
    if not any(counts):
        part.left_out.append(f"{never} every client was sampled.")
        return part
    rows = [
        [str(label), *(look.cell(row[name], row[f"{name}_ci"]) for name in ("sampled", "never"))]
        for label, row in over_seeds(means).iterrows()
    ]
    head = ("Method", "sampled at least once", "never sampled")
    many = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
    title = f"Clients by whether they were ever sampled; {many} per seed never were"
    part.tables.append(Table.of(title, head, rows))
    return part


def privacy(result: ExperimentResult) -> PagePart:
    """Return the part with the privacy spent by every private job."""
    part = PagePart("privacy", "Privacy ledger")
    rows, released = [], set()
    for summary in result.summaries:
        spent = summary.get("privacy")
        if not spent:
            continue
        released |= set(spent.get("not_for_release", ()))
        noise, epsilon = spent.get("noise"), spent["epsilon"]
        numbers = (f"{epsilon['max']:.4g}", f"{epsilon['mean']:.4g}", f"{spent['delta']:g}")
        words = [str(spent[key]) for key in ("clip", "accountant", "neighbours")]
        job = f"{summary['label']}, seed {summary['seed']}"
        rows.append(
            (job, str(spent["level"]), *numbers, MISSING if noise is None else f"{noise:.4g}", *words)
        )
    if not rows:
        part.left_out.append("Privacy ledger: no method was trained with differential privacy.")
        return part
    head = ("Job", "level", "ε (largest)", "ε (mean)", "δ", "noise", "clip", "accountant", "neighbours")
    part.tables.append(
        Table.of("ε that each job spent; privacy.csv in its folder lists every use", head, rows)
    )
    if released:
        part.notes.append(f"ε holds only if nobody sees: {', '.join(sorted(released))}.")
    return part


def what_was_run(result: ExperimentResult) -> PagePart:
    """Return the part with the settings, versions and machine of the run, and commands to repeat it."""
    part = PagePart("settings", "What was run")
    facts: dict[str, dict[str, None]] = {}
    for summary, store in result.jobs:
        for name, value in _facts(summary, store.config):
            facts.setdefault(name, {})[value] = None
    rows = [(name, "; ".join(values)) for name, values in facts.items()]
    part.tables.append(Table.of("Versions, machine and data of the jobs", ("", "of the jobs"), rows))
    part.notes.append("To run the same again, from the settings below in a file or from the result folder:")
    folders = " ".join(quoted(path) for path in result.folders)
    part.code = [
        f"tailorfl compare config.yaml --out again\ntailorfl report {folders} --out report.html",
        f"# config.yaml\n{result.config.to_yaml()}",
    ]
    return part


def _facts(summary: dict[str, Any], stored: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield from ((name, str(value)) for name, value in (stored.get("environment") or {}).items())
    yield "engine", str(summary.get("engine", MISSING))
    yield "data", str(stored.get("source", MISSING))
    if isinstance(stored.get("data"), dict):
        yield "digest of the samples", samples_of(stored) or MISSING
    yield "clients", str(summary.get("clients", MISSING))
    yield "rounds", str(summary["rounds"])
    yield "seed", str(summary["seed"])


def tuning(folders: Sequence[Path], look: Look, names: Mapping[str, str]) -> PagePart:
    """Return the part with the chosen settings and the expected score of the best of n trials.

    `names` are the display names of labels.

    Raises:
        RunError: a tuning.json cannot be read.
    """
    part = PagePart("tuning", "How settings were chosen")
    table: list[list[str | Cell]] = []
    rows: Rows = []
    metric = look.metric
    for file, tuned in tunings(folders).items():
        try:
            metric, budget = str(tuned["metric"]), _settings(tuned["budget"])
            part.notes.append(
                f"Sampler: {tuned['sampler']}; budget of each method: {budget}; by validation {metric}."
            )
            for label, method in tuned["methods"].items():
                name = names.get(label, label)
                scores = [score for trial in method["trials"] if (score := _score_of(trial)) is not None]
                table.append(_tuned_row(name, method, len(scores)))
                rows += _expected(name, scores, metric)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"'{file}' is damaged ({error!r}); restore it from a copy, or move it away"
            ) from error
    if not table:
        part.left_out.append(f"Chosen settings and edges: the folder has no {TUNING}.")
        return part
    head = ("Method", "chosen", "at an edge of its space", "rank", "trials", "seconds in total")
    part.tables.append(Table.of("Chosen by validation", head, table))
    if rows:
        part.data["tuning"] = rows
        part.charts.append(_expectation(look, rows, metric))
        part.notes.append(
            "The curve is the expected validation score of the best of n trials (Dodge et al., 2019): a method whose "
            "curve still rises needs more trials. A setting at the edge of its space may be better beyond it."
        )
    return part


def _settings(values: Any) -> str:
    """Return settings as one line."""
    if isinstance(values, Mapping):
        return ", ".join(f"{name}={value}" for name, value in values.items()) or MISSING
    if isinstance(values, list | tuple):
        return ", ".join(map(str, values)) or MISSING
    return MISSING if values is None else str(values)


def _tuned_row(name: str, method: Mapping[str, Any], complete: int) -> list[str | Cell]:
    trials = method["trials"]
    seconds = math.fsum(float(trial.get("seconds") or 0.0) for trial in trials)
    facts = [_settings(method[key]) for key in ("chosen", "edges", "rank")]
    return [name, *facts, f"{complete} of {len(trials)}", Cell(human_seconds(seconds), seconds)]


def _score_of(trial: Mapping[str, Any]) -> float | None:
    score = trial.get("score")
    return None if score is None or not math.isfinite(float(score)) else float(score)


def _expected(name: str, scores: list[float], metric: str) -> Rows:
    """Return the expected best of 1, 2, ... trials."""
    draws = list(range(1, len(scores) + 1))
    values = expected_best(scores, draws, higher_is_better=metric not in LOWER_IS_BETTER) if scores else []
    return [
        {"label": name, "trials": n, **dict.fromkeys(("mean", "low", "high"), charts.number(value))}
        for n, value in zip(draws, values, strict=True)
    ]


def _expectation(look: Look, rows: Rows, metric: str) -> Chart:
    names = tuple(dict.fromkeys(row["label"] for row in rows))
    look = Look(metric, look.labels if set(names) <= set(look.labels) else names)
    x = charts.quantity("trials", "trials", axis={"tickMinStep": 1, "format": "d"})
    tips = [
        charts.category("label", "method"),
        charts.quantity("trials"),
        charts.quantity("mean", f"validation {look.name}", format=look.format),
    ]
    spec = lines(look, "tuning", x, tips)
    spec["encoding"]["color"]["legend"] = {"title": None, "orient": "top", "columns": 3}
    return Chart(
        "tuning", spec, f"Expected validation {look.name} of the best of n trials, a line for each method."
    )
